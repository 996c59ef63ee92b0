"""From a file in the served layout to what slots hold: low-rank factors by module, ready for the kernels.

Whoever wrote the file has checked it against the base; here only what would break the kernels is checked again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shard.model.adapter_memory import ALIGNMENT, HostMemory
from shard.model.adapter_sites import Site
from shard.model.lora import MOST_RANK, AdapterSite, ExpertSites, Kernels, SlotImage, SlotWeights

FORMAT = "lorikeet-adapter-1"
KEYS = ("A", "B", "magnitude", "bias")


@dataclass(frozen=True)
class AdapterContent:
    """One adapter in host memory."""

    weights: Sequence[tuple[AdapterSite, SlotWeights]]
    num_bytes: int
    # [bytes] uint8, where all of them lie, and what a device's slot would say of them
    memory: torch.Tensor | None = None
    image: SlotImage | None = None


@dataclass(frozen=True)
class Destination:
    """How an adapter is to lie in host memory."""

    dtype: torch.dtype
    memory: HostMemory
    kernels: Kernels | None = None
    """Of the device that it is for; None for the CPU."""


def read_adapter(path: Path, sites: Mapping[str, Site], destination: Destination) -> AdapterContent:
    """Read a file of the served layout. Raises ValueError with a reason."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path.name} is not in the served layout {FORMAT}")
            modules: dict[str, Any] = json.loads(metadata["modules"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as failure:
        raise ValueError(f"the adapter's file cannot be read: {type(failure).__name__}: {failure}") from failure
    weights: list[tuple[AdapterSite, SlotWeights]] = []
    for name in modules:
        site = sites.get(name)
        if site is None:
            raise ValueError(f"the base has no module {name} that an adapter could change")
        found = {key: tensors.pop(f"{name}.{key}") for key in KEYS if f"{name}.{key}" in tensors}
        if isinstance(site, ExpertSites):
            weights += _expert_weights(site, found, destination)
        else:
            weights.append((site, _slot_weights(site, found, destination)))
    if tensors:
        raise ValueError(f"this shard does not compute what {min(tensors)} of the adapter changes")
    num_bytes = sum(_up(part.numel() * part.element_size()) for _, each in weights for part in each.tensors.values())
    memory = destination.memory.take(num_bytes)
    weights = _moved(weights, memory)
    kernels = destination.kernels
    return AdapterContent(weights, num_bytes, memory, None if kernels is None else kernels.image(weights, memory))


def _moved(
    weights: Sequence[tuple[AdapterSite, SlotWeights]], memory: torch.Tensor
) -> list[tuple[AdapterSite, SlotWeights]]:
    """Copies that lie one after the other in `memory`, [bytes] uint8."""
    moved = []
    offset = 0
    for site, each in weights:
        parts: dict[str, torch.Tensor] = {}
        for name, tensor in each.tensors.items():
            num_bytes = tensor.numel() * tensor.element_size()
            parts[name] = memory[offset : offset + num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            offset += _up(num_bytes)
        moved.append((site, SlotWeights(**parts, is_packed=each.is_packed)))
    return moved


def _up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _expert_weights(
    sites: ExpertSites, tensors: Mapping[str, torch.Tensor], destination: Destination
) -> list[tuple[AdapterSite, SlotWeights]]:
    """Those of a block's experts: the factors lie one expert after the other."""
    if destination.kernels is not None:
        raise ValueError(f"{sites.name}: adapters of experts are computed on the CPU only")
    if set(tensors) != {"A", "B"} or any(tensor.shape[0] != len(sites.experts) for tensor in tensors.values()):
        raise ValueError(f"{sites.name}: experts take two factors for each of {len(sites.experts)}, and nothing else")
    return [
        (site, _slot_weights(site, {key: tensor[index] for key, tensor in tensors.items()}, destination))
        for index, site in enumerate(sites.experts)
    ]


def _slot_weights(site: AdapterSite, tensors: Mapping[str, torch.Tensor], destination: Destination) -> SlotWeights:
    """The weights of one module, in the layout of the kernels. `tensors`: by key of the served layout."""
    a, b = tensors.get("A"), tensors.get("B")
    if a is not None and b is not None:
        # [rank, in], [rank, out]
        a, b = a.to(destination.dtype).contiguous(), b.to(destination.dtype).t()
        rank = a.shape[0]
        if a.shape != (rank, site.num_in) or b.shape != (rank, site.num_out) or not 0 < rank <= MOST_RANK:
            raise ValueError(f"{site.name}: factors of shapes {list(a.shape)} and {list(b.t().shape)} do not fit")
    magnitude, bias = (_vector(site, tensors.get(key)) for key in ("magnitude", "bias"))
    if magnitude is not None and a is not None and b is not None:
        magnitude /= row_norms(site, a, b)
    weights = SlotWeights(a, b, magnitude, bias)
    return weights.packed(site.is_embedding) if destination.kernels is None else weights.arranged(site.is_embedding)


def _vector(site: AdapterSite, vector: torch.Tensor | None) -> torch.Tensor | None:
    """A copy in float32."""
    if vector is not None and vector.shape != (site.num_out,):
        raise ValueError(f"{site.name}: a vector of shape {list(vector.shape)} does not fit {site.num_out} outputs")
    return None if vector is None else vector.float().clone()


def row_norms(site: AdapterSite, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Lengths of the rows of `W + B A`: [out] float32, from those of W and its product with A (DoRA, Liu et al. 2024).

    a: [rank, in], b: [rank, out], in host memory, as what is returned; computed where W is.
    """
    if site.project is None:
        raise ValueError(f"{site.name} has no rows whose length DoRA could divide by")
    rank, device = a.shape[0], site.squared_norms.device
    a, b = a.to(device), b.to(device)
    # [rank, out] W times each row of A; two rows at least, as everywhere
    products = site.project(a if rank > 1 else a.expand(2, -1).contiguous())[:rank].float()
    wide = b.float()
    # [rank, rank]
    gram = a.float() @ a.float().t()
    squares = site.squared_norms + 2 * (products * wide).sum(0) + (wide * (gram @ wide)).sum(0)
    return squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt().cpu()
