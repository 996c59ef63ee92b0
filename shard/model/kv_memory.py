"""The number of KV pages: the memory left after the model is loaded, within the configured limits."""

from pathlib import Path

import structlog
import torch

from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model
from lorikeet.shard.model.lora.targets import LoraTarget

log = structlog.get_logger()

ADAPTER_SHARE = 0.1
"""Part of the memory that slots for adapters take: on CPU by default, on CUDA at most."""
SLOT_RANKS, SLOT_SHARE = 128, 0.04
"""By default slots on CUDA hold this many ranks of all modules, such as eight adapters of rank 16; or, if that is more,
a part of the memory that weights leave.
"""
HOST_SLOTS, HOST_SHARE = 4, 0.5
"""Default host memory for adapters on CUDA: a multiple of the most that slots may take, within a part of the memory
that is available to all devices together.
"""
CPU_SHARE = 0.25
"""Part of the available memory that KV takes on CPU by default: other processes need some too."""

MIN_TOTAL_TOKENS = 512
"""A request has room for this many tokens, where the KV memory decides how many."""
STEPS_WITHOUT_KV = 3
"""Steps of the longest prompts that requests may fill in advance, for a model whose K and V are not kept."""


def choose_num_pages(
    config: ShardConfig, model: Model, draft_model: Model | None = None, graph_bytes: int = 0, num_spare: int = 0
) -> int:
    """The number of KV pages, each of both models, besides `num_spare` pages and `graph_bytes` for graphs. Raises
    ValueError when they cannot hold one request of `max_total_tokens`, unless that may be lowered.
    """
    page_bytes = model.page_bytes + (0 if draft_model is None else draft_model.page_bytes)
    num_pages = config.num_pages
    if num_pages is None and model.shares_kv:
        num_pages = STEPS_WITHOUT_KV * (-(-config.step_tokens // model.page_size) + config.max_running)
    elif num_pages is None:
        num_pages = max(0, measure_budget(config, model) - graph_bytes) // page_bytes - num_spare
        # More than every running and waiting request at its longest could fill only serves prefixes.
        num_useful = (config.max_running + config.max_waiting) * -(-config.max_total_tokens // model.page_size)
        num_pages = min(num_pages, num_useful)
    if config.max_batch_total_tokens is not None:
        num_pages = min(num_pages, -(-config.max_batch_total_tokens // model.page_size))
    num_tokens = num_pages * model.page_size
    least = min(config.max_total_tokens, MIN_TOTAL_TOKENS) if config.fits_kv_memory else config.max_total_tokens
    if num_tokens < least:
        raise ValueError(
            f"KV memory holds {num_tokens} tokens ({page_bytes // model.page_size} bytes each), fewer than the "
            f"{least} of one request: lower --max-total-tokens or give more memory"
        )
    slot_bytes = adapter_bytes(config, model)
    log.info(
        "kv_memory",
        num_pages=num_pages,
        num_tokens=num_tokens,
        bytes=num_pages * page_bytes,
        graph_bytes=graph_bytes,
        adapter_bytes=slot_bytes,
        adapter_tokens=slot_bytes * model.page_size // page_bytes,
    )
    if config.fits_kv_memory:
        longest = min(num_tokens, config.max_total_tokens)
        log.info("max_total_tokens", tokens=longest, model=config.max_total_tokens, kv_memory=num_tokens)
    return num_pages


def measure_budget(config: ShardConfig, model: Model) -> int:
    """Bytes available for KV."""
    if model.info.device.type == "cuda":
        return max(0, measure_cuda_budget(config, model) - adapter_bytes(config, model))
    return cpu_budget(config) - adapter_bytes(config, model)


def adapter_bytes(config: ShardConfig, model: Model) -> int:
    """Bytes available for the adapters in slots; on CPU no other adapters are in memory."""
    if config.adapter_store is None:
        return 0
    device, fraction = model.info.device, config.adapter_memory_fraction
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if fraction is not None:
            return int(total * fraction)
        ranked = [of for of in model.lora_targets.values() if not (isinstance(of, LoraTarget) and of.is_norm)]
        num_columns = sum(target.num_in + target.num_out for target in ranked)
        free_of_weights = total * config.cuda_memory_fraction - torch.cuda.memory_allocated(device)
        return default_slot_bytes(total, free_of_weights, num_columns * model.info.dtype.itemsize)
    configured = (config.adapter_host_memory or 0) // config.num_ranks
    return configured or int(cpu_budget(config) * (ADAPTER_SHARE if fraction is None else fraction))


def default_slot_bytes(total: int, free_of_weights: float, rank_bytes: int) -> int:
    """Bytes for the adapters in slots of a device with `total` bytes; what adapters do not take is KV. `rank_bytes`: of
    one rank of an adapter of all modules.
    """
    return int(min(ADAPTER_SHARE * total, max(SLOT_RANKS * rank_bytes, SLOT_SHARE * free_of_weights)))


def adapter_host_bytes(config: ShardConfig, model: Model, slot_bytes: int) -> int:
    """Bytes of host memory for adapters: pinned memory for a CUDA device. On CPU slots are part of it."""
    device = model.info.device
    if device.type == "cpu":
        return slot_bytes
    if config.adapter_host_memory is not None:
        return config.adapter_host_memory
    if device.type != "cuda":
        return HOST_SLOTS * slot_bytes
    total = torch.cuda.get_device_properties(device).total_memory
    # each device that this process sees may have a shard of its own, which pins as much
    share = HOST_SHARE * available_bytes() / max(1, torch.cuda.device_count())
    return int(min(HOST_SLOTS * ADAPTER_SHARE * total, share))


def cpu_budget(config: ShardConfig) -> int:
    """Bytes available for KV and adapters together on CPU, of one rank."""
    if config.cpu_memory is not None:
        return config.cpu_memory // config.num_ranks
    return int(available_bytes() * CPU_SHARE * config.memory_wiggle_room)


@torch.inference_mode()
def measure_cuda_budget(config: ShardConfig, model: Model) -> int:
    """The free part of the configured fraction of the device, minus what the largest step needs in addition to KV."""
    device = model.info.device
    memory = StepMemory(device)
    if model.others is not None:
        model.others.begin_memory()
    num_tokens = config.step_tokens
    num_rows = min(config.max_running, num_tokens)
    input_ids = torch.zeros(num_tokens, dtype=torch.long, device=device)
    rows = torch.arange(num_rows, device=device)
    model.inputs.fill(largest_step(config, model.page_size), input_ids, rows)
    logits = model.forward()
    spare = 5 * logits.numel() * logits.element_size()  # sampling: filters sort, noise, distributions
    del logits
    left = memory.room(config, spare)
    return left if model.others is None else model.others.least_memory(left, spare)


class StepMemory:
    """Measures the device memory that steps need in addition to weights and KV."""

    def __init__(self, device: torch.device) -> None:
        """Begins to measure."""
        self._device = device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    def room(self, config: ShardConfig, spare: int) -> int:
        """Bytes left of the configured fraction of the device, after what the steps so far and `spare` need."""
        step = torch.cuda.max_memory_allocated(self._device) - self._before + spare
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_allocated(self._device)
        # allocated by torch; in addition by a step; by the CUDA context, libraries and other processes
        log.info(
            "device_memory", total_bytes=total, allocated_bytes=held, step_bytes=step, other_bytes=total - free - held
        )
        return room(config, total, used=total - free, step=step)


def room(config: ShardConfig, total: int, used: int, step: int) -> int:
    """Bytes for KV, adapters and graphs on a device with `total` bytes, of which `used` are taken and steps need `step`
    for a time.
    """
    return max(0, int((total * config.cuda_memory_fraction - used - step) * config.memory_wiggle_room))


def largest_step(config: ShardConfig, page_size: int) -> list[Segment]:
    """The prompts of a step of `step_tokens`, each at most as long as a request. Without KV nothing is stored."""
    firsts = range(0, config.step_tokens, config.max_total_tokens)
    lengths = [min(config.max_total_tokens, config.step_tokens - first) for first in firsts]
    return [Segment(0, length, range(-(-length // page_size))) for length in lengths]


def available_bytes() -> int:
    """Memory that this process may still allocate: the system's, or less within a limited control group."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            system = int(line.split()[1]) * 1024
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        return min(system, max(0, int(text) - int(used.read_text())))
    return system
