"""Sums of adapters that shards compute from the adapters themselves, without a merged file."""

import hashlib
import json
import math
from collections.abc import Sequence

from lorikeet.proto.params import Composition
from lorikeet.router.requests.request import Loaded, Merging

MOST_RANK, RANK_TILE = 512, 16
"""Most factors of a sum, and what those of each adapter are rounded up to: devices have room for so many."""


def composition_of(merging: Merging, parts: Sequence[Loaded]) -> Composition | None:
    """How PEFT's `add_weighted_adapter` adds these, `cat` or `linear`. None for what needs a merged file: other
    strategies, adapters with more than factors, and factors that do not fit.
    """
    if any(part.scaling is None for part in parts):
        return None
    if sum(-(-part.rank // RANK_TILE) * RANK_TILE for part in parts) > MOST_RANK:
        return None
    digests = tuple(part.digest for part in parts)
    if merging.strategy == "cat":
        return Composition(digests, merging.weights, (1.0,) * len(parts))
    if (
        merging.strategy != "linear"
        or len({part.rank for part in parts}) > 1
        or not all(part.scaling for part in parts)
    ):
        return None
    scalings = [part.scaling or 0.0 for part in parts]
    # PEFT multiplies A and B by the root of weight and scaling; B is served with the scaling inside
    roots = [math.sqrt(abs(weight) * scaling) for weight, scaling in zip(merging.weights, scalings, strict=True)]
    # the sign goes to one factor only, or it would cancel out
    shrinks = tuple(math.copysign(root, weight) for root, weight in zip(roots, merging.weights, strict=True))
    expands = tuple(root / scaling for root, scaling in zip(roots, scalings, strict=True))
    return Composition(digests, shrinks, expands, shares_factors=True)


def digest_of(composition: Composition) -> str:
    """What identifies a sum: its adapters and their weights."""
    weights = composition.shrink_weights, composition.expand_weights
    content = ["sum", composition.digests, *weights, composition.shares_factors]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
