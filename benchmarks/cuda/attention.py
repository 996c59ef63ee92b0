"""Attention backends alone, by shape of a step: one layer of the large model over paged K and V.

The layers that are called one after the other have pages of their own, so that none is found in a cache.
"""

from collections.abc import Callable
from itertools import cycle

import torch

from benchmarks.cuda import speeds
from benchmarks.cuda.setup import LlamaShape, Setup, Step, steps
from benchmarks.cuda.timing import seconds_of
from benchmarks.evidence.figure import Case, Cases, Raw
from lorikeet.shard import attention
from lorikeet.shard.attention import AttentionSpec
from lorikeet.shard.batch.inputs import Segment, StepInputs

BACKENDS = ("varlen", "triton")
MOST_BYTES = 4 << 30
"""Maximum bytes of all layers' K and V together."""
MOST_LAYERS = 8
"""Maximum number of these layers; at least one."""


def measure(setup: Setup) -> Cases:
    """One case per shape, with the seconds of every backend and what reading K and V takes at least."""
    found = speeds.measured(setup, setup.small)
    for step in steps(setup):
        times = {name: _seconds(setup, name, step) for name in BACKENDS}
        num_bytes = step.requests * step.context * setup.large.kv_bytes_per_token / setup.large.layers
        flops = 4 * setup.large.hidden * step.requests * _pairs(step)
        floor = max(num_bytes / found.copy, flops / found.flops)
        yield Case(step.name, {**times, "floor": floor, "decodes": step.tokens == 1})


def _pairs(step: Step) -> float:
    """Query and key that meet in one request."""
    return step.tokens * (step.context - (step.tokens - 1) / 2)


def spec_of(shape: LlamaShape) -> AttentionSpec:
    dim = shape.head_dim
    return AttentionSpec(shape.heads, shape.kv_heads, dim, dim, dim**-0.5)


@torch.inference_mode()
def _seconds(setup: Setup, name: str, step: Step) -> float:
    """Seconds of one layer."""
    work = _work(setup, name, step)
    return seconds_of(work, torch.device(setup.device), setup.repeats)


def _work(setup: Setup, name: str, step: Step) -> Callable[[], torch.Tensor]:
    device, dtype, spec = torch.device(setup.device), getattr(torch, setup.dtype), spec_of(setup.large)
    backend = attention.create(name, device, dtype, None)
    pages = -(-step.context // backend.page_size)
    num_bytes = step.requests * pages * backend.page_bytes(spec, dtype)
    num_layers = max(1, min(MOST_LAYERS, MOST_BYTES // num_bytes)) if setup.is_cuda else 1
    layers = cycle([backend.allocate(spec, step.requests * pages, dtype, device) for _ in range(num_layers)])
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


def triton_over_varlen(raw: Raw) -> float:
    """Time of the one over time of the other."""
    return float(raw["triton"] / raw["varlen"])


def share_of_floor(raw: Raw) -> float:
    """What K and V, or the products, take at least over the faster backend's time."""
    return float(raw["floor"] / min(raw[name] for name in BACKENDS))
