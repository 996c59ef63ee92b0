"""Shares and turns: no item is lost, callers' items stay in order, and charges of those who wait stay equal."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.proto.shares import MAX_DEBT, Shares, Turns, fair_limits

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
            owner = next(name for name, items in waiting.items() if items and items[0] == item)
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


@given(
    st.lists(st.tuples(st.sampled_from(CALLERS), st.integers(1, 9), st.booleans()), max_size=30),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_turns_are_those_of_the_members_with_the_least_work(
    items: list[tuple[str, int, bool]], debts: list[int]
) -> None:
    """Some items are passed over, which charges nothing, and their members have the next turns too."""
    both = Shares(), Shares()
    lanes: tuple[dict[str, list[tuple[int, bool]]], ...] = (defaultdict(list), defaultdict(list))
    for shares, lane in zip(both, lanes, strict=True):
        for name, work, runs in items:
            lane[name].append((work, runs))
            shares.join(name)
        for name, debt in zip(CALLERS, debts, strict=True):
            shares.charge(name, debt)

    def take(shares: Shares, lane: dict[str, list[tuple[int, bool]]], name: str) -> str:
        work, runs = lane[name].pop(0)
        if runs:
            shares.take_turn(name, work)
        if not lane[name]:
            shares.leave(name)
        return name

    (one, other), (lane, other_lane) = both, lanes
    expected = list[str]()
    while (name := one.next()) is not None:
        expected.append(take(one, lane, name))
    assert [take(other, other_lane, name) for name in other.turns(lambda name: not other_lane[name])] == expected


@given(
    st.lists(st.sampled_from([0.25, 1.0, 2.0, 5.0]), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), min_size=200, max_size=200),
)
@settings(max_examples=100, deadline=None)
def test_members_that_always_wait_get_work_by_their_weights(weights: list[float], draws: list[tuple[int, int]]) -> None:
    shares, work = Shares(), dict.fromkeys(map(str, range(len(weights))), 0.0)
    for name, weight in zip(work, weights, strict=True):
        shares.join(name, weight)
    for turn, later in draws:
        first = shares.next()
        assert first is not None
        shares.take_turn(first, turn)
        shares.charge(first, later)
        work[first] += turn + later
    times = [amount / weight for amount, weight in zip(work.values(), weights, strict=True)]
    assert max(times) - min(times) <= 200 / min(weights)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_a_newcomer_is_next_and_an_old_debt_ends(before: list[int], weight: int) -> None:
    shares = Shares()
    shares.join("old")
    for work in before:
        shares.take_turn("old", work)
        shares.charge("old", 100 * work)
    shares.join("new", weight)
    assert shares.next() == "new"
    total = 0
    while shares.next() == "new":
        shares.take_turn("new", 100)
        total += 100
    assert total <= weight * (MAX_DEBT + 100)


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
    assert len(turns._lanes) + len(turns._shares) <= 4096


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 100), min_size=1),
    st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([0.5, 1.0, 2.0, 7.0])),
    st.integers(0, 200),
)
@settings(max_examples=300, deadline=None)
def test_limits_are_max_min_fair(asked: dict[str, int], weights: dict[str, float], room: int) -> None:
    limits = fair_limits(asked, weights, room)
    shares = {name: min(number, limits.get(name, number)) for name, number in asked.items()}
    assert all(1 <= limit <= asked[name] for name, limit in limits.items())
    assert sum(shares.values()) <= max(room, 0) + len(asked)
    if sum(asked.values()) <= room:
        assert not limits
    per_weight = {name: limits[name] / weights.get(name, 1.0) for name in limits}
    for name in asked.keys() - limits.keys():  # who gets all it asks for asks for no more than the others' shares
        for other, share in per_weight.items():
            assert asked[name] <= max(1.0, (share + 1 / weights.get(other, 1.0)) * weights.get(name, 1.0) + 1)
