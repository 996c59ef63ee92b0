"""What is learnt of steps' costs: between numbers that were seen, and through minutes in which all steps are slow."""

import pytest

from shard.speculation.costs import StepCosts


def seen(*numbers: int, seconds: float = 1.0) -> StepCosts:
    """Costs of a machine whose step takes one second and a hundredth for each token."""
    costs = StepCosts()
    for _ in range(10):
        for number in numbers:
            costs.observe(number, seconds * (1 + number / 100))
    return costs


def test_between_two_numbers_it_is_a_line() -> None:
    costs = seen(2, 6)
    assert list(costs.expected([2, 4, 6])) == pytest.approx([1.02, 1.04, 1.06], rel=1e-3)


def test_what_was_never_tried_looks_cheap() -> None:
    costs = seen(2, 6)
    assert list(costs.expected([1, 9])) == pytest.approx([0.51, 1.06], rel=1e-3)


def test_a_slow_minute_is_one_for_all_numbers() -> None:
    costs = seen(2, 6)
    for _ in range(100):
        costs.observe(6, 1.5 * 1.06)
    narrow, wide = costs.expected([2, 6])
    assert wide == pytest.approx(1.5 * 1.06, rel=0.02)
    assert wide / narrow == pytest.approx(1.06 / 1.02, rel=0.02)


def test_one_slow_step_changes_little() -> None:
    costs = seen(2, 6)
    costs.observe(6, 50.0)
    assert list(costs.expected([2, 6])) == pytest.approx([1.02, 1.06], rel=0.03)
