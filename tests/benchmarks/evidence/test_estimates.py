"""Medians, percentiles and bootstrap intervals."""

import random
from statistics import median

import pytest

from benchmarks.evidence.figure import median_of, percentile


def test_the_same_values_give_the_same_interval() -> None:
    values = [1.0, 1.1, 0.9, 1.3, 1.05, 0.97, 1.2, 1.01]
    assert median_of(values) == median_of(values)
    assert median_of(values).median == median(values)


def test_equal_values_leave_no_interval() -> None:
    assert median_of([2.0] * 8).low == median_of([2.0] * 8).high == 2.0


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    draw = random.Random(5)
    covered = 0
    for _ in range(60):
        got = median_of([draw.gauss(10, 1) for _ in range(8)])
        covered += got.low <= 10 <= got.high
    assert 50 <= covered <= 60


@pytest.mark.parametrize(("percent", "value"), [(99, 99), (50, 50), (100, 100), (1, 1), (0, 1)])
def test_percentile_of_a_hundred_values(percent: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value


def test_the_99th_percentile_of_sixty_values_is_the_largest() -> None:
    assert percentile([float(i) for i in range(60)], 99) == 59
