"""The failures of the last minutes by kind, without any text of a request."""

import time
from collections import OrderedDict
from typing import Any

MAX_KINDS = 64


class RecentFailures:
    """Of requests to the model. Kinds are leaves of the tree of errors, so there are few."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, int], list[float]] = OrderedDict()
        """[number, time of the last] by kind and status, the latest last."""

    def add(self, kind: str, status: int) -> None:
        found = self._found.setdefault((kind, status), [0.0, 0.0])
        found[0] += 1
        found[1] = time.time()
        self._found.move_to_end((kind, status))
        if len(self._found) > MAX_KINDS:
            self._found.popitem(last=False)

    def shown(self) -> list[dict[str, Any]]:
        """The latest first."""
        return [
            {"kind": kind, "status": status, "count": int(number), "last_at": round(at, 3)}
            for (kind, status), (number, at) in reversed(self._found.items())
        ]
