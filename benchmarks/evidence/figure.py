"""Terms of the evidence: a case is one measured thing with its raw values, a suite measures cases together, and a
figure is what follows from the cases of a suite, with the target it should reach.

How anything is measured is the business of the suites.
"""

import json
import random
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from statistics import median
from typing import Any, TypeVar

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


Raw = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One measured thing. A failed case has an error and keeps the values it has."""

    name: str
    raw: Raw
    error: str = ""


Cases = Generator[Case, None, None]
"""Measured one by one; closing the generator stops what it started."""


def in_rounds(count: int, measure: Callable[[int], Raw | Case]) -> Cases:
    """One case per round, after one that warms up, whose number is -1. `measure` gives a round's case or raw values."""
    for number in range(-1, count):
        result = measure(number)
        if number >= 0:
            yield result if isinstance(result, Case) else Case(f"round {number}", result)


class Over(Enum):
    """How the values of all cases become one figure."""

    MEDIAN = "median over rounds, 95 % bootstrap interval"
    SUM = "sum over cases"
    WORST = "worst case"
    POOLED = "of all rounds' samples together, 95 % bootstrap interval over rounds"
    """For high percentiles of rounds with few samples each: the 99th of a hundred is the slowest one."""


@dataclass(frozen=True)
class Figure:
    """A published number."""

    name: str
    value: Callable[[Raw], float]
    """The value of one case, from only its raw values."""
    target: float | None = None
    """None for a figure without a target."""
    at_least: bool = True
    unit: str = ""
    over: Over = Over.MEDIAN

    def estimate(self, raws: Sequence[Raw]) -> Estimate:
        if self.over is Over.POOLED:
            return bootstrap(raws, lambda chosen: self.value(pooled(chosen)))
        values = [self.value(raw) for raw in raws]
        if self.over is Over.MEDIAN:
            return median_of(values)
        total = sum(values) if self.over is Over.SUM else (min(values) if self.at_least else max(values))
        return Estimate(total, total, total)

    def is_reached(self, estimate: Estimate) -> bool:
        """A target of ≥ is reached by the interval's lower end, one of ≤ by its upper end."""
        if self.target is None:
            return True
        return estimate.low >= self.target if self.at_least else estimate.high <= self.target


@dataclass(frozen=True)
class Suite:
    """Cases that are measured by one run, and the figures that follow from them."""

    name: str
    measure: Callable[[], Cases]
    num_cases: int
    figures: tuple[Figure, ...]
    model: str = ""
    dtype: str = ""
    peer: str = ""
    void: Callable[[Sequence[Raw]], str] = lambda raws: ""
    """Why the run says nothing, or an empty text."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings other than the constants of the module that measures."""

    @property
    def group(self) -> str:
        """The word that the names of related suites begin with."""
        return self.name.partition("-")[0]

    def is_among(self, names: Sequence[str] | None) -> bool:
        """Whether these names of suites or groups have this one. No names stand for every suite."""
        return not names or bool({self.name, self.group} & set(names))

    @property
    def settings(self) -> dict[str, Any]:
        """The constants of the module that measures: lengths, rounds, seeds, flags."""
        measure = self.measure.func if isinstance(self.measure, partial) else self.measure
        constants = vars(sys.modules[measure.__module__]).items()
        plain = {name.lower(): value for name, value in constants if name.isupper() and _is_plain(value)}
        return dict(json.loads(json.dumps({**plain, **self.options})))


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def pooled(raws: Sequence[Raw]) -> dict[str, Any]:
    """One round with the samples of all: lists are joined, other values are the last round's."""
    joined: dict[str, Any] = {}
    for name in raws[-1]:
        values = [raw[name] for raw in raws]
        if isinstance(values[-1], Mapping):
            joined[name] = pooled(values)
        else:
            joined[name] = [item for value in values for item in value] if isinstance(values[-1], list) else values[-1]
    return joined


def raw_value(name: str, raw: Raw) -> float:
    """One of the raw values as it is."""
    return float(raw[name])


def status(figure: Figure, suite: Suite, cases: Sequence[Case]) -> tuple[str, str, Estimate | None]:
    """`holds`, `missed`, `void` or `failed`, the reason of the last two, and the estimate if every case has a value."""
    error = next((case.error for case in cases if case.error), "")
    if error or len(cases) != suite.num_cases:
        return "failed", error or f"{len(cases)} of {suite.num_cases} cases", None
    raws = [case.raw for case in cases]
    estimate = figure.estimate(raws)
    if reason := suite.void(raws):
        return "void", reason, estimate
    return ("holds" if figure.is_reached(estimate) else "missed"), "", estimate
