"""Estimated step times: between measured numbers of tokens, and while the whole machine is slow."""

import random
from statistics import fmean

import pytest

from lorikeet.shard.speculation.costs import Speed, StepCosts


def seen(*numbers: int, seconds: float = 1.0) -> StepCosts:
    """Costs of a machine whose step takes one second and a hundredth for each token."""
    costs = StepCosts()
    for _ in range(10):
        for number in numbers:
            costs.observe(number, 0, seconds * (1 + number / 100))
    return costs


def test_between_two_numbers_it_is_a_line() -> None:
    costs = seen(2, 6)
    assert list(costs.expected([2, 4, 6])) == pytest.approx([1.02, 1.04, 1.06], rel=1e-3)


def test_unmeasured_numbers_look_cheap() -> None:
    costs = seen(2, 6)
    assert list(costs.expected([1, 9])) == pytest.approx([0.51, 1.06], rel=1e-3)


def test_a_number_whose_few_steps_were_all_disturbed_does_not_look_slower_than_more_tokens() -> None:
    costs = seen(2, 6)
    for _ in range(3):
        costs.observe(1, 0, 3.0)
    assert costs.expected([1])[0] <= costs.expected([2])[0] < 1.2


def test_a_slow_machine_is_slow_for_all_numbers() -> None:
    costs = seen(2, 6)
    for _ in range(100):
        costs.observe(6, 0, 1.5 * 1.06)
    narrow, wide = costs.expected([2, 6])
    assert wide == pytest.approx(1.5 * 1.06, rel=0.02)
    assert wide / narrow == pytest.approx(1.06 / 1.02, rel=0.02)


def test_one_slow_step_changes_little() -> None:
    costs = seen(2, 6)
    costs.observe(6, 0, 50.0)
    assert list(costs.expected([2, 6])) == pytest.approx([1.02, 1.06], rel=0.03)


@pytest.mark.parametrize(("drift", "most"), [(0.0, 0.25), (0.02, 0.25), (0.02, 8.0)])
def test_attention_is_estimated_separately(drift: float, most: float) -> None:
    """Texts grow and end; a number that is seen at their beginnings alone must not look cheap for that, nor the machine
    slow at their ends, where attention takes up to `most` seconds."""
    costs, chance, slowness = StepCosts(), random.Random(5), 1.0
    estimates: list[tuple[float, ...]] = []
    for step in range(3000):
        slowness = 1 + (slowness - 1) * 0.98 + chance.gauss(0, drift / 5)
        attended = 25 * (step % 40)
        number = 2 if step % 40 == 3 else 6
        seconds = slowness * chance.gauss(1, 0.01) * (1 + number / 100 + most * attended / 1000)
        costs.observe(number, attended, 300.0 if step % 500 == 250 else seconds)
        narrow, wide = costs.expected([2, 6]) / slowness
        estimates.append((wide, wide / narrow, costs.per_attended / slowness))
    for part in (estimates[1000:2000], estimates[2000:]):
        wide, ratio, per_attended = (fmean(values) for values in zip(*part, strict=True))
        assert wide == pytest.approx(1.06, rel=0.02 if most < 1 else 0.1)
        assert ratio == pytest.approx(1.06 / 1.02, rel=0.012 if most < 1 else 0.1)
        assert per_attended == pytest.approx(most / 1000, rel=0.1)


def test_where_nothing_grows_attention_costs_nothing() -> None:
    costs = seen(2, 6)
    costs.observe(6, 10**6, 1.06)
    assert costs.per_attended == 0
    assert list(costs.expected([2, 6])) == pytest.approx([1.02, 1.06], rel=0.01)


def test_a_machine_that_stays_slow_attends_slowly() -> None:
    costs = StepCosts()
    for step in range(6000):
        attended = 25 * (step % 40)
        costs.observe(6, attended, (1.06 + attended / 1000) * (1 if step < 3000 else 2))
    assert list(costs.expected([6])) == pytest.approx([2.12], rel=0.02)
    assert costs.per_attended == pytest.approx(2 / 1000, rel=0.02)


@pytest.mark.parametrize("num_attended", [0, 500])
def test_frequently_measured_numbers_do_not_look_cheaper(num_attended: int) -> None:
    """Steps are disturbed, never hurried: the mean lies above the median. What is measured all the time must not come
    to look faster for that, on a machine that looks slower and slower."""
    ratios = []
    for seed in range(24):
        costs, chance = StepCosts(), random.Random(seed)
        for step in range(1900):
            number = 6 if step < 20 else 2
            seconds = (1 + number / 100) * (1 + chance.expovariate(20))
            costs.observe(number, number * chance.randrange(num_attended + 1), seconds)
        narrow, wide = costs.expected([2, 6])
        ratios.append(float(wide / narrow))
    assert fmean(ratios) == pytest.approx(1.06 / 1.02, rel=0.06)


def test_the_estimate_of_a_step_includes_attention() -> None:
    costs = StepCosts()
    assert costs.estimate(4, 100) == 0.0
    for attended in 20 * (0, 100):
        costs.observe(4, attended, 1.0 + attended / 1000)
    assert costs.estimate(4, 50) == pytest.approx(1.05, rel=0.01)
    assert costs.estimate(4, 500) == pytest.approx(1.5, rel=0.02)


def test_steps_of_one_kind_show_that_a_slow_moment_is_over_for_another() -> None:
    """Else a kind that looked slow, and so is not used any more, would look slow for ever."""
    speed = Speed()
    frequent, rare = StepCosts(speed), StepCosts(speed)
    for _ in range(20):
        frequent.observe(1, 0, 1.0)
        rare.observe(1, 0, 1.2)
    for _ in range(20):
        rare.observe(1, 0, 2.4)
    assert rare.expected([1])[0] > 1.8
    for _ in range(60):
        frequent.observe(1, 0, 1.0)
    assert rare.expected([1])[0] < 1.3
