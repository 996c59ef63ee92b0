"""Which adapter is where: in a slot of the step, in host memory, on its way there, or refused. Imports no torch.

An adapter is named by its content's digest. It goes ABSENT → LOADING → host memory → a slot, and back out of either
when room is needed: the least recently used first, none that a running request uses, none that is pinned. What it
holds, and how it gets into a slot, is for `Device` to know.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

MOST_SIZES = 4096
"""Adapters whose sizes are remembered, the newest."""


class Residency(IntEnum):
    """Where an adapter is; the values of the wire."""

    ABSENT = 0
    LOADING = 1
    RESIDENT = 2
    FAILED = 3


class Content(Protocol):
    """An adapter in host memory."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_heads(self) -> int:
        """Medusa heads that it brings, which guess by the same slot; 0 without."""
        ...


class Device(Protocol):
    """Where slots are."""

    def put(self, slot: int, content: Content) -> None:
        """Begin to let `slot` mean `content`. No step that is yet to be launched names the slot."""

    def is_ready(self, slot: int) -> bool:
        """Whether it does; until then no step may name the slot."""
        ...

    def clear(self, slot: int) -> None:
        """Let `slot` mean nothing."""

    def forget(self, digest: str) -> None:
        """An adapter has left host memory."""


@dataclass(frozen=True)
class SlotLimits:
    """What may be held."""

    num_slots: int
    slot_bytes: int
    """Over all slots."""
    host_bytes: int
    """Over all adapters in host memory, those in slots included where slots lie there too."""
    cycle_seconds: float = 2.0
    """An adapter whose slot another has waited for this long takes no new request until the slot is free."""


@dataclass(eq=False)
class CachedAdapter:
    """An adapter in host memory."""

    digest: str
    content: Content
    slot: int = -1
    num_users: int = 0
    """Running requests."""
    is_pinned: bool = False
    is_copying: bool = False
    """Has a slot that it is not ready in."""
    is_draining: bool = False
    """Takes no new request: another adapter needs its slot."""
    evict_when_idle: bool = False
    """Goes as soon as nobody uses it."""


@dataclass
class Changes:
    """What happened since last asked."""

    states: dict[str, tuple[Residency, str]] = field(default_factory=dict)
    """By digest: where it is now, and why it failed."""
    unloaded: list[str] = field(default_factory=list)
    """Adapters whose KV nobody needs any more."""


class AdapterSlots:
    """All adapters of one shard."""

    def __init__(self, limits: SlotLimits, device: Device, load: Callable[[str], None]) -> None:
        """`load` begins to bring a digest into host memory; `loaded` or `failed` follow, in the thread of all else."""
        self.limits = limits
        self.now = 0.0
        """Seconds of a monotonic clock; whoever steps keeps it up to date."""
        self._device = device
        self._load = load
        self._held: OrderedDict[str, CachedAdapter] = OrderedDict()  # least recently used first
        self._loading: set[str] = set()
        self._unwanted: set[str] = set()
        """Of those on their way, which are let go when they arrive."""
        self._wanted_again: set[str] = set()
        """Of those that are to go, which somebody has asked for since."""
        self._pinned: set[str] = set()
        self._free = list(reversed(range(limits.num_slots)))
        self._copying: list[CachedAdapter] = []
        self._waiting_since: dict[str, float] = {}  # for a slot
        self._sizes: dict[str, int] = {}  # in bytes, also of those that have left
        self._changes = Changes()

    def settle(self) -> None:
        """Before a step: take note of the adapters that are ready in their slots by now."""
        for held in self._copying[:]:
            self._arrive(held)

    @property
    def is_copying(self) -> bool:
        """Whether an adapter is on its way into a slot: settle() is to be called soon."""
        return bool(self._copying)

    # What the scheduler asks

    def acquire(self, digest: str) -> int | None:
        """The slot for one more running request, or None: it waits until the adapter is in a slot."""
        held = self._held.get(digest)
        if held is None:
            self.prefetch(digest)
            return None
        if held.is_draining or held.evict_when_idle:
            return None
        if held.slot < 0 and not self._place(held):
            return None
        if held.is_copying:
            return None
        held.num_users += 1
        self._held.move_to_end(digest)
        return held.slot

    def num_heads(self, digest: str) -> int:
        """Heads that an adapter in a slot brings."""
        return self._held[digest].content.num_heads

    def reject_reason(self, digests: Sequence[str]) -> str:
        """Why adapters that one request needs can never be in slots together; empty if they can or nobody knows yet."""
        if len(digests) > self.limits.num_slots:
            return "an adapter and heads of another need two slots; this shard has one"
        num_bytes = sum(self._sizes.get(digest, 0) for digest in digests)
        most = min(self.limits.slot_bytes, self.limits.host_bytes)
        if len(digests) > 1 and num_bytes > most:
            return f"an adapter and the heads beside it take {num_bytes} bytes, {most} are kept for adapters"
        return ""

    def release(self, digest: str) -> None:
        """One running request less."""
        held = self._held[digest]
        held.num_users -= 1
        if held.num_users == 0 and (held.is_draining or held.evict_when_idle):
            self._leave_slot(held)
            if held.evict_when_idle:
                self._drop(held)

    # What routers ask

    def prefetch(self, digest: str) -> None:
        """Bring an adapter into host memory, if it is neither there nor on its way; once more, if it is to go."""
        held = self._held.get(digest)
        if digest in self._unwanted or (held is not None and held.evict_when_idle):
            self._wanted_again.add(digest)
        elif digest not in self._held and digest not in self._loading:
            self._loading.add(digest)
            self._changes.states[digest] = (Residency.LOADING, "")
            self._load(digest)

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep an adapter in its slot whatever else comes, or no longer."""
        (self._pinned.add if pinned else self._pinned.discard)(digest)
        held = self._held.get(digest)
        if held is not None:
            held.is_pinned = pinned
        if pinned:
            self.prefetch(digest)

    def unload(self, digest: str) -> None:
        """Let an adapter go, once running requests are done with it."""
        self._pinned.discard(digest)
        self._wanted_again.discard(digest)
        held = self._held.get(digest)
        if digest in self._loading:
            self._unwanted.add(digest)
            return
        if held is None:
            self._gone(digest)
            return
        held.evict_when_idle = True
        if held.num_users == 0:
            self._leave_slot(held)
            self._drop(held)

    # What the reader says

    def loaded(self, digest: str, content: Content) -> None:
        """An adapter has arrived in host memory."""
        self._loading.discard(digest)
        if digest in self._unwanted:
            self._device.forget(digest)
            self._gone(digest)
            return
        if content.num_bytes > min(self.limits.slot_bytes, self.limits.host_bytes):
            self._device.forget(digest)
            self.failed(digest, f"it takes {content.num_bytes} bytes, {self.limits.slot_bytes} are kept for adapters")
            return
        self._sizes[digest] = content.num_bytes
        if len(self._sizes) > MOST_SIZES:
            del self._sizes[next(iter(self._sizes))]
        self._make_host_room(content.num_bytes)
        held = self._held[digest] = CachedAdapter(digest, content, is_pinned=digest in self._pinned)
        self._place(held)

    def failed(self, digest: str, reason: str) -> None:
        """An adapter will not come."""
        self._loading.discard(digest)
        self._unwanted.discard(digest)
        self._wanted_again.discard(digest)
        self._changes.states[digest] = (Residency.FAILED, reason)

    # What happened

    def take_changes(self) -> Changes:
        """What happened since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def is_resident(self, digest: str) -> bool:
        """Whether a request could run now."""
        held = self._held.get(digest)
        if held is None or held.slot < 0:
            return False
        return not (held.is_copying or held.is_draining or held.evict_when_idle)

    @property
    def num_resident(self) -> int:
        """Adapters in slots."""
        return self.limits.num_slots - len(self._free)

    def tell_all(self) -> None:
        """Count where every adapter is as news: a router has come that knows nothing."""
        for held in self._held.values():
            if held.slot >= 0 and not held.is_copying:
                self._changes.states[held.digest] = (Residency.RESIDENT, "")

    def check(self, users: Iterable[str]) -> None:
        """Prove that slots and users add up. `users`: the digest of each running request. Raises RuntimeError."""
        counts = Counter(users)
        for held in self._held.values():
            if held.num_users != counts.pop(held.digest, 0):
                raise RuntimeError("users of adapters leaked")
        slots = [held.slot for held in self._held.values() if held.slot >= 0]
        if counts or sorted([*self._free, *slots]) != list(range(self.limits.num_slots)):
            raise RuntimeError("slots of adapters leaked")

    # Room

    def _place(self, held: CachedAdapter) -> bool:
        """Give an adapter a slot. False while those in slots are all in use: the one in use for longest then yields."""
        while not self._fits(held):
            victim = next((other for other in self._held.values() if other.slot >= 0 and _may_leave(other)), None)
            if victim is None:
                self._wait_for_slot(held)
                return False
            self._leave_slot(victim)
        held.slot = self._free.pop()
        self._waiting_since.pop(held.digest, None)
        self._device.put(held.slot, held.content)
        held.is_copying = True
        self._copying.append(held)
        self._arrive(held)
        return True

    def _arrive(self, held: CachedAdapter) -> None:
        if self._device.is_ready(held.slot):
            held.is_copying = False
            self._copying.remove(held)
            self._changes.states[held.digest] = (Residency.RESIDENT, "")

    def _fits(self, held: CachedAdapter) -> bool:
        in_slots = sum(other.content.num_bytes for other in self._held.values() if other.slot >= 0)
        return bool(self._free) and in_slots + held.content.num_bytes <= self.limits.slot_bytes

    def _wait_for_slot(self, held: CachedAdapter) -> None:
        since = self._waiting_since.setdefault(held.digest, self.now)
        if self.now - since < self.limits.cycle_seconds:
            return
        for other in self._held.values():
            if other.slot >= 0 and not (other.is_pinned or other.is_draining or other.is_copying):
                other.is_draining = True
                self._waiting_since[held.digest] = self.now
                return

    def _leave_slot(self, held: CachedAdapter) -> None:
        held.is_draining = False
        if held.is_copying:
            held.is_copying = False
            self._copying.remove(held)
        if held.slot >= 0:
            self._device.clear(held.slot)
            self._free.append(held.slot)
            held.slot = -1
            self._changes.states[held.digest] = (Residency.ABSENT, "")

    def _make_host_room(self, num_bytes: int) -> None:
        """Let adapters go that nobody uses, the least recently used first; those in use stay, whatever they take."""
        total = sum(held.content.num_bytes for held in self._held.values()) + num_bytes
        for held in list(self._held.values()):
            if total <= self.limits.host_bytes:
                return
            if _may_leave(held):
                total -= held.content.num_bytes
                self._leave_slot(held)
                self._leave_host(held)

    def _drop(self, held: CachedAdapter) -> None:
        self._leave_host(held)
        self._gone(held.digest)

    def _leave_host(self, held: CachedAdapter) -> None:
        del self._held[held.digest]
        self._waiting_since.pop(held.digest, None)
        self._device.forget(held.digest)

    def _gone(self, digest: str) -> None:
        """An adapter was unloaded: nothing is left of it."""
        self._unwanted.discard(digest)
        self._changes.states[digest] = (Residency.ABSENT, "")
        self._changes.unloaded.append(digest)
        if digest in self._wanted_again:
            self._wanted_again.remove(digest)
            self.prefetch(digest)


def _may_leave(held: CachedAdapter) -> bool:
    return held.num_users == 0 and not held.is_pinned and not held.is_copying
