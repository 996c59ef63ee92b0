"""How the status of a figure follows from cases."""

from typing import Any

import pytest

from benchmarks.evidence.figure import Case, Figure, Over, Suite, pooled, status


def cases(*values: float) -> list[Case]:
    return [Case(f"round {i}", {"x": value}) for i, value in enumerate(values)]


def state(
    found: list[Case], target: float | None, at_least: bool = True, over: Over = Over.MEDIAN, void: str = ""
) -> tuple[str, float | None]:
    figure = Figure("a figure", lambda raw: float(raw["x"]), target, at_least, over=over)
    nothing: Any = lambda: iter(())
    suite = Suite("a suite", nothing, 8, (figure,), void=lambda raws: void)
    got, _, estimate = status(figure, suite, found)
    return got, None if estimate is None else estimate.median


SPREAD = cases(0.9, 1.0, 1.1, 1.2, 1.0, 0.95, 1.05, 1.15)


@pytest.mark.parametrize(
    ("target", "at_least", "wanted"),
    [
        (0.8, True, "holds"),
        (1.02, True, "missed"),
        (1.3, False, "holds"),
        (1.03, False, "missed"),
        (None, True, "holds"),
    ],
)
def test_the_interval_decides_and_not_the_median(target: float | None, at_least: bool, wanted: str) -> None:
    got, median = state(SPREAD, target, at_least)
    assert got == wanted
    assert median == pytest.approx(1.025)


@pytest.mark.parametrize(
    ("over", "at_least", "target", "wanted"),
    [
        (Over.SUM, False, 8.35, "holds"),
        (Over.SUM, False, 8.34, "missed"),
        (Over.WORST, True, 0.9, "holds"),
        (Over.WORST, True, 0.91, "missed"),
        (Over.WORST, False, 1.2, "holds"),
        (Over.WORST, False, 1.19, "missed"),
    ],
)
def test_sums_and_worst_cases(over: Over, at_least: bool, target: float, wanted: str) -> None:
    assert state(SPREAD, target + 1e-9 if not at_least else target, at_least, over)[0] == wanted


def test_a_failed_or_missing_case_fails_the_run() -> None:
    assert state([*SPREAD[:-1], Case("round 7", {"x": 5.0}, "server ended")], 0.1) == ("failed", None)
    assert state(SPREAD[:-1], 0.1) == ("failed", None)
    assert state([*SPREAD, *cases(1.0)], 0.1) == ("failed", None)


def test_a_void_run_does_not_hold() -> None:
    assert state(SPREAD, 0.1, void="the machine was busy")[0] == "void"


def test_a_high_percentile_is_that_of_all_rounds_together() -> None:
    rounds = [{"way": {"s": [0.1] * 99 + [slow]}, "load": i} for i, slow in enumerate([0.1, 0.9, 0.1])]
    slowest = Figure("a figure", lambda raw: float(sorted(raw["way"]["s"])[-2]), 0.5, False, over=Over.POOLED)
    estimate = slowest.estimate(rounds)
    assert estimate.median == 0.1
    assert estimate.high == 0.9 and not slowest.is_reached(estimate)  # a resample with the slow one twice
    assert pooled(rounds[:2]) == {"way": {"s": [0.1] * 199 + [0.9]}, "load": 1}
