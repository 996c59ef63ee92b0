"""The served layout: one file per adapter that shards map, with factors checked, scaled, cast and stacked per module.

For a module `m` of the base: `m.A` [rank, in] and `m.B` [out, rank] (the scaling inside B), `m.magnitude` and `m.bias`
[out] float32 (added to the base's bias). An embedding's A is [rank, V]. Experts have one more leading axis, and are
named by their parameter. `m.weight` replaces the base's. The file's metadata give the kind and rank of each module.
Medusa heads are `heads.j.weight` [H, H] and `heads.j.bias` [H] (`heads.j.l.weight` if they have several blocks);
those of version 1 also have `heads.j.output` [V, H]; the metadata give their number, version and number of blocks, the
invocation tokens of an activated LoRA, and a checksum (`proto/checksum.py`).
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import torch

from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats import configuration, header
from lorikeet.adapters.formats.base_values import BaseValues
from lorikeet.adapters.formats.peft_reading import TENSORS, ModuleChange
from lorikeet.proto import checksum

FORMAT = "lorikeet-adapter-1"
_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Base:
    """The base that adapters are converted for."""

    hash: str
    weights_hash: str
    dtype: torch.dtype
    kinds: frozenset[str]
    """Kinds of changes that the shards support."""
    values: BaseValues
    trunk: str = ""
    """How names begin of the modules that are not part of a classifier's head; empty without a head."""

    def is_head(self, module: str) -> bool:
        """Whether the module is part of a classifier's head, which adapters replace."""
        return bool(self.trunk) and not module.startswith(self.trunk)


@dataclass(frozen=True)
class Layout:
    """An adapter ready to be written."""

    tensors: dict[str, torch.Tensor]
    modules: dict[str, dict[str, Any]]
    """Module → kind and rank."""
    heads: dict[str, int] | None = None
    """Configuration of the Medusa heads: count, version, layers (residual blocks)."""
    invocation_ids: tuple[int, ...] = ()
    """Token ids that activate the adapter, if it is an activated LoRA."""

    @property
    def rank(self) -> int:
        return max((module["rank"] for module in self.modules.values()), default=0)

    @property
    def num_heads(self) -> int:
        return 0 if self.heads is None else self.heads["count"]


def lay_out(found: Iterable[ModuleChange], base: Base) -> Layout:
    """Raises AdapterInvalid for numbers that are not finite, and NotServed for kinds that no shard supports."""
    layout = Layout({}, {})
    for each in without_unchanged(found, base):
        if each.kind == "replace" and base.is_head(each.module) and each.weight is not None:
            each = _as_factors(each, base)
        if not (added := _module(each, base)):
            continue
        kind = "replace" if "weight" in added and each.kind != "other" else each.kind
        if kind not in base.kinds:
            raise NotServed(f"{_DESCRIPTIONS[kind]} ({each.module}) is not served")
        layout.modules[each.module] = {"kind": kind, "rank": each.rank}
        layout.tensors.update({f"{each.module}.{part}": tensor for part, tensor in added.items()})
    if not layout.modules:
        raise AdapterInvalid("it does not change the base")
    return layout


def _as_factors(found: ModuleChange, base: Base) -> ModuleChange:
    """A new weight of a classifier's head as an adapter on the base's: the difference of the two is the product of
    itself and the identity. Raises NotServed for a weight of too high a rank.
    """
    assert found.weight is not None
    difference = found.weight.float() - base.values[f"{found.module}.weight"].float()
    num_out, num_in = difference.shape
    rank = min(num_out, num_in)
    if rank > configuration.MOST_RANK:
        raise NotServed(
            f"replacing {found.module}, which has {num_out} outputs and {num_in} inputs, is not served: one of them "
            f"must be at most {configuration.MOST_RANK}"
        )
    a, b = (difference, torch.eye(rank)) if num_out <= num_in else (torch.eye(rank), difference)
    return replace(found, kind="linear", rank=rank, a=a, b=b, weight=None)


def without_unchanged(found: Iterable[ModuleChange], base: Base) -> Iterator[ModuleChange]:
    """Drop values that equal the base's: PEFT also saves embeddings with adapters on them, and unchanged biases."""
    for each in found:
        if each.weight is not None and _is_own(each.weight, f"{each.module}.weight", base):
            each = replace(each, weight=None)
        if each.new_bias is not None and _is_own(each.new_bias, f"{each.module}.bias", base):
            each = replace(each, new_bias=None)
        if any(getattr(each, field) is not None for field in TENSORS):
            yield each


_TRAINED_IN = (torch.bfloat16, torch.float16)
"""What training may round the base's values to before they are saved, in any type."""


def _is_own(saved: torch.Tensor, name: str, base: Base) -> bool:
    """Whether a saved parameter is the base's, unchanged but for the rounding of the type that it was trained in."""
    try:
        own = base.values[name]
    except NotServed:
        return False
    served = saved.to(base.dtype)
    types = dict.fromkeys((own.dtype, *_TRAINED_IN))
    return any(torch.equal(own.to(dtype).to(saved.dtype).to(base.dtype), served) for dtype in types)


_DESCRIPTIONS = {
    "linear": "an adapter on a linear layer",
    "embedding": "an adapter on an embedding",
    "experts": "an adapter on experts",
    "router": "an adapter on the router of experts",
    "replace": "replacing a whole weight",
    "other": "replacing a parameter of a module that is neither linear nor an embedding",
}


@dataclass(frozen=True)
class ServedFile:
    """A file in the served layout, in parts that are written one after the other."""

    parts: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def write(self, file: BinaryIO) -> None:
        """Write it. Safetensors' own writer takes twice as long for many small tensors, on cores that steps need
        (docs/log/2026-11-22-adapter-layout-cost.md).
        """
        for part in self.parts:
            file.write(part)


def served_file(layout: Layout, digest: str, base: Base) -> ServedFile:
    """The file of an adapter. Its parts are views of the layout's tensors."""
    metadata = {
        "format": FORMAT,
        checksum.FIELD: checksum.UNKNOWN,
        "digest": digest,
        "base": base.hash,
        "weights": base.weights_hash,
        "dtype": str(base.dtype).removeprefix("torch."),
        "rank": str(layout.rank),
        "modules": json.dumps(layout.modules, separators=(",", ":")),
    }
    if layout.heads is not None:
        metadata["heads"] = json.dumps(layout.heads, separators=(",", ":"))
    if layout.invocation_ids:
        metadata["invocation_ids"] = json.dumps(layout.invocation_ids, separators=(",", ":"))
    described = {name: (_TYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in layout.tensors.items()}
    head, order = header.compose(described, metadata)
    values = [layout.tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in order]
    return ServedFile((memoryview(checksum.added(head, values)), *values))


def _module(found: ModuleChange, base: Base) -> dict[str, torch.Tensor]:
    """The module's parts, contiguous."""
    parts: dict[str, torch.Tensor] = {}
    if found.a is not None and found.b is not None:
        parts["A"], parts["B"] = _factors(found, base.dtype)
    if found.magnitude is not None:
        parts["magnitude"] = found.magnitude.float().reshape(-1)
    if (bias := _added_bias(found, base.values)) is not None:
        parts["bias"] = bias
    if found.weight is not None:
        parts["weight"] = found.weight.to(base.dtype)
    for tensor in parts.values():
        if not is_finite(tensor):
            raise AdapterInvalid(_not_finite_message(found, base.dtype))
    return {part: tensor.contiguous() for part, tensor in parts.items()}


def _factors(found: ModuleChange, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B, with the scaling in B, computed in float32 and rounded once."""
    assert found.a is not None and found.b is not None
    a, b = found.a, found.b if found.b.dtype == dtype else found.b.float()
    b = torch.mul(b, found.scaling, out=torch.empty_like(b, dtype=dtype))  # in float32 whatever the dtypes are
    if found.kind == "experts":
        a = a.reshape(found.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, found.num_experts).permute(2, 0, 1)
    return a.to(dtype), b


def _added_bias(found: ModuleChange, values: BaseValues) -> torch.Tensor | None:
    """[out] float32, or None if nothing is added."""
    added: torch.Tensor | None = None
    if found.b_bias is not None:
        added = found.b_bias.float() * found.scaling
    if found.new_bias is not None:
        difference = found.new_bias.float() - values[f"{found.module}.bias"].float()
        added = difference if added is None else added + difference
    return added


def _not_finite_message(found: ModuleChange, dtype: torch.dtype) -> str:
    tensors = (getattr(found, field) for field in TENSORS)
    return not_finite(found.module, all(tensor is None or is_finite(tensor) for tensor in tensors), dtype)


def not_finite(where: str, was_finite: bool, dtype: torch.dtype) -> str:
    """The message for numbers that are not finite in `dtype`; `was_finite` is whether they were in the file."""
    if was_finite:
        return f"a number of {where} is too large for {str(dtype).removeprefix('torch.')}"
    return f"it holds numbers that are not finite (NaN or infinite), in {where}"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are."""
    if tensor.numel() == 0:
        return True
    least, most = tensor.aminmax()
    return math.isfinite(least.item()) and math.isfinite(most.item())
