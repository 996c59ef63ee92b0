"""The failures of the last minutes by kind, without any text of a request."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_KINDS = 64
SLOT_S = 10
"""Failures are counted by slots of time, so that memory does not grow with their number."""
MINUTE, WINDOW = 60 // SLOT_S, 600 // SLOT_S
"""In slots. A window ends with the running slot, and has up to one more at its begin."""


@dataclass
class _Counts:
    """Failures of one kind."""

    last_at: float = 0.0
    slots: deque[list[int]] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    """[number of the slot, failures in it], the latest last."""

    def add(self, now: float) -> None:
        self.last_at = now
        slot = int(now // SLOT_S)
        if not self.slots or self.slots[-1][0] < slot:
            self.slots.append([slot, 0])
        self.slots[-1][1] += 1

    def since(self, slot: int) -> int:
        return sum(count for each, count in self.slots if each >= slot)


class RecentFailures:
    """Failures of requests to the model. Kinds are leaves of the tree of errors, so there are few."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._found: OrderedDict[tuple[str, int], _Counts] = OrderedDict()
        """By kind and status, the latest last."""

    def add(self, kind: str, status: int) -> None:
        self._found.setdefault((kind, status), _Counts()).add(self._clock())
        self._found.move_to_end((kind, status))
        if len(self._found) > MAX_KINDS:
            self._found.popitem(last=False)

    def shown(self) -> list[dict[str, Any]]:
        """Kinds of the last ten minutes, the latest first: how many in these (`count`), and in the last one."""
        slot = int(self._clock() // SLOT_S)
        return [
            {
                "kind": kind,
                "status": status,
                "count": count,
                "last_minute": counts.since(slot - MINUTE),
                "last_at": round(counts.last_at, 3),
            }
            for (kind, status), counts in reversed(self._found.items())
            if (count := counts.since(slot - WINDOW))
        ]
