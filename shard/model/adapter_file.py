"""From a file in the served layout to what slots hold: low-rank factors by module, ready for the kernels.

Whoever wrote the file has checked it against the base; here only what would break the kernels is checked again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shard.model.adapter_sites import Site
from shard.model.lora import MOST_RANK, AdapterSite, ExpertSites, SlotWeights

FORMAT = "lorikeet-adapter-1"


@dataclass(frozen=True)
class AdapterContent:
    """One adapter in host memory."""

    weights: Mapping[str, SlotWeights]
    """By module name."""
    num_bytes: int


def read_adapter(path: Path, sites: Mapping[str, Site], dtype: torch.dtype) -> AdapterContent:
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
    weights = {}
    for name in modules:
        site = sites.get(name)
        if site is None:
            raise ValueError(f"the base has no module {name} that an adapter could change")
        weights[name] = _slot_weights(site, tensors, dtype)
    held = [part for each in weights.values() for part in (each.a, each.b, each.scale, each.bias) if part is not None]
    return AdapterContent(weights, sum(part.numel() * part.element_size() for part in held))


def _slot_weights(site: Site, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> SlotWeights:
    """The weights of one module, in the layout of the kernels."""
    a, b = tensors.get(f"{site.name}.A"), tensors.get(f"{site.name}.B")
    magnitude, bias = tensors.get(f"{site.name}.magnitude"), tensors.get(f"{site.name}.bias")
    if a is not None and b is not None:
        # [rank, in], [rank, out]; with experts before them where the site has experts
        a, b = a.to(dtype).contiguous().clone(), b.to(dtype).transpose(-2, -1).contiguous()
        leading = (len(site.experts),) if isinstance(site, ExpertSites) else ()
        rank = a.shape[-2] if a.dim() > 1 else 0
        fits = a.shape == (*leading, rank, site.num_in) and b.shape == (*leading, rank, site.num_out)
        if not fits or not 0 < rank <= MOST_RANK:
            raise ValueError(f"{site.name}: factors of shapes {list(a.shape)} and {list(b.shape)} do not fit")
    scale = None
    if magnitude is not None and a is not None and b is not None:
        if isinstance(site, ExpertSites):
            raise ValueError(f"{site.name}: DoRA on experts is not served")
        scale = magnitude.float() / row_norms(site, a, b)
    for part in (scale, bias):
        if part is not None and part.shape != (site.num_out,):
            raise ValueError(f"{site.name}: a vector of shape {list(part.shape)} does not fit {site.num_out} outputs")
    return SlotWeights(a, b, scale, None if bias is None else bias.float().clone())


def row_norms(site: AdapterSite, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Lengths of the rows of `W + B A`: [out] float32, from those of W and its product with A (DoRA, Liu et al. 2024).

    a: [rank, in], b: [rank, out].
    """
    if site.project is None:
        raise ValueError(f"{site.name} has no rows whose length DoRA could divide by")
    rank = a.shape[0]
    # [rank, out] W times each row of A; two rows at least, as everywhere
    products = site.project(a if rank > 1 else a.expand(2, -1).contiguous())[:rank].float()
    wide = b.float()
    # [rank, rank]
    gram = a.float() @ a.float().t()
    squares = site.squared_norms + 2 * (products * wide).sum(0) + (wide * (gram @ wide)).sum(0)
    return squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
