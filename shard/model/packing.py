"""Weight matrices in oneDNN's blocked layout: how to make one and how to multiply by it. CPU only."""

import ctypes

import torch

ROWS_HINT = 64
"""Row count that the layout is chosen for; measured: 1 to 512 give the same speed."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies packed matrices of `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out, in]. Returns the same matrix, packed (opaque to everything but `linear`)."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [..., in], weight packed [out, in], bias: [out]. Returns [..., out]."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def return_freed_memory() -> None:
    """Give the system what the plain weights left free: the C library keeps freed blocks of this size otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
