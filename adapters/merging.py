"""Several adapters as one, factor by factor, with PEFT's own arithmetic (`add_weighted_adapter`).

Knows factors and weights; neither files nor the base. A mask of DARE is drawn from the merge's digest, so the same
merge is the same adapter everywhere.
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
from lorikeet.adapters.formats.configuration import MOST_RANK
from lorikeet.adapters.formats.reading import Found

_MERGED = ("linear", "embedding")


@dataclass(frozen=True)
class _Part:
    """What one adapter brings to one module."""

    found: Found
    weight: float

    @property
    def scale(self) -> float:
        return self.weight * self.found.scaling


def merge(adapters: Sequence[Sequence[Found]], wanted: Merge, digest: str) -> list[Found]:
    """One list per adapter, in the order of `wanted.pins`. Raises AdapterInvalid or NotServed that names the reason."""
    modules: dict[str, list[_Part]] = {}
    for number, adapter in enumerate(adapters):
        for found in adapter:
            _check(found, str(wanted.pins[number].id))
            modules.setdefault(found.module, []).append(_Part(found, wanted.weights[number]))
    if wanted.strategy != "cat":
        _check_ranks(adapters, wanted)
    return [_merged(module, parts, wanted, digest) for module, parts in sorted(modules.items())]


def _check(found: Found, name: str) -> None:
    if found.kind not in _MERGED or found.weight is not None:
        raise NotServed(
            f"merging adapters with other changes than of linear layers ({found.module} of {name}) is not served"
        )
    if found.magnitude is not None:
        raise NotServed(f"merging DoRA adapters ({name}) is not served")
    if found.b_bias is not None or found.new_bias is not None:
        raise NotServed(f"merging adapters with biases ({found.module} of {name}) is not served")


def _check_ranks(adapters: Sequence[Sequence[Found]], wanted: Merge) -> None:
    ranks = [sorted({found.rank for found in adapter}) for adapter in adapters]
    if len({rank for each in ranks for rank in each}) > 1:
        named = ", ".join(
            f"{pin.id} has {' and '.join(map(str, each))}" for pin, each in zip(wanted.pins, ranks, strict=True)
        )
        raise AdapterInvalid(f"merging by {wanted.strategy} takes adapters of equal rank: {named}; `cat` takes any")


def _merged(module: str, parts: list[_Part], wanted: Merge, digest: str) -> Found:
    kinds = {part.found.kind for part in parts}
    if len(kinds) > 1:
        raise AdapterInvalid(f"the adapters change {module} in different ways")
    if wanted.strategy == "cat":
        a = torch.cat([_a(part) * part.scale for part in parts])
        b = torch.cat([_b(part) for part in parts], dim=1)
    else:
        # the sign goes to one side only, or it would cancel itself
        roots = torch.tensor([math.sqrt(abs(part.scale)) for part in parts])
        signs = torch.tensor([1.0 if part.scale >= 0 else -1.0 for part in parts])
        a = _combined([_a(part) for part in parts], roots * signs, wanted, f"{digest} {module} A")
        b = _combined([_b(part) for part in parts], roots, wanted, f"{digest} {module} B")
    if a.shape[0] > MOST_RANK:
        raise AdapterInvalid(f"the merged adapter has rank {a.shape[0]} on {module}, the most is {MOST_RANK}")
    return Found(module, kinds.pop(), rank=a.shape[0], a=a, b=b)


def _combined(tensors: list[torch.Tensor], weights: torch.Tensor, wanted: Merge, seed: str) -> torch.Tensor:
    if wanted.strategy == "linear":
        return task_arithmetic(tensors, weights)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # a density of 1 prunes nothing, as asked for
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "little"))
        if wanted.strategy == "dare_linear":
            return dare_linear(tensors, weights, wanted.density)
        merged = ties if wanted.strategy == "ties" else dare_ties
        return merged(tensors, weights, wanted.density, wanted.majority_sign_method)


def _a(part: _Part) -> torch.Tensor:
    assert part.found.a is not None
    return part.found.a.float()


def _b(part: _Part) -> torch.Tensor:
    assert part.found.b is not None
    return part.found.b.float()
