"""What steps cost by their tokens and by how far back these attend, as measured in the shard itself. Reads no clock."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, log2
from statistics import median, median_low

import numpy as np
import numpy.typing as npt

NUM_SAMPLES = 7
FEW = 3
"""With fewer samples the least counts: what was measured once may have been disturbed, and is tried again."""
EXACT = 32
"""Up to so many tokens each number has samples of its own …"""
PER_DOUBLING = 32
"""… beyond, so many numbers between one and twice as many."""
FORGOTTEN = 2000
"""Steps after which a number that no step had is tried afresh."""
REPLACED = 32
"""A number that has its samples gets a new one after so many steps at the earliest: slower than the machine changes."""
FOLLOWED, MOST_FOLLOWED = 1 / 8, 1.25
"""How much of the distance from what was expected, by the median of the newest steps, tells of the machine's present
speed, and of what at most. A mean of steps lies above the medians that are expected, and the machine would look slower
and slower.
"""
LEAST_TOKENS = 1 / 32
"""The part of a step that is not attention, at least."""
MEAN_OVER, MEMORY = 64, 0.998
"""Of attention: a number's means are over so many steps; and what part of what was known is still after one more."""


@dataclass
class _Samples:
    """Steps of one number of tokens."""

    num_tokens: int
    measured: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    """Seconds, attended positions, and the machine's slowness."""
    newest: int = 0
    """The step that had so many tokens last …"""
    sampled: int = 0
    """… and the one whose seconds are here."""

    def typical(self, per_attended: float) -> float:
        """Seconds but for attention, were the slowness 1."""
        found = [max(s - per_attended * num, LEAST_TOKENS * s) / slowness for s, num, slowness in self.measured]
        return median_low(found) if len(found) >= FEW else min(found)


@dataclass
class _Means:
    """Of the steps of one number of tokens."""

    num_attended: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0


class _Attention:
    """Seconds for each attended position: the line through steps of one number of tokens, the same slope for all
    numbers. Each number has a level of its own, so that what its tokens cost does not matter here.
    """

    def __init__(self) -> None:
        self._means: dict[int, _Means] = {}
        self._covariance = self._variance = 0.0

    @property
    def slope(self) -> float:
        return max(0.0, self._covariance / self._variance) if self._variance else 0.0

    def observe(self, bucket: int, num_attended: int, seconds: float) -> None:
        means = self._means.setdefault(bucket, _Means())
        if means.num_steps:
            further = num_attended - means.num_attended
            expected = max(means.seconds + self.slope * further, LEAST_TOKENS * means.seconds)
            seconds = min(max(seconds, expected / MOST_FOLLOWED), MOST_FOLLOWED * expected)
            beyond = seconds - means.seconds
            self._covariance = MEMORY * self._covariance + further * beyond / means.seconds**2
            self._variance = MEMORY * self._variance + further**2 / means.seconds**2
        means.num_steps = min(means.num_steps + 1, MEAN_OVER)
        means.num_attended += (num_attended - means.num_attended) / means.num_steps
        means.seconds += (seconds - means.seconds) / means.num_steps


class StepCosts:
    """Seconds by number of tokens: between two numbers that were seen, on a line. Beyond the most it is flat, and below
    the least it falls with the number: what was never tried looks cheap, and so is tried. To that comes attention, by
    the positions that all tokens attend to.

    A machine is faster in one minute than in the next, for all numbers alike. That is kept apart: else the number that
    is used, and so measured, in a slow minute would look worse than those that were last seen in a fast one.
    """

    def __init__(self) -> None:
        self._samples: dict[int, _Samples] = {}
        self._num_observed = 0
        self._slowness = 1.0
        """Of the machine now, beside attention, whose slope follows it by itself."""
        self._beyond: deque[float] = deque(maxlen=NUM_SAMPLES)
        """Of the newest steps: how far from what was expected, as a logarithm."""
        self._attention = _Attention()
        self._curve: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float] | None = None

    def observe(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """A step of so many tokens, which attended to so many positions in all, took so long."""
        self._num_observed += 1
        bucket = _bucket(num_tokens)
        samples = self._samples.setdefault(bucket, _Samples(num_tokens))
        if samples.measured:
            slope = self._attention.slope
            self._beyond.append(log(seconds / (samples.typical(slope) * self._slowness + slope * num_attended)))
            beyond = min(max(median(self._beyond), -log(MOST_FOLLOWED)), log(MOST_FOLLOWED))
            self._slowness *= exp(FOLLOWED * beyond)
        self._attention.observe(bucket, num_attended, seconds)
        samples.newest = self._num_observed
        if len(samples.measured) == NUM_SAMPLES and samples.newest < samples.sampled + REPLACED:
            return
        samples.sampled = samples.newest
        samples.measured.append((seconds, num_attended, self._slowness))
        self._curve = None

    @property
    def is_known(self) -> bool:
        """Whether anything was seen."""
        return bool(self._samples)

    def expected(self, nums_tokens: Sequence[int] | range) -> npt.NDArray[np.float64]:
        """[n] seconds of steps of so many tokens each, but for attention. Only where anything was seen."""
        numbers, seconds, _ = self._current()
        wanted = np.asarray(nums_tokens, np.float64)
        return self._slowness * np.interp(wanted, numbers, seconds) * np.minimum(1.0, wanted / numbers[0])

    @property
    def per_attended(self) -> float:
        """Seconds for each position that is attended to. Only where anything was seen."""
        return self._current()[2]

    def _current(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
        """[n] numbers of tokens, [n] their seconds, and those for an attended position."""
        if self._curve is None:
            slope = self._attention.slope
            fresh = [each for each in self._samples.values() if each.newest > self._num_observed - FORGOTTEN]
            fresh.sort(key=lambda each: each.num_tokens)
            numbers = np.array([each.num_tokens for each in fresh], np.float64)
            self._curve = (numbers, np.array([each.typical(slope) for each in fresh], np.float64), slope)
        return self._curve


def _bucket(num_tokens: int) -> int:
    return num_tokens if num_tokens <= EXACT else EXACT + int(PER_DOUBLING * log2(num_tokens / EXACT)) + 1
