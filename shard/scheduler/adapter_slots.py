"""Where each adapter is: in a slot of the step, in host memory, loading, or failed. Imports no torch.

An adapter is identified by the digest of its content. It goes ABSENT → LOADING → host memory → a slot, and is evicted
from either when room is needed: the one with the lowest score first, none that a running request uses, none that is
pinned. A `Device` copies adapters into slots.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter
from typing import Protocol, cast

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import Composition

NO_ADAPTERS = "this shard serves no adapters"
NOT_HERE = (
    "the adapter is not in this shard's store: it was removed, or this shard is on another machine than its router and "
    "does not share --adapter-store"
)
DAMAGED = "its file in the adapter store is damaged: its bytes do not match their checksum"
RELOADABLE = frozenset((NOT_HERE, DAMAGED))
"""Reasons of failures that end once the adapter is loaded into the store again."""
MOST_SIZES = 4096
"""The newest adapters, whose sizes are kept after eviction."""
FIXED_COST = 8 * 2**20
"""What opening, checking and placing a file costs, in bytes that are read in the same time."""
EXPECTED_USES = 4
"""Uses that an adapter is credited with until its first use: requests wait for it."""


class Residency(IntEnum):
    """Where an adapter is."""

    ABSENT = pb.AdapterState.ABSENT
    LOADING = pb.AdapterState.LOADING
    RESIDENT = pb.AdapterState.RESIDENT
    FAILED = pb.AdapterState.FAILED
    HOST_MEMORY = pb.AdapterState.HOST_MEMORY


class Content(Protocol):
    """An adapter in host memory."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_heads(self) -> int:
        """The number of an adapter's Medusa heads, which have its slot; 0 without."""
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

    def compose(self, slot: int, composition: Composition, slots: Sequence[int]) -> None:
        """Make `slot`, one of those behind the adapters', the sum of the adapters in `slots`."""

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
    num_sums: int = 0
    """Sums of adapters that requests can use at once; they take slots behind those of adapters."""


@dataclass
class Changes:
    """What happened since the last call."""

    unloaded: list[str] = field(default_factory=list)
    """Adapters that have left, whose cached KV can be dropped. They may be on their way back: this comes before
    `states`.
    """
    states: dict[str, tuple[Residency, str]] = field(default_factory=dict)
    """By digest: where it is now, and why it failed."""


@dataclass(eq=False)
class CachedAdapter:
    """An adapter in host memory."""

    digest: str
    content: Content
    score: float = 0.0
    """The adapter with the lowest score is evicted first."""
    slot: int = -1
    num_users: int = 0
    """Running requests."""
    num_uses: int = 0
    """Requests that have run since it was loaded."""
    is_pinned: bool = False
    is_copying: bool = False
    """Is being copied into its slot."""
    is_draining: bool = False
    """Takes no new request: another adapter needs its slot."""
    evict_when_idle: bool = False
    """Is unloaded as soon as no request uses it."""

    @property
    def is_resident(self) -> bool:
        """Whether a request could use it now."""
        return self.slot >= 0 and not (self.is_copying or self.is_draining or self.evict_when_idle)

    @property
    def may_leave(self) -> bool:
        return self.num_users == 0 and not self.is_pinned and not self.is_copying


class EvictionScores:
    """Scores by which adapters are evicted: the cost of loading one again, times how often it is used, per byte.

    GreedyDual-Size-Frequency (Cherkasova 1998): the score of an adapter that is used is `floor + uses * cost / size`,
    and the floor rises to the score of each evicted adapter. So an adapter that is no longer used is evicted at some
    time, however often it was used before.
    """

    def __init__(self) -> None:
        self._floor = 0.0

    def of(self, num_uses: int, num_bytes: int) -> float:
        """The score of an adapter at its `num_uses`-th use since it was loaded; 0 at the load itself."""
        return self._floor + (num_uses or EXPECTED_USES) * (num_bytes + FIXED_COST) / max(1, num_bytes)

    def evicted(self, score: float) -> None:
        """Raise the floor to the score of an evicted adapter."""
        self._floor = max(self._floor, score)


class AdapterSlots:
    """All adapters of one shard."""

    def __init__(self, limits: SlotLimits, device: Device, load: Callable[[str], None]) -> None:
        """`load` starts to load a digest into host memory; `loaded` or `failed` follow, in the step loop's thread."""
        self.limits = limits
        self.now = 0.0
        """Seconds of a monotonic clock; the step loop updates it."""
        self._device = device
        self._load = load
        self._cached: dict[str, CachedAdapter] = {}  # least recently used first
        self._scores = EvictionScores()
        self._loading: set[str] = set()
        self._unwanted: set[str] = set()
        """Loading adapters that were unloaded since."""
        self._wanted_again: set[str] = set()
        """Adapters being unloaded that were requested since."""
        self._pinned: set[str] = set()
        self._free = list(reversed(range(limits.num_slots)))
        self._copying: list[CachedAdapter] = []
        self._sums: dict[str, list[int]] = {}
        """By digest, the slot of a sum of adapters and the number of its users."""
        self._free_sums = list(reversed(range(limits.num_slots, limits.num_slots + limits.num_sums)))
        self._waiting_since: dict[str, float] = {}  # for a slot
        self._sizes: dict[str, int] = {}  # in bytes, also of those that have left
        self._changes = Changes()

    def poll_copies(self) -> None:
        """Before a step: find the adapters whose copy into their slot is complete."""
        for adapter in self._copying[:]:
            self._poll_copy(adapter)

    @property
    def is_copying(self) -> bool:
        """Whether an adapter is being copied into a slot: call poll_copies() soon."""
        return bool(self._copying)

    # For the scheduler

    def acquire(self, digest: str) -> int | None:
        """The slot for one more running request, or None while the adapter is in no slot."""
        adapter = self._cached.get(digest)
        if adapter is None:
            self.prefetch(digest)
            return None
        if adapter.slot < 0 and not adapter.evict_when_idle:
            self._place(adapter)
        if not adapter.is_resident:
            return None
        adapter.num_users += 1
        adapter.num_uses += 1
        adapter.score = self._scores.of(adapter.num_uses, adapter.content.num_bytes)
        self._cached[digest] = self._cached.pop(digest)
        return adapter.slot

    def compose(self, digest: str, composition: Composition) -> int:
        """The slot of a sum, for one more running request, which has acquired all of its adapters."""
        if digest not in self._sums:
            slot = self._free_sums.pop()
            self._device.compose(slot, composition, [self._cached[part].slot for part in composition.digests])
            self._sums[digest] = [slot, 0]
        self._sums[digest][1] += 1
        return self._sums[digest][0]

    def release_sum(self, digest: str) -> None:
        """One running request less that uses a sum; before it releases the adapters."""
        slot, num_users = self._sums[digest]
        if num_users > 1:
            self._sums[digest][1] -= 1
            return
        del self._sums[digest]
        self._free_sums.append(slot)

    def settle(self, digest: str) -> bool:
        """Whether an adapter is in a slot; if not, it is loaded, and gets a slot that no other adapter needs."""
        adapter = self._cached.get(digest)
        if adapter is None:
            self.prefetch(digest)
            return False
        if adapter.slot < 0 and not adapter.evict_when_idle and self._fits(adapter):
            self._place(adapter)
        return adapter.is_resident

    def slot(self, digest: str) -> int:
        """The slot of an adapter, -1 without one."""
        adapter = self._cached.get(digest)
        return -1 if adapter is None else adapter.slot

    def num_heads(self, digest: str) -> int:
        """Medusa heads of an adapter in a slot."""
        return self._cached[digest].content.num_heads

    def reject_reason(self, digests: Sequence[str]) -> str:
        """Why the adapters of one request can never be in slots together; "" if they can or it is not known yet."""
        if len(digests) > self.limits.num_slots:
            return f"the request's adapters need {len(digests)} slots; this shard has {self.limits.num_slots}"
        num_bytes = sum(self._sizes.get(digest, 0) for digest in digests)
        most = min(self.limits.slot_bytes, self.limits.host_bytes)
        if len(digests) > 1 and num_bytes > most:
            return f"the request's adapters take {num_bytes} bytes; {most} are kept for adapters"
        return ""

    def release(self, digest: str) -> None:
        """One running request less."""
        adapter = self._cached[digest]
        adapter.num_users -= 1
        if adapter.is_draining or adapter.evict_when_idle:
            self._leave_if_idle(adapter)

    # For routers

    def prefetch(self, digest: str) -> None:
        """Load an adapter into host memory unless it is there or loading; again, if it is being unloaded."""
        adapter = self._cached.get(digest)
        if digest in self._unwanted or (adapter is not None and adapter.evict_when_idle):
            self._wanted_again.add(digest)
        elif digest not in self._cached and digest not in self._loading:
            self._loading.add(digest)
            self._changes.states[digest] = (Residency.LOADING, "")
            self._load(digest)

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep an adapter in its slot, or no longer."""
        (self._pinned.add if pinned else self._pinned.discard)(digest)
        adapter = self._cached.get(digest)
        if adapter is not None:
            adapter.is_pinned = pinned
        if pinned:
            self.prefetch(digest)

    def unload(self, digest: str) -> None:
        """Drop an adapter as soon as no running request uses it."""
        self._pinned.discard(digest)
        self._wanted_again.discard(digest)
        adapter = self._cached.get(digest)
        if digest in self._loading:
            self._unwanted.add(digest)
        elif adapter is None:
            self._on_evicted(digest)
        else:
            adapter.evict_when_idle = True
            self._leave_if_idle(adapter)

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
        score = self._scores.of(0, content.num_bytes)
        adapter = self._cached[digest] = CachedAdapter(digest, content, score, is_pinned=digest in self._pinned)
        self._place(adapter)

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
        adapter = self._cached.get(digest)
        return adapter is not None and adapter.is_resident

    def report_all(self) -> None:
        """Report every adapter in a slot as a change, for a router that has just connected."""
        for adapter in self._cached.values():
            if adapter.slot >= 0 and not adapter.is_copying:
                self._changes.states[adapter.digest] = (Residency.RESIDENT, "")

    def check(self, users: Iterable[str], sums: Iterable[str] = ()) -> None:
        """Prove that slots and users add up. `users`: the digests of each running request; `sums`: those of sums.
        Raises RuntimeError.
        """
        num_users = {digest: count for digest, (_, count) in self._sums.items()}
        if num_users != Counter(sums) or len(self._free_sums) + len(self._sums) != self.limits.num_sums:
            raise RuntimeError("users of sums of adapters leaked")
        counts = Counter(users)
        for adapter in self._cached.values():
            if adapter.num_users != counts.pop(adapter.digest, 0):
                raise RuntimeError("users of adapters leaked")
        slots = [adapter.slot for adapter in self._cached.values() if adapter.slot >= 0]
        if counts or sorted([*self._free, *slots]) != list(range(self.limits.num_slots)):
            raise RuntimeError("slots of adapters leaked")

    # Eviction

    def _place(self, adapter: CachedAdapter) -> None:
        """Give an adapter a slot, or wait while all slots are in use; the least recently used one is drained then."""
        while not self._fits(adapter):
            idle = (other for other in self._cached.values() if other.slot >= 0 and other.may_leave)
            victim = min(idle, key=attrgetter("score"), default=None)
            if victim is None:
                self._wait_for_slot(adapter)
                return
            self._scores.evicted(victim.score)
            self._leave_slot(victim)
        adapter.slot = self._free.pop()
        self._waiting_since.pop(adapter.digest, None)
        self._device.put(adapter.slot, adapter.content)
        adapter.is_copying = True
        self._copying.append(adapter)
        self._poll_copy(adapter)

    def _poll_copy(self, adapter: CachedAdapter) -> None:
        if self._device.is_ready(adapter.slot):
            adapter.is_copying = False
            self._copying.remove(adapter)
            self._changes.states[adapter.digest] = (Residency.RESIDENT, "")

    def _fits(self, adapter: CachedAdapter) -> bool:
        in_slots = sum(other.content.num_bytes for other in self._cached.values() if other.slot >= 0)
        return bool(self._free) and in_slots + adapter.content.num_bytes <= self.limits.slot_bytes

    def _wait_for_slot(self, adapter: CachedAdapter) -> None:
        since = self._waiting_since.setdefault(adapter.digest, self.now)
        if self.now - since < self.limits.cycle_seconds:
            return
        for other in self._cached.values():  # in turn: by score, rare adapters would share one slot
            if other.slot >= 0 and not (other.is_pinned or other.is_draining or other.is_copying):
                other.is_draining = True
                self._waiting_since[adapter.digest] = self.now
                return

    def _leave_slot(self, adapter: CachedAdapter) -> None:
        adapter.is_draining = False
        if adapter.is_copying:
            adapter.is_copying = False
            self._copying.remove(adapter)
        if adapter.slot >= 0:
            self._device.clear(adapter.slot)
            self._free.append(adapter.slot)
            adapter.slot = -1
            self._changes.states[adapter.digest] = (Residency.HOST_MEMORY, "")

    def _make_host_room(self, num_bytes: int) -> None:
        """Evict unused adapters, the one with the lowest score first; those in use stay, whatever their size."""
        total = sum(adapter.content.num_bytes for adapter in self._cached.values()) + num_bytes
        if total <= self.limits.host_bytes:
            return
        for adapter in sorted(self._cached.values(), key=attrgetter("score")):
            if total <= self.limits.host_bytes:
                return
            if adapter.may_leave:
                total -= adapter.content.num_bytes
                self._scores.evicted(adapter.score)
                self._leave_slot(adapter)
                self._leave_host(adapter)

    def _leave_if_idle(self, adapter: CachedAdapter) -> None:
        if adapter.num_users == 0:
            self._leave_slot(adapter)
            if adapter.evict_when_idle:
                self._leave_host(adapter)
                self._on_evicted(adapter.digest)

    def _leave_host(self, adapter: CachedAdapter) -> None:
        del self._cached[adapter.digest]
        self._changes.states[adapter.digest] = (Residency.ABSENT, "")
        self._waiting_since.pop(adapter.digest, None)
        self._device.forget(adapter.digest)

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

    def settle(self, digest: str) -> bool:
        return False

    def num_heads(self, digest: str) -> int:
        return 0

    def reject_reason(self, digests: Sequence[str]) -> str:
        return ""

    def release(self, digest: str) -> None:
        pass

    def is_resident(self, digest: str) -> bool:
        return True

    def check(self, users: Iterable[str], sums: Iterable[str] = ()) -> None:
        pass
