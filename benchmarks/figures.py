"""From raw values to a figure: medians, percentiles and bootstrap intervals. Knows no benchmark."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

RESAMPLES = 10_000
CONFIDENCE = 0.95
Round = TypeVar("Round")


@dataclass(frozen=True)
class Figure:
    """A median, or what stands in its place, and its bootstrap interval over rounds."""

    median: float
    low: float
    high: float


def figure(values: Sequence[float], seed: int = 0) -> Figure:
    """Median of `values` with the percentile bootstrap interval; the same values give the same interval."""
    return figure_of(values, median, seed)


def figure_of(rounds: Sequence[Round], value: Callable[[Sequence[Round]], float], seed: int = 0) -> Figure:
    """The same for a value that all rounds have together."""
    draw = random.Random(seed)
    found = sorted(value(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    outside = (1 - CONFIDENCE) / 2
    return Figure(value(rounds), percentile(found, 100 * outside), percentile(found, 100 * (1 - outside)))


def percentile(values: Sequence[float], percent: float) -> float:
    """Smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]
