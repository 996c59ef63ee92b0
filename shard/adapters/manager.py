"""Builds a shard's adapter support: the model's LoRA targets, the slots and the thread that reads files.

Decides how much memory adapters may take; shard/scheduler/adapter_slots.py assigns the slots.
"""

from collections.abc import Sequence
from pathlib import Path

import structlog

from lorikeet.proto.params import MAX_DRAFT_TOKENS, Composition
from lorikeet.shard.adapters.ranks import BroadcastingSlots, CollectiveReader
from lorikeet.shard.adapters.reader import AdapterReader, CheckedFiles
from lorikeet.shard.batch.padding import DRAFTS_PER_ROW
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.inbox import Inbox
from lorikeet.shard.model import Model
from lorikeet.shard.model.adapters.added_tokens import AddedTokens
from lorikeet.shard.model.adapters.loading import AdapterContent, AdapterFiles, Form, HostLayout, RowParallelSum
from lorikeet.shard.model.attention_binding import AttentionBinding
from lorikeet.shard.model.kv_memory import adapter_bytes, adapter_host_bytes
from lorikeet.shard.model.lora.memory import Arena, PinnedMemory
from lorikeet.shard.model.lora.targets import NO_SUMS, ComposedSlots, compiled
from lorikeet.shard.model.medusa.heads import HeadsPool
from lorikeet.shard.model.medusa.loading import MOST_HEADS
from lorikeet.shard.ranks.commands import AllocateAdapters, Read
from lorikeet.shard.ranks.leader import Leader
from lorikeet.shard.scheduler.adapter_slots import AdapterSlots, Content, Device, SlotLimits

log = structlog.get_logger()


class ModelSlots:
    """The slots of a model's LoRA targets and heads on CPU."""

    def __init__(
        self,
        heads: HeadsPool,
        sums: ComposedSlots = NO_SUMS,
        bindings: Sequence[AttentionBinding] = (),
        added_tokens: AddedTokens | None = None,
    ) -> None:
        """`bindings`: of all layers, in order."""
        self._heads, self._sums, self._bindings, self._added_tokens = heads, sums, bindings, added_tokens
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
        if content.virtual is not None:
            target, rows = content.virtual
            target.virtual[slot] = rows
        if content.prefix is not None:
            for binding, (keys, values) in zip(self._bindings, content.prefix, strict=True):
                binding.prefixes[slot] = keys, values
        if self._added_tokens is not None:
            self._added_tokens.put(slot, content.num_added)
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
        for target in self._used.pop(slot).targets:
            target.put(slot, None)
            target.virtual.pop(slot, None)
        for binding in self._bindings:
            binding.prefixes.pop(slot, None)
        if self._added_tokens is not None:
            self._added_tokens.clear(slot)

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
    dtype, on = model.info.dtype, model.info.device
    if on.type == "cpu":
        form = "reference" if compiled(dtype) is None else "compiled"
        return (
            ModelSlots(model.heads, model.composed_slots, model.bindings, model.added_tokens),
            HostLayout(dtype, Arena(host_bytes), layers=_layers(model)),
            form,
        )
    num_drafted = config.speculation_max_batch_size * (1 + MAX_DRAFT_TOKENS)
    max_rows = max(config.graph_rows, config.step_tokens + config.max_running + num_drafted)
    max_drafts = max(DRAFTS_PER_ROW * config.graph_rows, num_drafted * MOST_HEADS)
    try:
        # at the output head, the rows of all heads may follow the row of each draft
        kernels = model.enable_device_kernels(num_slots, max_rows, max_drafts, config.max_running)
    except ImportError as missing:
        raise ValueError(f"adapters on {on} need the package triton: {missing}") from missing
    from lorikeet.shard.model.adapters.upload import DeviceSlots

    return DeviceSlots(kernels, model.heads), HostLayout(dtype, PinnedMemory(host_bytes), kernels), "triton"
