"""How long steps take, by the number of their tokens, as seen lately. Knows seconds and counts; reads no clock."""

from collections import deque
from math import log2
from statistics import median_low

NUM_SAMPLES = 5
PER_DOUBLING = 8
"""Counts of tokens that are told apart, between one and twice as many."""


class Durations:
    """Medians, so that a step which was disturbed counts for nothing."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._seconds.setdefault(_bucket(num_tokens), deque(maxlen=NUM_SAMPLES)).append(seconds)

    def expected(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens should take; where none was seen, those of the next smaller that was,
        else of the smallest. 0 before anything was seen.
        """
        if not self._seconds:
            return 0.0
        bucket = _bucket(num_tokens)
        known = max((other for other in self._seconds if other <= bucket), default=min(self._seconds))
        return median_low(self._seconds[known])


def _bucket(num_tokens: int) -> int:
    return int(PER_DOUBLING * log2(num_tokens))
