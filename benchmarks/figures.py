"""From raw values to a figure: medians, percentiles and bootstrap intervals. Knows no benchmark."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Figure:
    """A median and its bootstrap interval over rounds."""

    median: float
    low: float
    high: float


def figure(values: Sequence[float], seed: int = 0) -> Figure:
    """Median of `values` with the percentile bootstrap interval; the same values give the same interval."""
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = (1 - CONFIDENCE) / 2
    return Figure(median(values), percentile(medians, 100 * outside), percentile(medians, 100 * (1 - outside)))


def percentile(values: Sequence[float], percent: float) -> float:
    """Smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]
