"""The words of a proof: a case is one measured thing with its raw values, a part is cases measured together, a bar is
what they must reach. Knows how a figure and its verdict follow from raw values, and nothing of how they were measured.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from benchmarks.figures import Figure, figure, figure_of

Raw = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One measured thing. A failed one has an error and keeps what it saw."""

    name: str
    raw: Raw
    error: str = ""


Cases = Generator[Case, None, None]
"""Measured one by one; closing it ends what it started."""


@dataclass(frozen=True)
class Part:
    """Cases measured by one run of at most ten minutes."""

    name: str
    measure: Callable[[frozenset[str]], Cases]
    """Yields cases one by one; is told the names of those that an interrupted run has finished."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fixed before the run: lengths, rounds, seeds, flags."""
    void: Callable[[Sequence[Raw]], str] = lambda raws: ""
    """Why the run says nothing, or an empty text."""


class Over(Enum):
    """How the values of all cases become one figure."""

    MEDIAN = "median over rounds, 95 % bootstrap interval"
    SUM = "sum over cases"
    WORST = "worst case"
    POOLED = "of all rounds' samples together, 95 % bootstrap interval over rounds"
    """For high percentiles of rounds with few samples each: the 99th of a hundred is the slowest one."""


@dataclass(frozen=True)
class Bar:
    """What the cases of a part must reach."""

    name: str
    part: str
    num_cases: int
    value: Callable[[Raw], float]
    """The value of one case, from its raw values alone."""
    wanted: float | None
    """None for a figure that is told but not held."""
    at_least: bool = True
    unit: str = ""
    over: Over = Over.MEDIAN

    def measured(self, raws: Sequence[Raw]) -> Figure:
        if self.over is Over.POOLED:
            return figure_of(raws, lambda chosen: self.value(pooled(chosen)))
        values = [self.value(raw) for raw in raws]
        if self.over is Over.MEDIAN:
            return figure(values)
        total = sum(values) if self.over is Over.SUM else (min(values) if self.at_least else max(values))
        return Figure(total, total, total)

    def reaches(self, low: float, high: float) -> bool:
        """A bar of ≥ is held by the interval's lower end, one of ≤ by its upper."""
        if self.wanted is None:
            return True
        return low >= self.wanted if self.at_least else high <= self.wanted


def pooled(raws: Sequence[Raw]) -> dict[str, Any]:
    """One round with the samples of all: lists are joined, of all else the last one's counts."""
    joined: dict[str, Any] = {}
    for name in raws[-1]:
        values = [raw[name] for raw in raws]
        if isinstance(values[-1], Mapping):
            joined[name] = pooled(values)
        else:
            joined[name] = [each for value in values for each in value] if isinstance(values[-1], list) else values[-1]
    return joined


def raw_value(name: str, raw: Raw) -> float:
    """One of the raw values as it is."""
    return float(raw[name])


def verdict(bar: Bar, cases: Sequence[Case], void: str) -> tuple[str, Figure | None]:
    """`holds`, `missed`, `void` or `failed`, with the figure where every case has a value."""
    if any(case.error for case in cases) or len(cases) != bar.num_cases:
        return "failed", None
    measured = bar.measured([case.raw for case in cases])
    if void:
        return "void", measured
    return ("holds" if bar.reaches(measured.low, measured.high) else "missed"), measured
