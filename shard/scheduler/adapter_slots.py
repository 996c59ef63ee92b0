"""Where each adapter is: in a slot of the step, in host memory, loading, or failed. Imports no torch.

An adapter is identified by the digest of its content. It goes ABSENT → LOADING → host memory → a slot, and is evicted
from either when room is needed: the least recently used first, none that a running request uses, none that is pinned.
A `Device` copies adapters into slots.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, cast

from lorikeet.proto import shard_pb2 as pb

NO_ADAPTERS = "this shard serves no adapters"
MOST_SIZES = 4096
"""The newest adapters, whose sizes are kept after eviction."""


class Residency(IntEnum):
    """Where an adapter is."""

    ABSENT = pb.AdapterState.ABSENT
    LOADING = pb.AdapterState.LOADING
    RESIDENT = pb.AdapterState.RESIDENT
    FAILED = pb.AdapterState.FAILED


class Content(Protocol):
    """An adapter in host memory."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_heads(self) -> int:
        """Its Medusa heads, which have the same slot; 0 without."""
        ...


class Device(Protocol):
    """The memory of the slots."""

    def put(self, slot: int, content: Content) -> None:
        """Start to copy `content` into `slot`. No step that is yet to be launched uses the slot."""

    def is_ready(self, slot: int) -> bool:
        """Whether the copy is complete; until then no step may use the slot."""
        ...

    def clear(self, slot: int) -> None:
        """Empty `slot`."""

    def forget(self, digest: str) -> None:
        """An adapter was evicted from host memory."""


@dataclass(frozen=True)
class SlotLimits:
    """Capacity for adapters."""

    num_slots: int
    slot_bytes: int
    """Over all slots."""
    host_bytes: int
    """Over all adapters in host memory, including those in slots where the slots are there too."""
    cycle_seconds: float = 2.0
    """Once an adapter has waited this long for a slot, one in a slot takes no new request until its slot is free."""


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
    """Is being copied into its slot."""
    is_draining: bool = False
    """Takes no new request: another adapter needs its slot."""
    evict_when_idle: bool = False
    """Is unloaded as soon as no request uses it."""


@dataclass
class Changes:
    """What happened since the last call."""

    states: dict[str, tuple[Residency, str]] = field(default_factory=dict)
    """By digest: where it is now, and why it failed."""
    unloaded: list[str] = field(default_factory=list)
    """Adapters whose cached KV can be dropped."""


class AdapterSlots:
    """All adapters of one shard."""

    def __init__(self, limits: SlotLimits, device: Device, load: Callable[[str], None]) -> None:
        """`load` starts to load a digest into host memory; `loaded` or `failed` follow, in the step loop's thread."""
        self.limits = limits
        self.now = 0.0
        """Seconds of a monotonic clock; the step loop updates it."""
        self._device = device
        self._load = load
        self._held: OrderedDict[str, CachedAdapter] = OrderedDict()  # least recently used first
        self._loading: set[str] = set()
        self._unwanted: set[str] = set()
        """Loading adapters that were unloaded since."""
        self._wanted_again: set[str] = set()
        """Adapters being unloaded that were requested since."""
        self._pinned: set[str] = set()
        self._free = list(reversed(range(limits.num_slots)))
        self._copying: list[CachedAdapter] = []
        self._waiting_since: dict[str, float] = {}  # for a slot
        self._sizes: dict[str, int] = {}  # in bytes, also of those that have left
        self._changes = Changes()

    def poll_copies(self) -> None:
        """Before a step: find the adapters whose copy into their slot is complete."""
        for held in self._copying[:]:
            self._poll_copy(held)

    @property
    def is_copying(self) -> bool:
        """Whether an adapter is being copied into a slot: call poll_copies() soon."""
        return bool(self._copying)

    # For the scheduler

    def acquire(self, digest: str) -> int | None:
        """The slot for one more running request, or None while the adapter is in no slot."""
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
        """Medusa heads of an adapter in a slot."""
        return self._held[digest].content.num_heads

    def reject_reason(self, digests: Sequence[str]) -> str:
        """Why the adapters of one request can never be in slots together; "" if they can or it is not known yet."""
        if len(digests) > self.limits.num_slots:
            return "an adapter and heads of another need two slots; this shard has one"
        num_bytes = sum(self._sizes.get(digest, 0) for digest in digests)
        most = min(self.limits.slot_bytes, self.limits.host_bytes)
        if len(digests) > 1 and num_bytes > most:
            return f"the adapter and the heads of another take {num_bytes} bytes, {most} are kept for adapters"
        return ""

    def release(self, digest: str) -> None:
        """One running request less."""
        held = self._held[digest]
        held.num_users -= 1
        if held.num_users == 0 and (held.is_draining or held.evict_when_idle):
            self._leave_slot(held)
            if held.evict_when_idle:
                self._drop(held)

    # For routers

    def prefetch(self, digest: str) -> None:
        """Load an adapter into host memory unless it is there or loading; again, if it is being unloaded."""
        held = self._held.get(digest)
        if digest in self._unwanted or (held is not None and held.evict_when_idle):
            self._wanted_again.add(digest)
        elif digest not in self._held and digest not in self._loading:
            self._loading.add(digest)
            self._changes.states[digest] = (Residency.LOADING, "")
            self._load(digest)

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep an adapter in its slot, or no longer."""
        (self._pinned.add if pinned else self._pinned.discard)(digest)
        held = self._held.get(digest)
        if held is not None:
            held.is_pinned = pinned
        if pinned:
            self.prefetch(digest)

    def unload(self, digest: str) -> None:
        """Drop an adapter as soon as no running request uses it."""
        self._pinned.discard(digest)
        self._wanted_again.discard(digest)
        held = self._held.get(digest)
        if digest in self._loading:
            self._unwanted.add(digest)
            return
        if held is None:
            self._on_evicted(digest)
            return
        held.evict_when_idle = True
        if held.num_users == 0:
            self._leave_slot(held)
            self._drop(held)

    # For the reader

    def loaded(self, digest: str, content: Content) -> None:
        """An adapter is in host memory."""
        self._loading.discard(digest)
        if digest in self._unwanted:
            self._device.forget(digest)
            self._on_evicted(digest)
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
        """An adapter could not be loaded."""
        self._loading.discard(digest)
        self._unwanted.discard(digest)
        self._wanted_again.discard(digest)
        self._changes.states[digest] = (Residency.FAILED, reason)

    # State

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

    def report_all(self) -> None:
        """Report every adapter in a slot as a change, for a router that has just connected."""
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

    # Eviction

    def _place(self, held: CachedAdapter) -> bool:
        """Give an adapter a slot. False while all slots are in use; the least recently used one is drained then."""
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
        self._poll_copy(held)
        return True

    def _poll_copy(self, held: CachedAdapter) -> None:
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
        """Evict unused adapters, the least recently used first; those in use stay, whatever their size."""
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
        self._on_evicted(held.digest)

    def _leave_host(self, held: CachedAdapter) -> None:
        del self._held[held.digest]
        self._waiting_since.pop(held.digest, None)
        self._device.forget(held.digest)

    def _on_evicted(self, digest: str) -> None:
        """An adapter was unloaded."""
        self._unwanted.discard(digest)
        self._changes.states[digest] = (Residency.ABSENT, "")
        self._changes.unloaded.append(digest)
        if digest in self._wanted_again:
            self._wanted_again.remove(digest)
            self.prefetch(digest)


class NoAdapters(AdapterSlots):
    """The slots of a shard that serves the bare base only."""

    def __init__(self) -> None:
        no_device = cast(Device, None)  # without slots it is never called
        super().__init__(SlotLimits(0, 0, 0), no_device, lambda digest: self.failed(digest, NO_ADAPTERS))

    def acquire(self, digest: str) -> int | None:
        return -1

    def num_heads(self, digest: str) -> int:
        return 0

    def reject_reason(self, digests: Sequence[str]) -> str:
        return ""

    def release(self, digest: str) -> None:
        pass

    def is_resident(self, digest: str) -> bool:
        return True

    def check(self, users: Iterable[str]) -> None:
        pass


def _may_leave(held: CachedAdapter) -> bool:
    return held.num_users == 0 and not held.is_pinned and not held.is_copying
