"""Adapters of one shard, put together: the model's sites, the slots' bookkeeping and the thread that reads files.

Knows how much memory they may take; who is in which slot is for slots.py, what a slot does for shard/model/lora.py.
"""

from pathlib import Path

import structlog

from shard.adapter_reader import AdapterReader
from shard.config import ShardConfig
from shard.inbox import Inbox
from shard.memory import adapter_bytes
from shard.model import Model
from shard.model.adapter_file import AdapterContent, read_adapter
from shard.model.adapter_memory import Arena
from shard.model.lora import AdapterSite
from shard.slots import AdapterSlots, Content, SlotLimits

log = structlog.get_logger()

HOST_SHARE = 4
"""Times the memory of slots that host memory may take, unless told otherwise; on CPU the two are one."""


class ModelSlots:
    """The slots of a model's sites."""

    def __init__(self) -> None:
        self._used: dict[int, list[AdapterSite]] = {}

    def put(self, slot: int, content: Content) -> None:
        """Let `slot` mean `content`."""
        assert isinstance(content, AdapterContent)
        for site, weights in content.weights:
            site.put(slot, weights)
        self._used[slot] = [site for site, _ in content.weights]

    def clear(self, slot: int) -> None:
        """Let `slot` mean nothing."""
        for site in self._used.pop(slot):
            site.put(slot, None)


def build_adapters(config: ShardConfig, model: Model, inbox: Inbox) -> AdapterSlots | None:
    """Slots and what fills them, or None where no adapters are served."""
    if config.adapter_store is None:
        return None
    slot_bytes = adapter_bytes(config, model)
    host_bytes = slot_bytes
    if model.info.device.type != "cpu":
        host_bytes = config.adapter_host_memory or HOST_SHARE * slot_bytes
    limits = SlotLimits(config.max_active_adapters, slot_bytes, host_bytes, config.adapter_cycle_time_s)
    model.allocate_adapters(limits.num_slots)
    sites, dtype = model.adapter_sites, model.info.dtype
    arena = Arena(host_bytes) if model.info.device.type == "cpu" else None
    reader = AdapterReader(Path(config.adapter_store), lambda path: read_adapter(path, sites, dtype, arena), inbox)
    log.info("adapter memory", slots=limits.num_slots, slot_bytes=slot_bytes, host_bytes=host_bytes)
    return AdapterSlots(limits, ModelSlots(), reader.ask)
