"""How a verdict follows from cases: who holds, who misses, and what says nothing."""

import pytest

from benchmarks.case import Bar, Case, Over, pooled, verdict


def cases(*values: float) -> list[Case]:
    return [Case(f"round {i}", {"x": value}) for i, value in enumerate(values)]


def bar(wanted: float | None, at_least: bool = True, over: Over = Over.MEDIAN, num_cases: int = 8) -> Bar:
    return Bar("a bar", "a part", num_cases, lambda raw: float(raw["x"]), wanted, at_least, over=over)


SPREAD = cases(0.9, 1.0, 1.1, 1.2, 1.0, 0.95, 1.05, 1.15)


@pytest.mark.parametrize(
    ("wanted", "at_least", "state"),
    [
        (0.8, True, "holds"),
        (1.02, True, "missed"),
        (1.3, False, "holds"),
        (1.03, False, "missed"),
        (None, True, "holds"),
    ],
)
def test_the_interval_decides_and_not_the_median(wanted: float | None, at_least: bool, state: str) -> None:
    got, measured = verdict(bar(wanted, at_least), SPREAD, "")
    assert got == state
    assert measured is not None
    assert measured.median == pytest.approx(1.025)


@pytest.mark.parametrize(
    ("over", "at_least", "wanted", "state"),
    [
        (Over.SUM, False, 8.35, "holds"),
        (Over.SUM, False, 8.34, "missed"),
        (Over.WORST, True, 0.9, "holds"),
        (Over.WORST, True, 0.91, "missed"),
        (Over.WORST, False, 1.2, "holds"),
        (Over.WORST, False, 1.19, "missed"),
    ],
)
def test_sums_and_worst_cases(over: Over, at_least: bool, wanted: float, state: str) -> None:
    values = [*SPREAD[:-1], Case("round 7", {"x": 1.15})]
    assert verdict(bar(wanted + 1e-9 if not at_least else wanted, at_least, over), values, "")[0] == state


def test_a_failed_or_absent_case_fails_the_run() -> None:
    failed = [*SPREAD[:-1], Case("round 7", {"x": 5.0}, "server ended")]
    assert verdict(bar(0.1), failed, "") == ("failed", None)
    assert verdict(bar(0.1), SPREAD[:-1], "") == ("failed", None)
    assert verdict(bar(0.1), [*SPREAD, *cases(1.0)], "") == ("failed", None)


def test_a_void_run_is_no_win() -> None:
    assert verdict(bar(0.1), SPREAD, "the machine was busy")[0] == "void"


def test_a_high_percentile_is_that_of_all_rounds_together() -> None:
    rounds = [
        Case(f"round {i}", {"way": {"s": [0.1] * 99 + [slow]}, "load": i}) for i, slow in enumerate([0.1, 0.9, 0.1])
    ]
    slowest = Bar("a bar", "a part", 3, lambda raw: float(sorted(raw["way"]["s"])[-2]), 0.5, False, over=Over.POOLED)
    state, measured = verdict(slowest, rounds, "")
    assert measured is not None and measured.median == 0.1
    assert measured.high == 0.9 and state == "missed"  # a resample with the slow one twice
    assert pooled([each.raw for each in rounds[:2]]) == {"way": {"s": [0.1] * 199 + [0.9]}, "load": 1}
