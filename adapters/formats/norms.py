"""New weights of norms, as factors of their outputs."""

import copy
from typing import Any

import torch

from lorikeet.adapters.errors import NotServed

_WIDEST = 1e-5
"""Largest difference between elements of what should be one number."""


def offset_of(module: Any) -> float | None:
    """What a norm adds to its weight before it multiplies by it (Gemma's 1, others' 0); None for another module."""
    parameters = dict(module.named_parameters())
    has_shapes = all(parameter.dim() == 1 for parameter in parameters.values())
    if "norm" not in type(module).__name__.lower() or parameters.keys() - {"weight", "bias"} or not has_shapes:
        return None
    tried = copy.deepcopy(module).to_empty(device="cpu").float()
    x = torch.randn(1, len(parameters["weight"]), generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            for parameter in tried.parameters():
                parameter.zero_()
            without = tried(x)
            tried.weight.fill_(1)
            normed = tried(x) - without
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    if not isinstance(normed, torch.Tensor) or normed.shape != x.shape or bool((normed == 0).any()):
        return None
    offsets = without / normed
    return float(offsets.mean().round()) if float((offsets - offsets.mean().round()).abs().max()) < _WIDEST else None


def scale(module: str, weight: torch.Tensor, own: torch.Tensor, offset: float) -> torch.Tensor:
    """[H] float32: what the outputs of a norm are multiplied by to be those with the new weight. Raises NotServed."""
    before = own.double() + offset
    if bool((before == 0).any()):
        raise NotServed(f"the base's {module} has weights that are 0, which no factor turns into the new ones")
    return ((weight.double() + offset) / before).float()
