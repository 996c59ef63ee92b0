"""From values to an estimate: medians, percentiles and bootstrap intervals."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

RESAMPLES = 10_000
CONFIDENCE = 0.95
Round = TypeVar("Round")


@dataclass(frozen=True)
class Estimate:
    """A median, or another value of all rounds, and its bootstrap interval over rounds."""

    median: float
    low: float
    high: float


def median_of(values: Sequence[float], seed: int = 0) -> Estimate:
    """Median of `values` with the percentile bootstrap interval; the same values give the same interval."""
    return bootstrap(values, median, seed)


def bootstrap(rounds: Sequence[Round], value: Callable[[Sequence[Round]], float], seed: int = 0) -> Estimate:
    """The percentile bootstrap interval of a value that follows from all rounds together."""
    draw = random.Random(seed)
    resampled = sorted(value(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    outside = (1 - CONFIDENCE) / 2
    return Estimate(value(rounds), percentile(resampled, 100 * outside), percentile(resampled, 100 * (1 - outside)))


def percentile(values: Sequence[float], percent: float) -> float:
    """Smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]
