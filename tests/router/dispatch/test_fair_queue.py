"""The fair queue: no request is lost or starved, shares follow the weights, and each flow is in the order of
priorities, then of arrival.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lorikeet.router.dispatch.fair_queue import FairQueue, QueueFull

QUANTUM = 16
KEYS = ["", "a", "b", "c"]


def pop(queue: FairQueue, blocked: Container[str] = ()) -> int | None:
    """Take the next request."""
    if (request_id := queue.first(blocked)) is not None:
        queue.take(request_id)
    return request_id


class QueueMachine(RuleBasedStateMachine):
    """Random arrivals, departures, cancellations and charges, compared with a list per key."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(max_waiting=6)
        self.weights: dict[str, float] = {}
        self.waiting: dict[str, list[int]] = defaultdict(list)
        self.priorities: dict[int, float] = {}
        self.left: dict[int, str] = {}
        self.next_id = 0

    @rule(key=st.sampled_from(KEYS), tokens=st.integers(0, 100), priority=st.integers(-1, 1))
    def push(self, key: str, tokens: int, priority: int) -> None:
        self.next_id += 1
        if len(self.waiting[key]) >= 6:
            with pytest.raises(QueueFull):
                self.queue.push(key, self.next_id, tokens)
            return
        self.queue.push(key, self.next_id, tokens, self.weights.get(key, 1.0), priority)
        self.priorities[self.next_id] = priority
        place = bisect_right(self.waiting[key], priority, key=self.priorities.__getitem__)
        self.waiting[key].insert(place, self.next_id)

    @rule()
    def pop(self) -> None:
        popped = pop(self.queue)
        if popped is None:
            assert not any(self.waiting.values())
            return
        key = next(key for key, ids in self.waiting.items() if popped in ids)
        assert self.waiting[key].pop(0) == popped
        self.left[popped] = key

    @precondition(lambda self: self.left)
    @rule(data=st.data(), tokens=st.integers(0, 100))
    def come_back(self, data: st.DataObject, tokens: int) -> None:
        """A request that had left is the first of its flow again, without a limit."""
        request_id = data.draw(st.sampled_from(sorted(self.left)))
        key = self.left.pop(request_id)
        self.queue.requeue(key, request_id, tokens)
        self.waiting[key].insert(0, request_id)
        self.priorities[request_id] = -math.inf

    @rule()
    def pop_without_room(self) -> None:
        """A request that does not fit stays the next one."""
        first = self.queue.first()
        assert first == self.queue.first()
        if first is not None:
            popped = pop(self.queue)
            assert popped == first
            key = next(key for key, ids in self.waiting.items() if popped in ids)
            assert self.waiting[key].pop(0) == popped

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key, ids in self.waiting.items() if ids]))
        request_id = data.draw(st.sampled_from(self.waiting[key]))
        assert self.queue.remove(request_id)
        assert not self.queue.remove(request_id)
        self.waiting[key].remove(request_id)

    @rule(key=st.sampled_from(KEYS), tokens=st.integers(0, 500))
    def charge(self, key: str, tokens: int) -> None:
        self.queue.charge(key, tokens)

    @rule(key=st.sampled_from(KEYS), weight=st.sampled_from([0.5, 1.0, 3.0]))
    def weigh(self, key: str, weight: float) -> None:
        self.weights[key] = weight

    @rule()
    def forget(self) -> None:
        self.queue.forget_idle()

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.queue) == sum(len(ids) for ids in self.waiting.values())

    def teardown(self) -> None:
        """Whatever happened, everything that waits leaves."""
        while any(self.waiting.values()):
            self.pop()
        assert pop(self.queue) is None


def test_random_lives_of_a_queue() -> None:
    run_state_machine_as_test(QueueMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


@given(
    data=st.data(),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    most=st.sampled_from([4, 16, 60]),
)
@settings(max_examples=50, deadline=None)
def test_charged_tokens_follow_the_weights_at_any_time(data: st.DataObject, weights: list[float], most: int) -> None:
    """Keys that always wait: tokens per weight differ by no more than a quantum and the largest charges."""
    queue = FairQueue(max_waiting=1000)
    keys = [f"key {index}" for index in range(len(weights))]
    key_of, cost_of, spent = {}, {}, dict.fromkeys(keys, 0)
    weight_of: dict[str, float] = {}
    next_id = 0

    def push(key: str) -> None:
        nonlocal next_id
        next_id += 1
        key_of[next_id], cost_of[next_id] = key, data.draw(st.integers(1, most))
        queue.push(key, next_id, cost_of[next_id], weight_of[key])

    for key, weight in zip(keys, weights, strict=True):
        weight_of[key] = weight
        push(key)
        push(key)
    lightest = min(weights)
    # One turn's quantum, the request that a key may be short of, and what was charged after the fact.
    bound = QUANTUM + 3 * most / lightest
    for _ in range(60):
        popped = pop(queue)
        assert popped is not None
        key = key_of[popped]
        emitted = data.draw(st.integers(0, most))
        queue.charge(key, emitted)
        spent[key] += cost_of[popped] + emitted
        push(key)
        shares = [spent[key] / weight for key, weight in zip(keys, weights, strict=True)]
        assert max(shares) - min(shares) <= 2 * bound


def test_a_flood_does_not_starve_a_trickle() -> None:
    queue = FairQueue(max_waiting=1000)
    for request_id in range(500):
        queue.push("flood", request_id, 10)
    queue.push("trickle", 1000, 10)
    assert 1000 in [pop(queue) for _ in range(5)]


def test_flows_of_short_requests_alternate_often() -> None:
    queue = FairQueue(max_waiting=1000)
    for request_id in range(200):
        queue.push("heavy", request_id, 32, weight=3)
        queue.push("light", 1000 + request_id, 32)
    keys = []
    for _ in range(120):
        popped = pop(queue)
        assert popped is not None
        keys.append("heavy" if popped < 1000 else "light")
        queue.charge(keys[-1], 16)
    for start in range(100):
        assert 3 <= keys[start : start + 20].count("light") <= 7


def test_emitted_tokens_count() -> None:
    """Equal prompts, but one key's answers are long: it sends fewer requests."""
    queue = FairQueue(max_waiting=2000)
    for request_id in range(1000):
        queue.push("long", request_id, 10)
        queue.push("short", 1000 + request_id, 10)
    sent = {"long": 0, "short": 0}
    for _ in range(500):
        popped = pop(queue)
        assert popped is not None
        key = "long" if popped < 1000 else "short"
        sent[key] += 1
        queue.charge(key, 90 if key == "long" else 10)
    assert 4 <= sent["short"] / sent["long"] <= 6


def test_idle_flows_keep_debt_but_no_credit() -> None:
    queue = FairQueue(max_waiting=100)
    for request_id in range(100):
        queue.push("steady", request_id, QUANTUM)
    for _ in range(20):
        pop(queue)
    for request_id in range(100, 200):
        queue.push("late", request_id, QUANTUM)
    sent = [pop(queue) for _ in range(20)]
    late = sum(1 for request_id in sent if request_id is not None and request_id >= 100)
    assert 9 <= late <= 11
    # A key that owes much waits, also when its queue ran empty in between.
    queue = FairQueue(max_waiting=100)
    queue.push("debtor", 0, 1)
    pop(queue)
    queue.charge("debtor", 50 * QUANTUM)
    queue.push("debtor", 1, 1)
    for request_id in range(10, 60):
        queue.push("other", request_id, QUANTUM)
    assert 1 not in [pop(queue) for _ in range(40)]


def test_idle_flows_are_dropped() -> None:
    queue = FairQueue(max_waiting=10)
    for index in range(1000):
        queue.push(f"adapter {index}", index, 1)
    while pop(queue) is not None:
        pass
    queue.forget_idle()
    assert not queue._callers and not len(queue._shares)


def test_a_weight_is_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        FairQueue(10).push("a", 1, 1, weight=0)
    with pytest.raises(ValueError, match="positive"):
        FairQueue(10).push("a", 1, 1, share=-1)


def test_of_requeued_requests_the_last_one_goes_first() -> None:
    queue = FairQueue(max_waiting=9)
    for request_id in (1, 2, 3):
        queue.push("key", request_id, 5)
    assert [pop(queue), pop(queue)] == [1, 2]
    queue.requeue("key", 2, 6)
    queue.requeue("key", 1, 6)
    assert [pop(queue) for _ in range(4)] == [1, 2, 3, None]


def test_a_caller_s_flood_does_not_starve_another_caller_of_the_same_adapter() -> None:
    queue = FairQueue(max_waiting=1000)
    for request_id in range(500):
        queue.push("adapter", request_id, 10, caller="flood")
    for request_id in range(1000, 1005):
        queue.push("adapter", request_id, 10, caller="other")
    assert sum((pop(queue) or 0) >= 1000 for _ in range(11)) == 5


def test_a_caller_of_many_adapters_has_one_share() -> None:
    queue = FairQueue(max_waiting=1000)
    for request_id in range(500):
        queue.push(f"adapter {request_id}", request_id, 10, caller="flood")
    for request_id in range(1000, 1010):
        queue.push("adapter", request_id, 10, caller="other")
    assert sum((pop(queue) or 0) >= 1000 for _ in range(21)) == 10


def test_shares_of_callers_follow_their_weights() -> None:
    queue = FairQueue(max_waiting=1000)
    for request_id in range(200):
        queue.push("", request_id, 10, caller="half", share=0.5)
        queue.push("", 1000 + request_id, 10, caller="double", share=2.0)
    assert sum((pop(queue) or 0) >= 1000 for _ in range(100)) in range(78, 83)


def test_an_adapters_weight_counts_between_callers_too() -> None:
    queue = FairQueue(max_waiting=1000)
    for request_id in range(200):
        queue.push("light", request_id, 10, weight=1.0, caller="a")
        queue.push("heavy", 1000 + request_id, 10, weight=3.0, caller="b")
    assert sum((pop(queue) or 0) >= 1000 for _ in range(100)) in range(73, 78)


def test_a_blocked_caller_is_passed_over_and_loses_nothing() -> None:
    queue = FairQueue(max_waiting=1000)
    for request_id in range(10):
        queue.push("", request_id, 10, caller="a")
        queue.push("", 100 + request_id, 10, caller="b")
    assert queue.first({"a", "b"}) is None and pop(queue, {"a", "b"}) is None
    assert [pop(queue, {"a"}) for _ in range(5)] == [100, 101, 102, 103, 104]
    assert [pop(queue) for _ in range(5)] == [0, 1, 2, 3, 4]


def test_a_long_time_alone_costs_no_more_than_the_greatest_debt() -> None:
    queue = FairQueue(max_waiting=10_000)
    queue.push("", 0, 10, caller="alone")
    pop(queue)
    queue.charge("", 10_000_000, "alone")
    queue.push("", 1, 10, caller="alone")
    for request_id in range(2, 4000):
        queue.push("", request_id, 10, caller="late")
    assert 1 in [pop(queue) for _ in range(1700)]


def test_callers_are_forgotten() -> None:
    queue = FairQueue(max_waiting=10)
    for request_id in range(20_000):
        queue.push("", request_id, 5, caller=f"address {request_id}")
        pop(queue)
        queue.charge("", 5, f"address {request_id}")
    assert len(queue._callers) <= 4100 and len(queue._shares) <= 4100


def test_output_tokens_count_for_their_caller() -> None:
    queue = FairQueue(max_waiting=1000)
    for request_id in range(200):
        queue.push("", request_id, 10, caller="long")
        queue.push("", 1000 + request_id, 10, caller="short")
    sent = {"long": 0, "short": 0}
    for _ in range(100):
        caller = "long" if (pop(queue) or 0) < 1000 else "short"
        sent[caller] += 1
        queue.charge("", 90 if caller == "long" else 0, caller)
    assert 7 * sent["long"] < sent["short"] < 13 * sent["long"]


def test_a_request_that_comes_back_is_its_caller_s_first() -> None:
    queue = FairQueue(max_waiting=1000)
    for request_id in range(4):
        queue.push("", request_id, 10, caller="a")
    assert pop(queue) == 0
    queue.requeue("", 0, 12, caller="a")
    queue.push("", 9, 10, caller="b")
    assert [pop(queue) for _ in range(5)] == [0, 9, 1, 2, 3]
