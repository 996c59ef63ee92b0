"""What drafts cost: estimated seconds of steps, and which draft tokens of several offers give the most expected tokens
per second. Imports no torch and reads no clock.

Steps are timed by their tokens and the positions these attend to.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, log2
from statistics import median, median_low
from typing import Self

import numpy as np
import numpy.typing as npt

NUM_SAMPLES = 7
FEW = 3
"""With fewer samples the least counts: a single measurement may have been disturbed."""
EXACT = 32
"""Up to this number of tokens each number has its own samples."""
PER_DOUBLING = 32
"""Buckets between one number of tokens and its double, above EXACT."""
FORGOTTEN = 2000
"""Steps after which the samples of an unused number are dropped."""
REPLACED = 32
"""A full bucket gets a new sample after this many steps at the earliest: slower than the machine's speed changes."""
FOLLOWED, MOST_FOLLOWED = 1 / 8, 1.25
"""Part of the error of the newest steps, by their median, that updates the machine's estimated speed, and the largest
error that counts. A mean would lie above the medians that are expected, and the machine would look slower and slower.
"""
LEAST_SECONDS = 1e-6
"""Clocks of host and device may differ, and no step takes no time."""
LEAST_TOKENS = 1 / 32
"""The least part of a step that is not attention."""
MEAN_OVER, MEMORY = 64, 0.998
"""For attention: steps that the means of a number of tokens cover, and the decay per step of the slope's sums."""


@dataclass
class _Samples:
    """Steps in one bucket of numbers of tokens."""

    num_tokens: int
    measured: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    """Seconds, attended positions, and the machine's slowness."""
    newest: int = 0
    """Number of the last step in the bucket."""
    sampled: int = 0
    """Number of the last step in the bucket that was sampled."""
    _known: tuple[float, float] | None = None
    """What `typical` found last, and for what."""

    def typical(self, per_attended: float) -> float:
        """Seconds without attention, at slowness 1. Asked for twice between two steps."""
        if self._known is not None and self._known[0] == per_attended:
            return self._known[1]
        found = [max(s - per_attended * num, LEAST_TOKENS * s) / slowness for s, num, slowness in self.measured]
        value = median_low(found) if len(found) >= FEW else min(found)
        self._known = per_attended, value
        return value

    def add(self, seconds: float, num_attended: int, slowness: float) -> None:
        """Record a step."""
        self.measured.append((seconds, num_attended, slowness))
        self._known = None


@dataclass
class _Means:
    """Means over the steps of one number of tokens."""

    num_attended: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0


class _Attention:
    """Seconds for each attended position: a regression line through the steps of each number of tokens, with one slope
    for all. Each number has its own level, so that the cost of tokens does not matter here.
    """

    def __init__(self) -> None:
        self._means: dict[int, _Means] = {}
        self._covariance = self._variance = 0.0

    @property
    def slope(self) -> float:
        return max(0.0, self._covariance / self._variance) if self._variance else 0.0

    def observe(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        means = self._means.setdefault(num_tokens, _Means())
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


class Speed:
    """The machine's speed. It varies for all steps alike, so that frequent steps show it for rare ones."""

    def __init__(self) -> None:
        self.slowness = 1.0
        """Now, without attention, whose slope adapts by itself."""
        self.beyond: deque[float] = deque(maxlen=NUM_SAMPLES)
        """Logarithms of measured over expected seconds of the newest steps."""


class StepCosts:
    """Seconds by number of tokens, interpolated between measured numbers, plus attention by attended positions. Above
    the largest number the estimate is flat, and below the smallest it falls with the number: what was never measured
    looks cheap, and so is tried.

    No step takes longer than one with more tokens. What is measured seldom may have been disturbed each time: one token
    that looks slow would make drafts look good, so that it is never measured again.

    The machine's speed varies over time for all numbers alike. It is estimated separately: else a number that is used,
    and so measured, in a slow minute would look worse than those last measured in a fast one.
    """

    def __init__(self, speed: "Speed | None" = None) -> None:
        """`speed`: of the machine, where several costs share it."""
        self._samples: dict[int, _Samples] = {}
        self._num_observed = 0
        self._speed = speed or Speed()
        self._attention = _Attention()
        self._curve: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float] | None = None

    def observe(self, num_tokens: int, num_attended: int, seconds: float) -> None:
        """Record a step."""
        seconds = max(seconds, LEAST_SECONDS)
        self._num_observed += 1
        bucket = _bucket(num_tokens)
        samples = self._samples.setdefault(bucket, _Samples(num_tokens))
        if samples.measured:
            slope = self._attention.slope
            expected = samples.typical(slope) * self._speed.slowness + slope * num_attended
            self._speed.beyond.append(log(seconds / expected))
            beyond = min(max(median(self._speed.beyond), -log(MOST_FOLLOWED)), log(MOST_FOLLOWED))
            self._speed.slowness *= exp(FOLLOWED * beyond)
        self._attention.observe(num_tokens, num_attended, seconds)
        samples.newest = self._num_observed
        if len(samples.measured) == NUM_SAMPLES and samples.newest < samples.sampled + REPLACED:
            return
        samples.sampled = samples.newest
        samples.add(seconds, num_attended, self._speed.slowness)
        self._curve = None

    @property
    def is_known(self) -> bool:
        """Whether any step was recorded."""
        return bool(self._samples)

    def expected(self, nums_tokens: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """[n] seconds of steps with these numbers of tokens, without attention. Only where `is_known`."""
        numbers, seconds, _ = self._current()
        wanted = np.asarray(nums_tokens, np.float64)
        return self._speed.slowness * np.interp(wanted, numbers, seconds) * np.minimum(1.0, wanted / numbers[0])

    def estimate(self, num_tokens: int, num_attended: int) -> float:
        """Seconds of one step; 0 before any step was recorded."""
        samples, slope = self._samples.get(_bucket(num_tokens)), self._attention.slope
        if samples is not None and self._is_fresh(samples):  # without the curve, which new samples make obsolete
            return self._speed.slowness * samples.typical(slope) + slope * num_attended
        return float(self.expected([num_tokens])[0]) + slope * num_attended if self._samples else 0.0

    @property
    def per_attended(self) -> float:
        """Seconds for each attended position. Only where `is_known`."""
        return self._current()[2]

    def _is_fresh(self, samples: _Samples) -> bool:
        return samples.newest > self._num_observed - FORGOTTEN

    def _current(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
        """[n] numbers of tokens, [n] their seconds, and those for an attended position."""
        if self._curve is None:
            slope = self._attention.slope
            fresh = sorted(filter(self._is_fresh, self._samples.values()), key=lambda each: each.num_tokens)
            numbers = np.array([each.num_tokens for each in fresh], np.float64)
            seconds = np.array([each.typical(slope) for each in fresh], np.float64)
            self._curve = (numbers, np.minimum.accumulate(seconds[::-1])[::-1], slope)
        return self._curve


class DraftCosts:
    """Seconds of a draft model's passes by the number of requests it drafts for.

    The first pass of a step takes in what was verified before it and finds the draft model's weights out of all caches.
    It is kept apart from the passes after it: a mean of both would overestimate every deeper draft, the more so the
    fewer are taken.
    """

    def __init__(self) -> None:
        self.first, self.further = StepCosts(), StepCosts()

    def observe(self, num_drawn: int, num_attended: int, seconds: tuple[float, float], num_passes: int) -> None:
        """Record a step with drafts for `num_drawn` requests: seconds of the first pass, and of all others together."""
        first, further = seconds
        if first > 0:
            self.first.observe(num_drawn, num_attended, first)
        if num_passes > 1 and further > 0:
            self.further.observe(num_drawn, num_attended, further / (num_passes - 1))

    def expected(self, num_drawn: int, num_attended: int, most: int) -> npt.NDArray[np.float64]:
        """[most + 1] seconds of 0, 1, … `most` passes, each of which attends to `num_attended` positions; 0 before any
        pass was recorded.
        """
        if not (num_drawn and self.first.is_known):
            return np.zeros(most + 1)
        first, further = (
            float(costs.expected([num_drawn])[0]) + costs.per_attended * num_attended
            for costs in (self.first, self.further if self.further.is_known else self.first)
        )
        passes = np.arange(most + 1)
        return np.minimum(passes, 1) * first + np.maximum(passes - 1, 0) * further


def _bucket(num_tokens: int) -> int:
    return num_tokens if num_tokens <= EXACT else EXACT + int(PER_DOUBLING * log2(num_tokens / EXACT)) + 1


@dataclass(frozen=True)
class Load:
    """A step apart from the drafts whose number is being chosen."""

    num_sampled: int
    """Requests that get a token."""
    num_tokens: int
    """Tokens of the step without drafts."""
    num_attended: int = field(default=0, compare=False)
    """Positions that these attend to, summed over them; changes with each step of the same requests."""
    num_fixed: int = 0
    """Draft tokens of other requests."""

    @property
    def has_prompts(self) -> bool:
        return self.num_tokens > self.num_sampled

    def __add__(self, other: "Load") -> "Load":
        """Both in one step."""
        return Load(
            self.num_sampled + other.num_sampled,
            self.num_tokens + other.num_tokens,
            self.num_attended + other.num_attended,
            self.num_fixed + other.num_fixed,
        )


NO_LOAD = Load(0, 0)


@dataclass(frozen=True)
class Candidates:
    """The draft tokens of several offers, the most probable first: each array has an entry for each of n tokens."""

    values: npt.NDArray[np.float64]
    """Expected tokens from each draft token, [n]."""
    owners: npt.NDArray[np.int64]
    """Index of the offer of each draft token, [n]."""
    passes: npt.NDArray[np.int64]
    """Passes of the draft model after which each draft token is known, [n]; 0 for offers of other sources."""
    attended: npt.NDArray[np.int64]
    """Positions that each draft token attends to, [n]."""
    num_offers: int
    num_drawn: int
    """Number of offers of a draft model."""

    @classmethod
    def of(
        cls,
        rates: npt.NDArray[np.float64],
        widths: npt.NDArray[np.int64],
        is_drawn: npt.NDArray[np.bool_],
        lengths: npt.NDArray[np.int64],
    ) -> Self:
        """`rates` is [offers, 2]: of the first draft, and of one after an accepted one. `widths` [offers] may be 0.
        `lengths` [offers] are those of the texts so far.
        """
        owners, depths = np.nonzero(np.arange(widths.max()) < widths[:, None])
        values = rates[owners, 0] * rates[owners, 1] ** depths
        order = np.argsort(-values, kind="stable")  # an offer's drafts stay in order: each gains less
        owners, depths = owners[order], depths[order]
        passes = np.where(is_drawn[owners], depths + 1, 0)
        num_drawn = int((is_drawn & (widths > 0)).sum())
        return cls(values[order], owners, passes, lengths[owners] + depths + 1, len(widths), num_drawn)

    def best(self, load: Load, costs: StepCosts, drafting: DraftCosts) -> tuple[float, npt.NDArray[np.int64]]:
        """The highest expected tokens per second, and the widths of all offers that give it."""
        num_tokens, num_passes = load.num_tokens + load.num_fixed, int(self.passes.max(initial=0))
        seconds = costs.expected(np.arange(num_tokens, num_tokens + len(self.values) + 1))
        per_attended = costs.per_attended
        best_rate = load.num_sampled / float(seconds[0] + per_attended * load.num_attended)
        taken: npt.NDArray[np.int64] = self.owners[:0]
        num_drafted = int(self.attended[self.passes == 1].sum()) if num_passes else 0
        draft_seconds = drafting.expected(self.num_drawn, num_drafted, num_passes)
        for depth in range(num_passes + 1 if len(self.values) else 0):
            values, owners, attended = self.values, self.owners, self.attended
            if num_passes:
                is_known = self.passes <= depth
                values, owners, attended = values[is_known], owners[is_known], attended[is_known]
            spent = seconds[1 : len(values) + 1] + per_attended * (load.num_attended + attended.cumsum())
            rates = (load.num_sampled + values.cumsum()) / (spent + draft_seconds[depth])
            last = int(rates.argmax()) if len(rates) else -1
            if last >= 0 and rates[last] > best_rate:
                best_rate, taken = float(rates[last]), owners[: last + 1]
        return best_rate, np.bincount(taken, minlength=self.num_offers)
