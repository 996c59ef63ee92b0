"""Acceptance rates: how much all requests count for one, and how soon what was assumed at first no longer does."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.shard.requests.request import Source
from lorikeet.shard.speculation.states import PRIOR_WEIGHT, DraftStates

WIDTH = 8


class Group:
    """A group of requests, one after the other, whose drafts are accepted with some rates in turn."""

    def __init__(self, source: Source = Source.DRAFT) -> None:
        self.states, self.kind = DraftStates(), ("", source, False)
        self.group = self.states.add_group(self.kind)
        self.requests: list[int] = []

    def add(self) -> int:
        self.requests.append(self.states.add(self.kind, self.group))
        return self.requests[-1]

    def observe(self, row: int, num_accepted: int, was_rejected: bool) -> None:
        for each in (row, self.group):
            self.states.count(each, num_accepted, int(was_rejected))

    def train(self, rates: Sequence[float], num_requests: int = 40, num_steps: int = 25) -> None:
        choice = random.Random(5)
        for number in range(num_requests):
            own = self.add()
            for _ in range(num_steps):
                num_right = 0
                while num_right < WIDTH and choice.random() < rates[number % len(rates)]:
                    num_right += 1
                self.observe(own, num_right, num_right < WIDTH)

    def rates(self, row: int) -> list[float]:
        """Of the first draft, and of each further one."""
        return self.states.rates(np.array([row]), np.array([self.group]))[0].tolist()


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.94])
def test_the_group_counts_most_for_a_new_request(rate: float) -> None:
    group = Group()
    group.train([rate])
    unlucky = group.add()
    for _ in range(3):
        group.states.count(unlucky, 1, 1)
    assert group.rates(unlucky)[1] == pytest.approx(rate * PRIOR_WEIGHT / (PRIOR_WEIGHT + 3), abs=0.12)


def test_each_request_counts_most_once_it_has_many_drafts() -> None:
    group = Group()
    group.train([0.95, 0.3], num_steps=100)
    good, bad = (group.rates(own)[1] for own in group.requests[-2:])
    assert good > 0.85 and bad < 0.55


def test_before_anything_is_known_the_rate_of_the_source_counts() -> None:
    group = Group(Source.LOOKUP)
    assert group.rates(group.add())[0] == pytest.approx(0.6)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_what_was_assumed_at_first_fades(rate: float) -> None:
    group = Group()
    group.train([rate])
    assert group.rates(group.add())[0] == pytest.approx(rate, abs=0.01)


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), min_size=1, max_size=40)


@given(STEPS, st.randoms(use_true_random=False))
def test_many_steps_at_once_count_as_one_by_one(steps: list[tuple[int, int, bool]], shuffle: random.Random) -> None:
    """Of several rows, in the order that is given, whatever their places."""
    one_by_one, at_once = Group(), Group()
    for group in (one_by_one, at_once):
        for _ in range(4):
            group.add()
    for number, num_accepted, was_rejected in steps:
        one_by_one.observe(one_by_one.requests[number], num_accepted, was_rejected)
    found = [(order, at_once.requests[number], *others) for order, (number, *others) in enumerate(steps)]
    found += [(order, at_once.group, *others) for order, (_, *others) in enumerate(steps)]
    shuffle.shuffle(found)
    order, rows, num_accepted, rejected = np.array(found).T
    at_once.states.observe(rows, order, num_accepted, rejected)
    assert at_once.states.counts == pytest.approx(one_by_one.states.counts)
