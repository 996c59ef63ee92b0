"""Slots of adapters: any sequence of requests, loads and ends keeps the limits, and no slot in use is taken."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorikeet.shard.scheduler.adapter_slots import AdapterSlots, Content, Residency, SlotLimits

DIGESTS = [f"{index:064x}" for index in range(8)]


@dataclass(frozen=True)
class Weights:
    """A content of some size."""

    digest: str
    num_bytes: int
    num_heads: int = 0


class Device:
    """Remembers what each slot means."""

    def __init__(self, is_slow: bool = False) -> None:
        """`is_slow`: slots are ready once `finish` was called."""
        self.slots: dict[int, Content] = {}
        self.forgotten: list[str] = []
        self._is_slow = is_slow
        self._copying: set[int] = set()

    def put(self, slot: int, content: Content) -> None:
        assert slot not in self.slots, "a slot is overwritten"
        self.slots[slot] = content
        if self._is_slow:
            self._copying.add(slot)

    def is_ready(self, slot: int) -> bool:
        assert slot in self.slots
        return slot not in self._copying

    def clear(self, slot: int) -> None:
        del self.slots[slot]
        self._copying.discard(slot)

    def forget(self, digest: str) -> None:
        assert digest not in {content.digest for content in self.slots.values() if isinstance(content, Weights)}
        self.forgotten.append(digest)

    def finish(self) -> None:
        self._copying.clear()


class SlotsMachine(RuleBasedStateMachine):
    """Requests come and go, files arrive or do not."""

    @initialize(
        num_slots=st.integers(1, 4),
        slot_bytes=st.integers(10, 40),
        host_bytes=st.integers(10, 60),
        is_slow=st.booleans(),
    )
    def begin(self, num_slots: int, slot_bytes: int, host_bytes: int, is_slow: bool) -> None:
        self.limits = SlotLimits(num_slots, slot_bytes, host_bytes, cycle_seconds=2.0)
        self.device = Device(is_slow)
        self.asked: list[str] = []
        self.slots = AdapterSlots(self.limits, self.device, self.asked.append)
        self.running: list[tuple[str, int]] = []
        self.pinned: set[str] = set()
        self.held: set[str] = set()
        """Adapters that have come and were not let go of."""

    @rule(digest=st.sampled_from(DIGESTS))
    def want(self, digest: str) -> None:
        slot = self.slots.acquire(digest)
        if slot is not None:
            content = self.device.slots[slot]
            assert isinstance(content, Weights) and content.digest == digest
            assert self.device.is_ready(slot), "a step would read what is still being copied"
            self.running.append((digest, slot))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        digest, slot = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        content = self.device.slots[slot]
        assert isinstance(content, Weights) and content.digest == digest, "a slot in use changed"
        self.slots.release(digest)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), num_bytes=st.integers(1, 20), fails=st.booleans())
    def arrive(self, data: st.DataObject, num_bytes: int, fails: bool) -> None:
        digest = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        if fails:
            self.slots.failed(digest, "broken")
        else:
            assert digest not in self.held
            self.held.add(digest)
            self.slots.loaded(digest, Weights(digest, num_bytes))

    @rule(digest=st.sampled_from(DIGESTS), pinned=st.booleans())
    def pin(self, digest: str, pinned: bool) -> None:
        self.slots.pin(digest, pinned)

    @rule(digest=st.sampled_from(DIGESTS))
    def unload(self, digest: str) -> None:
        self.slots.unload(digest)

    @rule(digest=st.sampled_from(DIGESTS))
    def prefetch(self, digest: str) -> None:
        self.slots.prefetch(digest)

    @rule(copied=st.booleans())
    def step(self, copied: bool) -> None:
        if copied:
            self.device.finish()
        self.slots.poll_copies()
        assert not (copied and self.slots.is_copying)

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.slots.now += seconds

    @invariant()
    def limits_hold(self) -> None:
        if not hasattr(self, "slots"):
            return
        self.slots.check(digest for digest, _ in self.running)
        assert len(self.device.slots) <= self.limits.num_slots
        assert sum(content.num_bytes for content in self.device.slots.values()) <= self.limits.slot_bytes
        assert len(set(self.asked)) == len(self.asked), "an adapter is read twice at once"
        for digest in self.device.forgotten:
            self.held.remove(digest)
        self.device.forgotten.clear()
        assert self.held == set(self.slots._cached), "the adapters in host memory differ"
        for digest, slot in self.running:
            content = self.device.slots[slot]
            assert isinstance(content, Weights) and content.digest == digest


SlotsMachine.TestCase.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
TestSlots = SlotsMachine.TestCase


def make(num_slots: int = 2, cycle_seconds: float = 2.0) -> tuple[AdapterSlots, list[str]]:
    asked: list[str] = []
    return AdapterSlots(SlotLimits(num_slots, 100, 100, cycle_seconds), Device(), asked.append), asked


def load(slots: AdapterSlots, *digests: str) -> None:
    for digest in digests:
        slots.prefetch(digest)
        slots.loaded(digest, Weights(digest, 10))


def residents(slots: AdapterSlots) -> set[str]:
    states = slots.take_changes().states.items()
    return {digest for digest, (residency, _) in states if residency is Residency.RESIDENT}


def test_an_absent_adapter_is_asked_for_once_and_then_runs() -> None:
    slots, asked = make()
    assert slots.acquire("a") is None and slots.acquire("a") is None
    assert asked == ["a"]
    assert slots.take_changes().states == {"a": (Residency.LOADING, "")}
    slots.loaded("a", Weights("a", 10))
    assert slots.acquire("a") is not None
    assert slots.take_changes().states == {"a": (Residency.RESIDENT, "")}


def test_the_adapter_with_the_lowest_score_gives_up_its_slot() -> None:
    """Here the one that was used once, although the others were used before it."""
    slots, _ = make(num_slots=3)
    load(slots, "thrice", "twice", "once")
    for digest in ("thrice", "thrice", "thrice", "twice", "twice", "once"):
        assert slots.acquire(digest) is not None
        slots.release(digest)
    load(slots, "new")
    assert [digest for digest in ("thrice", "twice", "once", "new") if not slots.is_resident(digest)] == ["once"]


def test_an_adapter_in_use_or_pinned_keeps_its_slot() -> None:
    slots, _ = make(num_slots=3)
    load(slots, "a", "b", "c")
    for digest in ("b", "c", "c"):
        assert slots.acquire(digest) is not None
        slots.release(digest)
    assert slots.acquire("a") is not None
    slots.pin("b", True)
    load(slots, "d")
    assert slots.is_resident("a") and slots.is_resident("b") and slots.is_resident("d")
    assert not slots.is_resident("c")


def test_an_adapter_that_waits_long_gets_a_slot_of_one_in_use() -> None:
    slots, _ = make(num_slots=1)
    load(slots, "busy")
    assert slots.acquire("busy") is not None
    load(slots, "patient")
    assert slots.acquire("patient") is None
    slots.now += 1
    assert slots.acquire("patient") is None and slots.acquire("busy") is not None
    slots.now += 1.5
    assert slots.acquire("patient") is None
    assert slots.acquire("busy") is None, "it must give way now"
    slots.release("busy")
    assert slots.acquire("patient") is None
    slots.release("busy")
    assert slots.acquire("patient") is not None


def test_adapters_that_are_always_in_use_give_way_in_turn_whatever_their_score() -> None:
    """Otherwise rare adapters would share one slot, and wait longer the more of them there are."""
    slots, _ = make()
    load(slots, "popular", "rare", "waiting")
    for digest in (*["popular"] * 8, "rare"):
        assert slots.acquire(digest) is not None
    assert slots.acquire("waiting") is None
    slots.now += 2.5
    assert slots.acquire("waiting") is None
    assert slots.acquire("popular") is None, "its last use is longer ago"
    assert slots.acquire("rare") is not None


def test_unloading_waits_for_running_requests_and_says_whose_kv_may_go() -> None:
    slots, asked = make()
    load(slots, "a")
    assert slots.acquire("a") is not None
    slots.unload("a")
    assert slots.acquire("a") is None and not slots.take_changes().unloaded
    slots.release("a")
    changes = slots.take_changes()
    assert changes.unloaded == ["a"] and changes.states["a"] == (Residency.ABSENT, "")
    assert slots.acquire("a") is None and asked == ["a", "a"]


def test_an_adapter_unloaded_while_loading_is_dropped() -> None:
    slots, asked = make()
    slots.prefetch("a")
    slots.unload("a")
    assert slots.take_changes().unloaded == []
    slots.loaded("a", Weights("a", 10))
    changes = slots.take_changes()
    assert (changes.unloaded, changes.states["a"]) == (["a"], (Residency.ABSENT, ""))
    assert not slots.is_resident("a")
    load(slots, "a")
    assert slots.is_resident("a") and asked == ["a", "a"]


@pytest.mark.parametrize("wish", ["prefetch", "pin"])
@pytest.mark.parametrize("is_in_use", [False, True])
def test_an_adapter_requested_while_unloading_is_loaded_again(wish: str, is_in_use: bool) -> None:
    slots, asked = make()
    slots.prefetch("a")
    if is_in_use:
        slots.loaded("a", Weights("a", 10))
        assert slots.acquire("a") is not None
    slots.unload("a")
    if wish == "pin":
        slots.pin("a", True)
    else:
        slots.prefetch("a")
    if is_in_use:
        slots.release("a")
    else:
        slots.loaded("a", Weights("a", 10))
    changes = slots.take_changes()
    assert (changes.unloaded, changes.states["a"]) == (["a"], (Residency.LOADING, "")), "first it left"
    assert asked == ["a", "a"]
    slots.loaded("a", Weights("a", 10))
    assert slots.is_resident("a")


def test_an_adapter_unloaded_again_stays_unloaded() -> None:
    slots, asked = make()
    slots.prefetch("a")
    slots.unload("a")
    slots.prefetch("a")
    slots.unload("a")
    slots.loaded("a", Weights("a", 10))
    assert asked == ["a"]


def test_what_is_larger_than_all_slots_fails() -> None:
    slots, _ = make()
    slots.prefetch("a")
    slots.loaded("a", Weights("a", 101))
    assert slots.take_changes().states["a"][0] is Residency.FAILED


def test_an_adapter_is_resident_once_it_is_copied_and_none_takes_its_slot_before() -> None:
    device = Device(is_slow=True)
    slots = AdapterSlots(SlotLimits(1, 100, 100), device, lambda digest: None)
    load(slots, "a", "b")
    assert slots.acquire("a") is None and slots.acquire("b") is None
    is_copying = slots.is_copying
    assert is_copying and not slots.is_resident("a") and "a" not in residents(slots)
    device.finish()
    assert slots.acquire("a") is None, "within a step nothing changes"
    slots.poll_copies()
    assert not slots.is_copying and residents(slots) == {"a"}
    assert slots.acquire("a") is not None and slots.acquire("b") is None


def test_an_adapter_unloaded_while_copying_leaves_its_slot() -> None:
    device = Device(is_slow=True)
    slots = AdapterSlots(SlotLimits(1, 100, 100), device, lambda digest: None)
    load(slots, "a")
    slots.unload("a")
    assert not device.slots and not slots.is_copying
    load(slots, "b")
    device.finish()
    slots.poll_copies()
    assert slots.acquire("b") is not None


def test_a_lost_user_is_noticed() -> None:
    slots, _ = make()
    load(slots, "a")
    slots.acquire("a")
    with pytest.raises(RuntimeError, match="users"):
        slots.check([])
