"""What steps cost by the number of their tokens, as measured in the shard itself. Reads no clock."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2
from statistics import median_low

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
REPLACED = 8
"""A number that has its samples gets a new one after so many steps at the earliest: slower than the machine changes."""
FOLLOWED, MOST_FOLLOWED = 1 / 8, 1.25
"""How much of a step's distance from what was expected tells of the machine's present speed, and of what at most."""


@dataclass
class _Samples:
    num_tokens: int
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    newest: int = 0
    """The step that had so many tokens last …"""
    sampled: int = 0
    """… and the one whose seconds are here."""

    @property
    def typical(self) -> float:
        return median_low(self.seconds) if len(self.seconds) >= FEW else min(self.seconds)


class StepCosts:
    """Seconds by number of tokens: between two numbers that were seen, on a line. Beyond the most it is flat, and below
    the least it falls with the number: what was never tried looks cheap, and so is tried.

    A machine is faster in one minute than in the next, for all numbers alike. That is kept apart: else the number that
    is used, and so measured, in a slow minute would look worse than those that were last seen in a fast one.
    """

    def __init__(self) -> None:
        self._samples: dict[int, _Samples] = {}
        self._num_observed = 0
        self._slowness = 1.0
        """Of the machine now; samples are divided by it."""
        self._curve: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._num_observed += 1
        samples = self._samples.setdefault(_bucket(num_tokens), _Samples(num_tokens))
        if samples.seconds:
            beyond = seconds / (samples.typical * self._slowness)
            self._slowness *= min(max(beyond, 1 / MOST_FOLLOWED), MOST_FOLLOWED) ** FOLLOWED
        samples.newest = self._num_observed
        if len(samples.seconds) == NUM_SAMPLES and samples.newest < samples.sampled + REPLACED:
            return
        samples.sampled = samples.newest
        samples.seconds.append(seconds / self._slowness)
        self._curve = None

    @property
    def is_known(self) -> bool:
        """Whether anything was seen."""
        return bool(self._samples)

    def expected(self, nums_tokens: Sequence[int] | range) -> npt.NDArray[np.float64]:
        """[n] seconds of steps of so many tokens each. Only where anything was seen."""
        if self._curve is None:
            fresh = [each for each in self._samples.values() if each.newest > self._num_observed - FORGOTTEN]
            fresh.sort(key=lambda each: each.num_tokens)
            self._curve = (
                np.array([each.num_tokens for each in fresh], np.float64),
                np.array([each.typical for each in fresh], np.float64),
            )
        wanted = np.asarray(nums_tokens, np.float64)
        found = np.interp(wanted, *self._curve) * np.minimum(1.0, wanted / self._curve[0][0])
        return self._slowness * found


def _bucket(num_tokens: int) -> int:
    return num_tokens if num_tokens <= EXACT else EXACT + int(PER_DOUBLING * log2(num_tokens / EXACT)) + 1
