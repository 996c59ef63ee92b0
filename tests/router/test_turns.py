"""Turns by charge: no item is lost, callers' items stay in order, and charges of those who wait stay equal."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.router.turns import Turns

CALLERS = ["a", "b", "c"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "pop", "remove", "back", "charge"]), st.sampled_from(CALLERS), st.integers(0, 50)
        )
    )
)
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost(steps: list[tuple[str, str, int]]) -> None:
    turns: Turns[int] = Turns()
    waiting: dict[str, list[int]] = defaultdict(list)
    left: list[tuple[str, int]] = []
    for number, (step, caller, amount) in enumerate(steps):
        if step == "push":
            turns.push(caller, number, amount)
            waiting[caller].append(number)
        elif step == "pop" and len(turns):
            first, _ = turns.first()
            item = turns.pop()
            assert item == first
            owner = next(each for each, items in waiting.items() if items and items[0] == item)
            left.append((owner, waiting[owner].pop(0)))
        elif step == "remove" and waiting[caller]:
            assert turns.remove(caller, waiting[caller].pop())
        elif step == "back" and left:
            owner, item = left.pop()
            turns.put_back(owner, item, amount)
            waiting[owner].insert(0, item)
        elif step == "charge":
            turns.charge(caller, amount)
        assert len(turns) == sum(map(len, waiting.values()))
    assert not turns.remove("a", -1)
    while len(turns):
        turns.pop()
    assert not len(turns)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=50, max_size=50))
@settings(max_examples=50, deadline=None)
def test_charges_stay_equal(draws: list[tuple[int, int]]) -> None:
    turns: Turns[tuple[str, int]] = Turns()
    charged = dict.fromkeys(CALLERS, 0)
    for caller in CALLERS:
        turns.push(caller, (caller, -1), 1)
    for number, (charge, later) in enumerate(draws):
        (caller, _), cost = turns.first()
        turns.pop()
        turns.charge(caller, later)
        charged[caller] += int(cost) + later
        turns.push(caller, (caller, number), charge)
        assert max(charged.values()) - min(charged.values()) <= 60


def test_an_idle_caller_saves_nothing() -> None:
    turns: Turns[int] = Turns()
    for item in range(100):
        turns.push("busy", item, 10)
    for _ in range(50):
        turns.pop()
    for item in range(100, 120):
        turns.push("late", item, 10)
    assert 8 <= sum(turns.pop() >= 100 for _ in range(20)) <= 12


def test_many_callers_are_forgotten() -> None:
    turns: Turns[int] = Turns()
    for item in range(10_000):
        turns.push(str(item), item, 1)
        turns.pop()
    assert len(turns._lanes) <= 2048
