"""Adapters of one shard, put together: the model's sites, the slots' bookkeeping and the thread that reads files.

Knows how much memory they may take; shard/scheduler/adapter_slots.py assigns slots.
"""

from collections.abc import Sequence
from pathlib import Path

import structlog

from lorikeet.shard.adapters.ranks import BroadcastingSlots, CollectiveReader
from lorikeet.shard.adapters.reader import AdapterReader
from lorikeet.shard.batch.padding import DRAFTS_PER_ROW
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.codec import MAX_DRAFTS
from lorikeet.shard.grpc.inbox import Inbox
from lorikeet.shard.model import Model
from lorikeet.shard.model.adapters.loading import AdapterContent, AdapterFiles, Destination, RowParallelSum
from lorikeet.shard.model.adapters.plan import Form
from lorikeet.shard.model.kv_memory import adapter_bytes
from lorikeet.shard.model.lora.memory import Arena, PinnedMemory
from lorikeet.shard.model.lora.targets import LoraTarget, compiled
from lorikeet.shard.model.medusa.heads import HeadsPool
from lorikeet.shard.model.medusa.loading import MOST_HEADS
from lorikeet.shard.ranks.leader import Ranks
from lorikeet.shard.scheduler.adapter_slots import AdapterSlots, Content, Device, SlotLimits

log = structlog.get_logger()

HOST_SHARE = 4
"""Times the memory of slots that host memory may take, unless told otherwise; on CPU the two are one."""


class ModelSlots:
    """The slots of a model's sites."""

    def __init__(self, heads: HeadsPool) -> None:
        self._heads = heads
        self._used: dict[int, Sequence[LoraTarget]] = {}

    def put(self, slot: int, content: Content) -> None:
        """Let `slot` mean `content`."""
        assert isinstance(content, AdapterContent)
        if content.form is Form.BLOCKS:
            for site, entry in zip(content.targets, content.addresses().tolist(), strict=True):
                site.bind(slot, entry)
        else:
            for index, site in enumerate(content.targets):
                site.put(slot, content.weights(index))
        if content.heads is not None:
            assert content.heads.packed is not None
            self._heads.put(slot, content.heads.packed)
        self._used[slot] = content.targets

    def is_ready(self, slot: int) -> bool:
        """At once: the slots lie where the adapters do."""
        return slot in self._used

    def clear(self, slot: int) -> None:
        """Let `slot` mean nothing."""
        self._heads.clear(slot)
        for site in self._used.pop(slot):
            site.put(slot, None)

    def forget(self, digest: str) -> None:
        """Nothing here is named by digests."""


def build_adapters(config: ShardConfig, model: Model, inbox: Inbox, ranks: Ranks | None = None) -> AdapterSlots | None:
    """Slots and what fills them, or None where no adapters are served."""
    if config.adapter_store is None:
        return None
    slot_bytes = adapter_bytes(config, model)
    host_bytes = slot_bytes
    if model.info.device.type != "cpu":
        host_bytes = config.adapter_host_memory or HOST_SHARE * slot_bytes
    limits = SlotLimits(config.max_active_adapters, slot_bytes, host_bytes, config.adapter_cycle_time_s)
    add_up = None if ranks is None else ranks.group.add_up
    device, files, form = prepare(config, model, limits.num_slots, limits.host_bytes, add_up)
    log.info("adapter memory", slots=limits.num_slots, slot_bytes=slot_bytes, host_bytes=host_bytes, computed_by=form)
    store = Path(config.adapter_store)
    if ranks is None:
        return AdapterSlots(limits, device, AdapterReader(store, files.read, inbox).ask)
    ranks.leader.allocate_adapters(limits.num_slots, limits.host_bytes)
    reader = AdapterReader(store, CollectiveReader(files, ranks.group).read_first, inbox)

    def read(digest: str) -> None:
        ranks.leader.read(digest)
        reader.ask(digest)

    return AdapterSlots(limits, BroadcastingSlots(device, ranks.leader), read)


def prepare(
    config: ShardConfig, model: Model, num_slots: int, host_bytes: int, add_up: RowParallelSum | None = None
) -> tuple[Device, AdapterFiles, str]:
    """How adapters are computed, for the life of the shard: slots, what reads files for them, and its name."""
    model.allocate_adapters(num_slots)
    device, destination, form = _choose_form(config, model, num_slots, host_bytes)
    return device, AdapterFiles(model.lora_targets, destination, model.heads, add_up), form


def _choose_form(config: ShardConfig, model: Model, num_slots: int, host_bytes: int) -> tuple[Device, Destination, str]:
    dtype, on = model.info.dtype, model.info.device
    if on.type == "cpu":
        form = "the specification" if compiled(dtype) is None else "compiled code"
        return ModelSlots(model.heads), Destination(dtype, Arena(host_bytes)), form
    num_drafted = config.speculation_max_batch_size * (1 + MAX_DRAFTS)
    max_rows = max(config.graph_rows, config.step_tokens + config.max_running + num_drafted)
    max_drafts = max(DRAFTS_PER_ROW * config.graph_rows, num_drafted * MOST_HEADS)
    try:
        # at the output head each draft's row may have those of all heads behind it
        kernels = model.enable_device_kernels(num_slots, max_rows, max_drafts)
    except ImportError as missing:
        raise ValueError(f"adapters on {on} need triton, which cannot be imported: {missing}") from missing
    from lorikeet.shard.model.adapters.upload import DeviceSlots

    return DeviceSlots(kernels, model.heads), Destination(dtype, PinnedMemory(host_bytes), kernels), "triton"
