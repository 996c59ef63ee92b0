"""Acceptance rates: how much all requests count for one, and how soon what was assumed at first no longer does."""

import random
from collections.abc import Sequence

import pytest

from lorikeet.shard.requests.request import Source
from lorikeet.shard.speculation.costs import PRIOR_WEIGHT, Acceptance, DraftState

WIDTH = 8


def trained(rates: Sequence[float], num_requests: int = 40, num_steps: int = 25) -> tuple[Acceptance, list[Acceptance]]:
    """A group of requests, one after the other, whose drafts are accepted with these rates in turn."""
    group, choice, requests = DraftState.of_group(("", Source.DRAFT, False)).acceptance, random.Random(5), []
    for number in range(num_requests):
        own = Acceptance()
        requests.append(own)
        for _ in range(num_steps):
            num_right = 0
            while num_right < WIDTH and choice.random() < rates[number % len(rates)]:
                num_right += 1
            for acceptance in (group, own):
                acceptance.observe(num_right, num_right < WIDTH)
    return group, requests


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.94])
def test_the_group_counts_most_for_a_new_request(rate: float) -> None:
    group, _ = trained([rate])
    unlucky = Acceptance()
    for _ in range(3):
        unlucky.observe(1, was_rejected=True)
    assert unlucky.rates(group).further == pytest.approx(rate * PRIOR_WEIGHT / (PRIOR_WEIGHT + 3), abs=0.12)


def test_each_request_counts_most_once_it_has_many_drafts() -> None:
    group, requests = trained([0.95, 0.3], num_steps=100)
    good, bad = (own.rates(group).further for own in requests[-2:])
    assert good > 0.85 and bad < 0.55


def test_before_anything_is_known_the_rate_of_the_source_counts() -> None:
    group = DraftState.of_group(("", Source.LOOKUP, False)).acceptance
    assert Acceptance().rates(group).first == pytest.approx(0.6)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_what_was_assumed_at_first_fades(rate: float) -> None:
    group, _ = trained([rate])
    assert Acceptance().rates(group).first == pytest.approx(rate, abs=0.01)
