"""K and V in eight bits: float8_e4m3fn with one float32 scale per token and K and V head.

A token's scale is set by itself alone, so what is kept of it does not depend on when or beside what it was computed.
"""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of the numbers of that format."""


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., dim]. Returns it in eight bits and what to multiply each row by, [...] float32."""
    x = x.float()
    largest = x.abs().amax(-1)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (x / scale[..., None]).to(FP8), scale


def dequantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x: [..., dim] in eight bits, scale: [...]. Returns float32."""
    return x.float() * scale[..., None]


def dtype_of(name: str) -> torch.dtype | None:
    """What `--kv-cache-dtype` means: None for what the model computes in. Raises ValueError for unknown names."""
    if name not in ("auto", "fp8"):
        raise ValueError(f"unknown number format of the KV cache {name!r}; known: auto, fp8")
    return FP8 if name == "fp8" else None
