"""The served layout: one file per adapter that shards map, its factors checked, scaled, cast and stacked per module.

For a module `m` of the base: `m.A` [rank, in] and `m.B` [out, rank] (the scaling inside B), `m.magnitude` and `m.bias`
[out] float32 (what is added to the base's bias). An embedding's A is [rank, V]. Experts have a first axis more, and are
named by their parameter. `m.weight` stands in place of the base's. The file's metadata say the kind and rank of each.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adapters.errors import AdapterInvalid, NotServed
from adapters.formats.base_values import BaseValues
from adapters.formats.reading import TENSORS, Found

FORMAT = "lorikeet-adapter-1"


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

    @property
    def rank(self) -> int:
        return max((module["rank"] for module in self.modules.values()), default=0)


def lay_out(found: Iterable[Found], base: Base) -> Layout:
    """Raises AdapterInvalid for numbers that are not finite, and NotServed for what no shard computes."""
    layout = Layout({}, {})
    for each in found:
        _check_finite(each)
        added = _module(each, base)
        if not added:
            continue
        kind = "replace" if "weight" in added and each.kind != "other" else each.kind
        if kind not in base.kinds:
            raise NotServed(f"{_MEANING[kind]} ({each.module}) is not served")
        layout.modules[each.module] = {"kind": kind, "rank": each.rank}
        for part, tensor in added.items():
            layout.tensors[f"{each.module}.{part}"] = tensor.contiguous()
    if not layout.modules:
        raise AdapterInvalid("it changes nothing of the base")
    return layout


_MEANING = {
    "linear": "an adapter on a linear layer",
    "embedding": "an adapter on an embedding",
    "experts": "an adapter on experts",
    "router": "an adapter on what chooses among experts",
    "replace": "a whole weight in place of the base's",
    "other": "another value of what is neither linear nor embedding",
}


def write(layout: Layout, path: Path, digest: str, base: Base) -> None:
    """The file at `path`, which must not be in use."""
    metadata = {
        "format": FORMAT,
        "digest": digest,
        "base": base.hash,
        "weights": base.weights_hash,
        "dtype": str(base.dtype).removeprefix("torch."),
        "rank": str(layout.rank),
        "modules": json.dumps(layout.modules, separators=(",", ":")),
    }
    save_file(layout.tensors, path, metadata=metadata)


def _module(found: Found, base: Base) -> dict[str, torch.Tensor]:
    parts: dict[str, torch.Tensor] = {}
    if found.a is not None and found.b is not None:
        parts["A"], parts["B"] = _factors(found, base.dtype)
    if found.magnitude is not None:
        parts["magnitude"] = found.magnitude.float().reshape(-1)
    bias = _added_bias(found, base.values)
    if bias is not None:
        parts["bias"] = bias
    if found.weight is not None:
        weight = _weight(found, base)
        if weight is not None:
            parts["weight"] = weight
    return parts


def _factors(found: Found, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    assert found.a is not None and found.b is not None
    a, b = found.a, found.b.float() * found.scaling
    if found.kind == "experts":
        a = a.reshape(found.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, found.num_experts).permute(2, 0, 1)
    return _cast(a, dtype, found.module), _cast(b, dtype, found.module)


def _cast(tensor: torch.Tensor, dtype: torch.dtype, module: str) -> torch.Tensor:
    cast = tensor.to(dtype).contiguous()
    if dtype == torch.float16 and not _is_finite(cast):
        raise AdapterInvalid(f"a value of {module} is too large for the base's float16")
    return cast


def _added_bias(found: Found, values: BaseValues) -> torch.Tensor | None:
    """[out] float32, or None where nothing is added."""
    added: torch.Tensor | None = None
    if found.b_bias is not None:
        added = found.b_bias.float() * found.scaling
    if found.new_bias is not None:
        own = values[f"{found.module}.bias"].float()
        difference = found.new_bias.float() - own
        added = difference if added is None else added + difference
    return added if added is not None and bool(added.any()) else None


def _weight(found: Found, base: Base) -> torch.Tensor | None:
    """In the base's dtype, or None where it is the base's own: PEFT saves embeddings beside adapters on them."""
    assert found.weight is not None
    weight = found.weight.to(base.dtype)
    try:
        own = base.values[f"{found.module}.weight"]
    except NotServed:
        return weight
    return None if torch.equal(own.to(base.dtype), weight) else weight


def _check_finite(found: Found) -> None:
    for field in TENSORS:
        tensor = getattr(found, field)
        if tensor is not None and not _is_finite(tensor):
            raise AdapterInvalid(f"it holds numbers that are not finite (NaN or infinite), in {found.module}")


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    least, most = tensor.aminmax()
    return bool(least.isfinite() and most.isfinite())


def modules_of(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Module → kind and rank, as a served file's metadata say."""
    modules: dict[str, dict[str, Any]] = json.loads(metadata["modules"])
    return modules
