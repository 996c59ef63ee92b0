"""Every kernel of a forward pass against the reference backend in the same dtype: two layers of the large model with
the same numbers, one time with the kernel and one time without.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cuda import engines
from benchmarks.cuda.attention import OWNERS, owner_of
from benchmarks.cuda.setup import Setup
from benchmarks.evidence.figure import Case, Cases, Raw
from lorikeet.shard.attention.flash import has_page_tables
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model import Model

LAYERS = 2
PLAIN: Mapping[str, Any] = {"attention": "reference", "fusions": "none"}
KERNELS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "every": {
        "varlen": {"attention": "varlen", "fusions": "none"},
        "triton": {"attention": "triton", "fusions": "none"},
        "fusions": {"attention": "reference", "fusions": "auto"},
    },
    "fp8": {"fp8": {"attention": "triton", "fusions": "none", "kv_cache_dtype": "fp8"}},
}
"""By what they are measured for: the settings that bring each kernel in."""
CONTEXT = 300


def shapes(setup: Setup) -> dict[str, tuple[int, int]]:
    """By name: requests, and new tokens of each after CONTEXT others."""
    some = {f"decode {batch}": (batch, 1) for batch in sorted({1, *setup.loads, setup.requests})}
    return {**some, "verification": (max(setup.loads), setup.width + 1), "prefill": (1, max(setup.prefill // 4, 2))}


def measure(setup: Setup, which: str) -> Cases:
    """One case per kernel, with the largest difference of every shape and the largest logit."""
    # torch 2.11 has FlashAttention without page tables
    names = [name for name in KERNELS[which] if name != "varlen" or has_page_tables()]
    wanted = _passes(setup, PLAIN) if names else {}
    for name in names:
        try:
            found = _passes(setup, KERNELS[which][name])
        except Exception as failure:  # one kernel fails by itself
            yield Case(name, {}, f"{type(failure).__name__}: {failure}"[:500])
            continue
        raw = {
            shape: {"difference": float((found[shape] - logits).abs().max()), "largest": float(logits.abs().max())}
            for shape, logits in wanted.items()
        }
        yield Case(name, raw)


@torch.inference_mode()
def _passes(setup: Setup, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """[S, V] logits by shape, on the host."""
    context = 20 if setup.is_smoke else CONTEXT
    shape = replace(setup.large, layers=LAYERS)
    _, model = engines.load(setup, shape, max_total_tokens=2 * context + setup.prefill, **settings)
    found = {}
    for name, (batch, count) in shapes(setup).items():
        pages = -(-(context + count) // model.page_size)
        model.allocate_kv(batch * pages)
        _check_owners(setup, model, settings["attention"])
        owned = [range(at * pages, (at + 1) * pages) for at in range(batch)]
        ids = torch.tensor(engines.prompts(setup, shape, batch, context + count), device=setup.device)
        at_once = max(1, 4096 // context)
        for first in range(0, batch, at_once):
            _forward(model, ids[first : first + at_once, :context], 0, owned[first : first + at_once])
        found[name] = _forward(model, ids[:, context:], context, owned).cpu()
    return found


def _check_owners(setup: Setup, model: Model, attention: str) -> None:
    """Raise RuntimeError where another backend than the one that is named computes the layers of a device."""
    owners = {owner_of(model.backend, binding.kv) for binding in model.bindings}
    if setup.is_cuda and attention in OWNERS and owners != {OWNERS[attention]}:
        raise RuntimeError(f"{attention} does not compute the layers here, but {', '.join(sorted(owners))}")


def _forward(model: Model, ids: torch.Tensor, start: int, pages: Sequence[range]) -> torch.Tensor:
    """ids: [requests, tokens of each from position `start`]. Returns [S, V]: logits of every row, 512 at most."""
    batch, count = ids.shape
    rows = list(range(batch * count))[-512:]
    segments = [Segment(start, count, each) for each in pages]
    model.inputs.fill(segments, ids.flatten(), torch.tensor(rows, device=ids.device), rows)
    return model.forward()


def worst(raw: Raw) -> float:
    """The largest difference of any shape, over its largest logit."""
    return max(float(result["difference"] / result["largest"]) for result in raw.values())
