"""What is learnt of guesses: how much others' experience counts where requests are alike, and where they are not."""

import random
from collections.abc import Sequence

import pytest

from lorikeet.shard.scheduler.speculation.acceptance import FIRST_WEIGHT, WEIGHTS, Acceptance, Group
from lorikeet.shard.scheduler.speculation.types import Source

WIDTH = 8


def taught(rates: Sequence[float], num_requests: int = 40, num_steps: int = 25) -> tuple[Group, list[Acceptance]]:
    """A group of requests, one after the other, whose guesses are right with these rates by turns."""
    group, choice, requests = Group(Source.DRAFT), random.Random(5), []
    for number in range(num_requests):
        own = Acceptance()
        requests.append(own)
        for _ in range(num_steps):
            num_right = 0
            while num_right < WIDTH and choice.random() < rates[number % len(rates)]:
                num_right += 1
            group.observe(own, num_right, num_right < WIDTH)
    return group, requests


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.94])
def test_of_like_requests_the_others_count_most(rate: float) -> None:
    group, _ = taught([rate])
    assert group.further.weight > 3 * FIRST_WEIGHT
    unlucky = Acceptance()
    for _ in range(3):
        group.observe(unlucky, 1, was_rejected=True)
    found = group.rates(unlucky)
    assert found.further == pytest.approx(rate, abs=0.12)


def test_of_unlike_requests_each_counts_for_itself() -> None:
    group, requests = taught([0.95, 0.3])
    assert group.further.weight < taught([0.9])[0].further.weight / 3
    good, bad = (group.rates(own).first for own in requests[-2:])
    assert good > 0.85 and bad < 0.5


def test_before_anything_is_known_a_prior_counts() -> None:
    group = Group(Source.LOOKUP)
    assert group.first.weight == pytest.approx(FIRST_WEIGHT)
    assert group.rates(Acceptance()).first == pytest.approx(0.6)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_certainty_keeps_the_weight_in_bounds(rate: float) -> None:
    group, _ = taught([rate])
    assert WEIGHTS[0] <= group.first.weight <= WEIGHTS[1]
    assert group.rates(Acceptance()).first == pytest.approx(rate, abs=0.05)
