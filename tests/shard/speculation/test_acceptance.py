"""Acceptance rates: how much the group counts where requests are similar, and where they differ."""

import random
from collections.abc import Sequence

import pytest

from lorikeet.shard.speculation.acceptance import FIRST_WEIGHT, WEIGHTS, Acceptance, Group
from lorikeet.shard.speculation.types import Source

WIDTH = 8


def trained(rates: Sequence[float], num_requests: int = 40, num_steps: int = 25) -> tuple[Group, list[Acceptance]]:
    """A group of requests, one after the other, whose drafts are accepted with these rates in turn."""
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
def test_the_group_counts_most_for_similar_requests(rate: float) -> None:
    group, _ = trained([rate])
    assert group.further.weight > 3 * FIRST_WEIGHT
    unlucky = Acceptance()
    for _ in range(3):
        group.observe(unlucky, 1, was_rejected=True)
    found = group.rates(unlucky)
    assert found.further == pytest.approx(rate, abs=0.12)


def test_each_request_counts_most_where_requests_differ() -> None:
    group, requests = trained([0.95, 0.3])
    assert group.further.weight < trained([0.9])[0].further.weight / 3
    good, bad = (group.rates(own).first for own in requests[-2:])
    assert good > 0.85 and bad < 0.5


def test_before_anything_is_known_a_prior_counts() -> None:
    group = Group(Source.LOOKUP)
    assert group.first.weight == pytest.approx(FIRST_WEIGHT)
    assert group.rates(Acceptance()).first == pytest.approx(0.6)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_certainty_keeps_the_weight_in_bounds(rate: float) -> None:
    group, _ = trained([rate])
    assert WEIGHTS[0] <= group.first.weight <= WEIGHTS[1]
    assert group.rates(Acceptance()).first == pytest.approx(rate, abs=0.05)
