"""A shard's adapter support: the model's LoRA targets, the slots, and the thread that reads files into host memory.

Decides how much memory adapters may take; shard/scheduler/adapter_slots.py assigns the slots. Files are read in the
order of the requests, in parallel with the step loop. A file may be damaged on its disk: `CheckedFiles` reads those
whose bytes match their checksum, and no others. With several ranks, all of them read a file and put it into a slot.
"""

import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from lorikeet.proto import digest
from lorikeet.proto.params import MAX_DRAFT_TOKENS, Composition
from lorikeet.shard.batch.padding import DRAFTS_PER_ROW
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.streams import AdapterRead, Inbox
from lorikeet.shard.model import Model
from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.adapters.loading import (
    NICENESS,
    AdapterContent,
    AdapterFiles,
    Form,
    HostLayout,
    Opened,
    RowParallelSum,
    SlotParts,
    reading_threads,
)
from lorikeet.shard.model.kv_memory import adapter_bytes, adapter_host_bytes
from lorikeet.shard.model.lora.memory import Arena, PinnedMemory
from lorikeet.shard.model.lora.served_file import header_end, map_file
from lorikeet.shard.model.lora.targets import NO_SUMS, ComposedSlots, compiled
from lorikeet.shard.model.medusa.heads import MOST_HEADS, HeadsPool
from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.ranks.commands import AllocateAdapters, Clear, Compose, Forget, Put, Read
from lorikeet.shard.ranks.leader import Leader
from lorikeet.shard.scheduler.adapter_slots import DAMAGED, NOT_HERE, AdapterSlots, Content, Device, SlotLimits

log = structlog.get_logger()


class ModelSlots:
    """The slots of a model's LoRA targets and heads on CPU."""

    def __init__(
        self,
        heads: HeadsPool,
        parts: SlotParts,
        sums: ComposedSlots = NO_SUMS,
    ) -> None:
        self._heads, self._parts, self._sums = heads, parts, sums
        self._used: dict[int, AdapterContent] = {}
        """Their memory, whose addresses the targets have, is not freed before the slot is cleared."""

    def put(self, slot: int, content: Content) -> None:
        """Put `content` into `slot`."""
        assert isinstance(content, AdapterContent)
        if content.form is Form.BLOCKS:
            for target, entry in zip(content.targets, content.addresses().tolist(), strict=True):
                target.bind(slot, entry)
        else:
            for index, target in enumerate(content.targets):
                target.put(slot, content.weights(index))
        self._parts.put(slot, content, content.memory)
        if content.heads is not None:
            assert content.heads.packed is not None
            self._heads.put(slot, content.heads.packed)
        self._used[slot] = content

    def is_ready(self, slot: int) -> bool:
        """Immediately: slots refer to host memory, so nothing is copied."""
        return slot in self._used

    def compose(self, slot: int, composition: Composition, slots: Sequence[int]) -> None:
        """Make `slot` the sum of the adapters in `slots`."""
        self._sums.put(slot, composition, slots)

    def clear(self, slot: int) -> None:
        """Clear `slot`."""
        self._heads.clear(slot)
        content = self._used.pop(slot)
        self._parts.clear(slot, content)
        for target in content.targets:
            target.put(slot, None)

    def forget(self, digest: str) -> None:
        """Does nothing: nothing here is kept by digest."""


def build_adapters(
    config: ShardConfig, model: Model, inbox: Inbox, leader: Leader | None = None
) -> AdapterSlots | None:
    """Slots and the thread that fills them; None without an adapter store."""
    if config.adapter_store is None:
        return None
    slot_bytes = adapter_bytes(config, model)
    host_bytes = adapter_host_bytes(config, model, slot_bytes)
    num_slots, num_sums = config.max_active_adapters, config.max_running
    limits = SlotLimits(num_slots, slot_bytes, host_bytes, config.adapter_cycle_time_s, num_sums)
    add_up = None if leader is None else leader.group.add_up
    device, files, form = prepare(config, model, limits.num_slots, host_bytes, add_up)
    log.info("adapter_memory", slots=limits.num_slots, slot_bytes=slot_bytes, host_bytes=host_bytes, computed_by=form)
    store = Path(config.adapter_store)
    if leader is None:
        return AdapterSlots(limits, device, AdapterReader(store, files.read, inbox).request)
    leader.send(AllocateAdapters(limits.num_slots, host_bytes))
    reader = AdapterReader(store, CollectiveReader(files, leader.group).read_first, inbox)

    def read(digest: str) -> None:
        leader.send(Read(digest))
        reader.request(digest)

    return AdapterSlots(limits, BroadcastingSlots(device, leader), read)


def prepare(
    config: ShardConfig, model: Model, num_slots: int, host_bytes: int, add_up: RowParallelSum | None = None
) -> tuple[Device, AdapterFiles, str]:
    """The slots, the reader of their files, and the name of what computes them."""
    model.allocate_adapters(num_slots, config.max_running)
    device, destination, form = _choose_form(config, model, num_slots, host_bytes)
    return device, CheckedFiles(model.lora_targets, destination, model.heads, add_up), form


def _layers(model: Model) -> tuple[tuple[int, int, int], ...]:
    specs = [binding.spec for binding in model.bindings if binding.spec is not None]
    return tuple((spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in specs)


def _choose_form(config: ShardConfig, model: Model, num_slots: int, host_bytes: int) -> tuple[Device, HostLayout, str]:
    dtype, on, layers = model.info.dtype, model.info.device, _layers(model)
    parts = SlotParts(model.bindings, model.added_tokens)
    if on.type == "cpu":
        form = "reference" if compiled(dtype) is None else "compiled"
        slots = ModelSlots(model.heads, parts, model.composed_slots)
        return slots, HostLayout(dtype, Arena(host_bytes), layers=layers), form
    num_drafted = config.speculation_max_batch_size * (1 + MAX_DRAFT_TOKENS)
    max_rows = max(config.graph_rows, config.step_tokens + config.max_running + num_drafted)
    max_drafts = max(DRAFTS_PER_ROW * config.graph_rows, num_drafted * MOST_HEADS)
    try:
        # at the output head, the rows of all heads may follow the row of each draft
        kernels = model.enable_device_kernels(num_slots, max_rows, max_drafts, config.max_running)
    except ImportError as missing:
        raise ValueError(f"adapters on {on} need the package triton: {missing}") from missing
    from lorikeet.shard.model.adapters.upload import DeviceSlots

    memory = PinnedMemory(host_bytes)
    return DeviceSlots(kernels, model.heads, parts), HostLayout(dtype, memory, kernels, layers), "triton"


class CheckedFiles(AdapterFiles):
    """`AdapterFiles` of a store. All bytes of a file are compared with its checksum before the adapter is used, in
    parallel with steps.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        destination: HostLayout,
        heads: HeadsPool | None = None,
        sum_over_ranks: RowParallelSum | None = None,
    ) -> None:
        super().__init__(targets, destination, heads, sum_over_ranks)
        # threads of their own: they hold the interpreter lock for moments only, so that they may run at low priority
        self._threads = ThreadPoolExecutor(reading_threads(), "adapter checksum", _step_back)

    def read(self, path: Path) -> AdapterContent:
        """Read an adapter's file; its factors are copied while it is compared. Raises ValueError with a reason, also
        for a damaged file, and FileNotFoundError.
        """
        content = map_file(path)
        with self._compared(content):
            return self.lay_out(self.plan(content))

    def open(self, path: Path) -> Opened:
        """Raises ValueError with a reason, also for a damaged file, and FileNotFoundError."""
        content = map_file(path)
        with self._compared(content):
            return self.plan(content)

    @contextmanager
    def _compared(self, content: mmap.mmap) -> Iterator[None]:
        """Compares a file with its checksum while the body runs. Raises ValueError at the end where they differ,
        in place of any other one: the reason may be a damaged byte.
        """
        is_intact = self._begin(content)
        try:
            yield
        except Exception as error:
            if is_intact() or not isinstance(error, ValueError):
                raise
            raise ValueError(DAMAGED) from None
        if not is_intact():
            raise ValueError(DAMAGED)

    def _begin(self, content: mmap.mmap) -> Callable[[], bool]:
        """Starts to compare; the result waits for all of it."""
        view, begin = memoryview(content), header_end(content)
        pieces = (view[at : at + digest.PIECE_BYTES] for at in range(begin, len(view), digest.PIECE_BYTES))
        digests = self._threads.map(digest.of_piece, pieces)
        return lambda: digest.matches_pieces(content[:begin], list(digests))


def _step_back() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


log = structlog.get_logger()


class AdapterReader:
    """Reads the requested adapters and puts them into the inbox."""

    def __init__(self, store: Path, read: Callable[[Path], Content], inbox: Inbox) -> None:
        """`store`: folder of files named by digest; `read` raises ValueError with a reason, or FileNotFoundError."""
        self._store = store
        self._read = read
        self._inbox = inbox
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="adapter reader", daemon=True).start()

    def request(self, digest: str) -> None:
        """Request an adapter. Any thread may call this."""
        self._requests.put(digest)

    def _run(self) -> None:
        while True:
            digest = self._requests.get()
            path = self._store / f"{digest}.safetensors"
            try:
                item = AdapterRead(digest, self._read(path))
            except Exception as error:  # only this adapter fails
                item = AdapterRead(digest, None, reason_of(error, digest))
            self._inbox.put(item)


def reason_of(error: Exception, digest: str) -> str:
    """The error message for an adapter that was not read. Unexpected errors are logged."""
    if isinstance(error, FileNotFoundError):
        return NOT_HERE
    if isinstance(error, ValueError):
        return str(error)
    log.error("adapter_read_failed", digest=digest, exc_info=error)
    return f"the adapter could not be read: {type(error).__name__}"


From = TypeVar("From")
To = TypeVar("To")


@dataclass(frozen=True)
class AdapterPart:
    """The first rank's part of an adapter that every rank holds."""

    digest: str
    own: AdapterContent

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes

    @property
    def num_heads(self) -> int:
        return self.own.num_heads


class CollectiveReader:
    """Reads an adapter on all ranks together, in the reader thread of each."""

    def __init__(self, files: AdapterFiles, group: Group) -> None:
        self._files, self._group = files, group

    def read(self, path: Path) -> AdapterContent:
        """The rank's part of an adapter, once every rank has its own. Raises ValueError on every rank or on none."""
        opened = self._all(path, self._files.open, path.stem)
        return self._all(opened, self._files.lay_out, path.stem)

    def _all(self, what: From, do: Callable[[From], To], digest: str) -> To:
        """`do(what)`, once every rank has done it."""
        found, reason = None, ""
        try:
            found = do(what)
        except Exception as error:
            reason = reason_of(error, digest)
        reason = self._group.agree(reason)
        if found is None or reason:
            raise ValueError(reason)
        return found

    def read_first(self, path: Path) -> AdapterPart:
        """`read` on the first rank, which names adapters to the others by digest."""
        return AdapterPart(path.stem, self.read(path))


class BroadcastingSlots:
    """The first rank's slots, whose changes are sent to the other ranks."""

    def __init__(self, own: Device, leader: Leader) -> None:
        self._own, self._leader = own, leader

    def put(self, slot: int, content: Content) -> None:
        """Put `content` into `slot` on every rank."""
        assert isinstance(content, AdapterPart)
        self._leader.send(Put(slot, content.digest))
        self._own.put(slot, content.own)

    def is_ready(self, slot: int) -> bool:
        """On this rank; the others wait for their own copies before they compute a step."""
        return self._own.is_ready(slot)

    def clear(self, slot: int) -> None:
        """Clear `slot` on every rank."""
        self._leader.send(Clear(slot))
        self._own.clear(slot)

    def compose(self, slot: int, composition: Composition, slots: Sequence[int]) -> None:
        """Make `slot` the sum of the adapters in `slots` on every rank."""
        self._leader.send(Compose(slot, composition, tuple(slots)))
        self._own.compose(slot, composition, slots)

    def forget(self, digest: str) -> None:
        """Drop an adapter from host memory on every rank."""
        self._leader.send(Forget(digest))
