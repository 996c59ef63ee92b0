"""The served layout: one file per adapter that shards map, its factors checked, scaled, cast and stacked per module.

For a module `m` of the base: `m.A` [rank, in] and `m.B` [out, rank] (the scaling inside B), `m.magnitude` and `m.bias`
[out] float32 (what is added to the base's bias). An embedding's A is [rank, V]. Experts have a first axis more, and are
named by their parameter. `m.weight` stands in place of the base's. The file's metadata say the kind and rank of each.
Medusa heads are `heads.j.weight` [H, H] and `heads.j.bias` [H] (`heads.j.l.weight` where they have several blocks);
those of version 1 `heads.j.output` [V, H] besides; the metadata say how many, their version and number of blocks.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats import header
from lorikeet.adapters.formats.base_values import BaseValues
from lorikeet.adapters.formats.reading import TENSORS, Found

FORMAT = "lorikeet-adapter-1"
_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Base:
    """What adapters are laid out for."""

    hash: str
    weights_hash: str
    dtype: torch.dtype
    kinds: frozenset[str]
    """Kinds of change that the shards compute."""
    values: BaseValues


@dataclass(frozen=True)
class Layout:
    """An adapter ready to be written."""

    tensors: dict[str, torch.Tensor]
    modules: dict[str, dict[str, Any]]
    """Module → kind and rank."""
    heads: dict[str, int] | None = None
    """Of Medusa heads: count, version, layers (residual blocks)."""

    @property
    def rank(self) -> int:
        return max((module["rank"] for module in self.modules.values()), default=0)

    @property
    def num_heads(self) -> int:
        return 0 if self.heads is None else self.heads["count"]


def lay_out(found: Iterable[Found], base: Base) -> Layout:
    """Raises AdapterInvalid for numbers that are not finite, and NotServed for what no shard computes."""
    layout = Layout({}, {})
    for each in settled(found, base):
        added = _module(each, base)
        if not added:
            continue
        kind = "replace" if "weight" in added and each.kind != "other" else each.kind
        if kind not in base.kinds:
            raise NotServed(f"{_MEANING[kind]} ({each.module}) is not served")
        layout.modules[each.module] = {"kind": kind, "rank": each.rank}
        for part, tensor in added.items():
            layout.tensors[f"{each.module}.{part}"] = tensor
    if not layout.modules:
        raise AdapterInvalid("it changes nothing of the base")
    return layout


def settled(found: Iterable[Found], base: Base) -> Iterator[Found]:
    """Without what the base has anyway: PEFT saves embeddings beside adapters on them, and unchanged biases."""
    for each in found:
        if each.weight is not None and _is_own(each.weight, f"{each.module}.weight", base):
            each = replace(each, weight=None)
        if each.new_bias is not None and _is_own(each.new_bias, f"{each.module}.bias", base):
            each = replace(each, new_bias=None)
        if any(getattr(each, field) is not None for field in TENSORS):
            yield each


def _is_own(tensor: torch.Tensor, name: str, base: Base) -> bool:
    try:
        own = base.values[name]
    except NotServed:
        return False
    return torch.equal(own.to(base.dtype), tensor.to(base.dtype))


_MEANING = {
    "linear": "an adapter on a linear layer",
    "embedding": "an adapter on an embedding",
    "experts": "an adapter on experts",
    "router": "an adapter on what chooses among experts",
    "replace": "a whole weight in place of the base's",
    "other": "another value of what is neither linear nor embedding",
}


def write(layout: Layout, path: Path, digest: str, base: Base) -> None:
    """The file at `path`, which must not be in use. Safetensors' own writer takes twice as long over many small tensors
    (docs/LOG.md), on cores that steps need.
    """
    metadata = {
        "format": FORMAT,
        "digest": digest,
        "base": base.hash,
        "weights": base.weights_hash,
        "dtype": str(base.dtype).removeprefix("torch."),
        "rank": str(layout.rank),
        "modules": json.dumps(layout.modules, separators=(",", ":")),
    }
    if layout.heads is not None:
        metadata["heads"] = json.dumps(layout.heads, separators=(",", ":"))
    described = {name: (_TYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in layout.tensors.items()}
    head, order = header.compose(described, metadata)
    with path.open("wb") as file:
        file.write(head)
        for name in order:
            file.write(layout.tensors[name].reshape(-1).view(torch.uint8).numpy().data)


def _module(found: Found, base: Base) -> dict[str, torch.Tensor]:
    """The module's parts, contiguous."""
    parts: dict[str, torch.Tensor] = {}
    if found.a is not None and found.b is not None:
        a, b = _factors(found)
        parts["A"], parts["B"] = a.to(base.dtype), b.to(base.dtype)
    if found.magnitude is not None:
        parts["magnitude"] = found.magnitude.float().reshape(-1)
    bias = _added_bias(found, base.values)
    if bias is not None:
        parts["bias"] = bias
    if found.weight is not None:
        parts["weight"] = found.weight.to(base.dtype)
    for tensor in parts.values():
        if not is_finite(tensor):
            raise AdapterInvalid(_fault(found, base.dtype))
    return {part: tensor.contiguous() for part, tensor in parts.items()}


def _factors(found: Found) -> tuple[torch.Tensor, torch.Tensor]:
    """The scaling inside B, in float32."""
    assert found.a is not None and found.b is not None
    a, b = found.a, found.b.float() * found.scaling
    if found.kind == "experts":
        a = a.reshape(found.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, found.num_experts).permute(2, 0, 1)
    return a, b


def _added_bias(found: Found, values: BaseValues) -> torch.Tensor | None:
    """[out] float32, or None where nothing is added."""
    added: torch.Tensor | None = None
    if found.b_bias is not None:
        added = found.b_bias.float() * found.scaling
    if found.new_bias is not None:
        difference = found.new_bias.float() - values[f"{found.module}.bias"].float()
        added = difference if added is None else added + difference
    return added


def _fault(found: Found, dtype: torch.dtype) -> str:
    tensors = (getattr(found, field) for field in TENSORS)
    return not_finite(found.module, all(tensor is None or is_finite(tensor) for tensor in tensors), dtype)


def not_finite(where: str, was_finite: bool, dtype: torch.dtype) -> str:
    """Why numbers are not finite in `dtype`: whether they were in the adapter's file."""
    if was_finite:
        return f"a number of {where} is too large for {str(dtype).removeprefix('torch.')}"
    return f"it holds numbers that are not finite (NaN or infinite), in {where}"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every number is."""
    if tensor.numel() == 0:
        return True
    least, most = tensor.aminmax()
    return math.isfinite(least.item()) and math.isfinite(most.item())
