"""Failures of the last minutes: what is counted, what is forgotten, and that memory is bounded."""

from typing import Any

from lorikeet.router.live_view import MAX_KINDS, WINDOW, RecentFailures


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def counts(failures: RecentFailures) -> list[Any]:
    return [(failure["kind"], failure["last_minute"], failure["count"]) for failure in failures.shown()]


def test_failures_leave_the_minute_then_the_table() -> None:
    clock = Clock()
    failures = RecentFailures(clock)
    for _ in range(3):
        failures.add("validation", 422)
    assert counts(failures) == [("validation", 3, 3)]
    clock.now += 90
    failures.add("validation", 422)
    failures.add("overloaded", 429)
    assert counts(failures) == [("overloaded", 1, 1), ("validation", 1, 4)]
    clock.now += 540
    assert counts(failures) == [("overloaded", 0, 1), ("validation", 0, 1)]
    clock.now += 300
    assert counts(failures) == []


def test_the_latest_kind_is_first() -> None:
    failures = RecentFailures(Clock())
    for kind in ("one", "two", "one"):
        failures.add(kind, 500)
    assert [failure["kind"] for failure in failures.shown()] == ["one", "two"]


def test_memory_is_bounded_in_kinds_and_in_time() -> None:
    clock = Clock()
    failures = RecentFailures(clock)
    for number in range(10_000):
        failures.add(f"kind {number % (2 * MAX_KINDS)}", 500)
        clock.now += 7
    assert len(failures.shown()) <= MAX_KINDS == len(failures._found)
    assert all(len(failure.slots) <= WINDOW + 1 for failure in failures._found.values())
    for _ in range(10_000):
        failures.add("one", 500)
        clock.now += 1
    assert len(failures._found["one", 500].slots) == WINDOW + 1


def test_a_clock_that_goes_back_loses_nothing() -> None:
    clock = Clock()
    failures = RecentFailures(clock)
    failures.add("one", 500)
    clock.now -= 30
    failures.add("one", 500)
    assert counts(failures) == [("one", 2, 2)]
