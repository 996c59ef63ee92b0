"""Merges adapters factor by factor with PEFT's own arithmetic (`add_weighted_adapter`).

DARE's masks are drawn from the merge's digest, so that the same merge is the same adapter everywhere.
"""

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft.utils.merge_utils import dare_linear, dare_ties, task_arithmetic, ties

from lorikeet.adapters.digests import Merge
from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats.configuration import MAX_RANK
from lorikeet.adapters.formats.peft_reading import ModuleChange

_MERGED = ("linear", "embedding")


@dataclass(frozen=True)
class _WeightedChange:
    """One adapter's change to one module."""

    change: ModuleChange
    weight: float
    """Weight of the part's adapter in the merge."""

    @property
    def scale(self) -> float:
        return self.weight * self.change.scaling


def merge(adapters: Sequence[Sequence[ModuleChange]], merging: Merge, digest: str) -> list[ModuleChange]:
    """One list per adapter, in the order of `wanted.pins`. Raises AdapterInvalid or NotServed with the reason."""
    modules: dict[str, list[_WeightedChange]] = {}
    for number, adapter in enumerate(adapters):
        for change in adapter:
            _check(change, str(merging.pins[number].id))
            modules.setdefault(change.module, []).append(_WeightedChange(change, merging.weights[number]))
    if merging.strategy != "cat":
        _check_ranks(adapters, merging)
    return [_merged(module, parts, merging, digest) for module, parts in sorted(modules.items())]


def _check(change: ModuleChange, name: str) -> None:
    if change.kind not in _MERGED or change.weight is not None:
        raise NotServed(
            f"merging adapters that change other than linear layers ({change.module} of {name}) is not served"
        )
    if change.magnitude is not None:
        raise NotServed(f"merging DoRA adapters ({name}) is not served")
    if change.b_bias is not None or change.new_bias is not None:
        raise NotServed(f"merging adapters with biases ({change.module} of {name}) is not served")


def _check_ranks(adapters: Sequence[Sequence[ModuleChange]], merging: Merge) -> None:
    ranks = [sorted({change.rank for change in adapter}) for adapter in adapters]
    if len({rank for module_ranks in ranks for rank in module_ranks}) > 1:
        pairs = zip(merging.pins, ranks, strict=True)
        named = ", ".join(f"{pin.id} has {' and '.join(map(str, module_ranks))}" for pin, module_ranks in pairs)
        raise AdapterInvalid(f"`{merging.strategy}` merges only adapters of equal rank: {named}; use `cat`")


def _merged(module: str, parts: list[_WeightedChange], merging: Merge, digest: str) -> ModuleChange:
    kinds = {part.change.kind for part in parts}
    if len(kinds) > 1:
        raise AdapterInvalid(f"the adapters contain different kinds of changes to {module}")
    every_a, every_b = _factors(parts)
    if merging.strategy == "cat":
        a = torch.cat([factor * part.scale for factor, part in zip(every_a, parts, strict=True)])
        b = torch.cat(every_b, dim=1)
    else:
        # the sign goes to one factor only, or it would cancel out
        roots = torch.tensor([math.sqrt(abs(part.scale)) for part in parts])
        signs = torch.tensor([1.0 if part.scale >= 0 else -1.0 for part in parts])
        a = _combined(every_a, roots * signs, merging, f"{digest} {module} A")
        b = _combined(every_b, roots, merging, f"{digest} {module} B")
    if a.shape[0] > MAX_RANK:
        raise AdapterInvalid(f"the merged adapter has rank {a.shape[0]} on {module}; the limit is {MAX_RANK}")
    return ModuleChange(module, kinds.pop(), rank=a.shape[0], a=a, b=b)


def _combined(tensors: list[torch.Tensor], weights: torch.Tensor, merging: Merge, seed: str) -> torch.Tensor:
    if merging.strategy == "linear":
        return task_arithmetic(tensors, weights)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # about a density of 1, which prunes nothing
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "little"))
        if merging.strategy == "dare_linear":
            return dare_linear(tensors, weights, merging.density)
        merged = ties if merging.strategy == "ties" else dare_ties
        return merged(tensors, weights, merging.density, merging.majority_sign_method)


def _factors(parts: list[_WeightedChange]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every A and every B in float32."""
    optional = [(part.change.a, part.change.b) for part in parts]
    pairs = [(a.float(), b.float()) for a, b in optional if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]
