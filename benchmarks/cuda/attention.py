"""Attention backends alone, by shape of a step: one layer of the large model over paged K and V.

The layers that are called one after the other have pages of their own, so that none is found in a cache.
"""

from collections.abc import Callable
from itertools import cycle

import torch

from benchmarks.cuda.setup import LlamaShape, Setup, Step
from benchmarks.cuda.timing import seconds_of
from lorikeet.shard import attention
from lorikeet.shard.attention import AttentionBackend, AttentionSpec, LayerKV
from lorikeet.shard.attention.flash import choose_implementation, has_page_tables
from lorikeet.shard.attention.layerwise import PlacedKV
from lorikeet.shard.attention.paged import store
from lorikeet.shard.attention.varlen import CopiedKeysAttention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.segments import Segment

OWNERS = {"varlen": "VarlenAttention", "triton": "PagedAttention"}
"""By `--attention`."""
BACKENDS = tuple(OWNERS)
MOST_BYTES = 4 << 30
"""Maximum bytes of all layers' K and V together."""
MOST_LAYERS = 8
"""Maximum number of these layers; at least one."""


def spec_of(shape: LlamaShape) -> AttentionSpec:
    dim = shape.head_dim
    return AttentionSpec(shape.heads, shape.kv_heads, dim, dim, dim**-0.5)


@torch.inference_mode()
def seconds_by_backend(setup: Setup, step: Step) -> dict[str, float]:
    """Seconds of one layer, with the implementation of FlashAttention that `auto` uses on this device."""
    device = torch.device(setup.device)
    choose_implementation(device)
    return {name: seconds_of(_work(setup, name, step), device, setup.repeats) for name in BACKENDS}


def _work(setup: Setup, name: str, step: Step) -> Callable[[], torch.Tensor]:
    device, dtype, spec = torch.device(setup.device), getattr(torch, setup.dtype), spec_of(setup.large)
    is_copied = name == "varlen" and setup.is_cuda and not has_page_tables()
    backend = CopiedKeysAttention(store=store) if is_copied else attention.create(name, device, dtype, None)
    pages = -(-step.context // backend.page_size)
    num_bytes = step.requests * pages * backend.page_bytes(spec, dtype)
    num_layers = max(1, min(MOST_LAYERS, MOST_BYTES // num_bytes)) if setup.is_cuda else 1
    kvs = [backend.allocate(spec, step.requests * pages, dtype, device) for _ in range(num_layers)]
    layers = cycle(kvs)
    if setup.is_cuda and not is_copied and owner_of(backend, kvs[0]) != OWNERS[name]:
        raise RuntimeError(f"{name} does not compute this layer here, but {owner_of(backend, kvs[0])}")
    inputs = StepInputs(backend.page_size, device)
    order = torch.randperm(step.requests * pages, generator=torch.Generator().manual_seed(setup.seed)).tolist()
    start = step.context - step.tokens
    segments = [Segment(start, step.tokens, order[at * pages : (at + 1) * pages]) for at in range(step.requests)]
    num_rows = step.requests * step.tokens
    ids = torch.zeros(num_rows, dtype=torch.long, device=device)
    inputs.fill(segments, ids, ids[:1], [0])
    backend.prepare(inputs)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    query, key, value = (torch.randn(num_rows, each, spec.key_dim, device=device, dtype=dtype) for each in heads)
    return lambda: backend.attend(spec, next(layers), query, key, value)


def owner_of(backend: AttentionBackend, kv: LayerKV | None) -> str:
    """The backend that computes a layer: one that does not support it here leaves it to the next."""
    return type(kv.owner if isinstance(kv, PlacedKV) else backend).__name__
