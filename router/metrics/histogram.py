"""Counting that is cheap enough for every token: a histogram is a bisection and two additions.

The client library's own walks the bounds one by one under a lock. Knows no names and no text form.
"""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts per bucket; without bounds only number and sum (a summary)."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        total, result = 0, []
        for bound, count in zip([*(f"{bound:.6g}" for bound in self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            result.append((bound, float(total)))
        return result


class Counter:
    """Numbers by the value of one label (empty: no label)."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add(self, amount: float = 1, label: str = "") -> None:
        self.values[label] = self.values.get(label, 0) + amount
