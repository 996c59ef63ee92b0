"""Weight matrices laid out for the processor, each with the product that reads its layout. CPU only.

Every way gives equal bits for a row whatever other rows there are, from two rows on. torch's own `linear` does not: in
float32 it goes to a library that sums otherwise for few rows than for many, on some processors.
"""

import ctypes
import os
from abc import ABC, abstractmethod

import torch

from lorikeet.shard.model.kernels import cpu as kernels

_ISA = "ONEDNN_MAX_CPU_ISA"

ROWS_HINT = 64
"""Row count that oneDNN's layout is chosen for; measured: 1 to 512 give the same speed."""


def _leave_amx_out() -> None:
    """With AMX oneDNN's bfloat16 products depend on the number of rows. It reads what it may use when it is first asked
    anything, so that is now; what this process starts later may use what it likes.
    """
    before = os.environ.get(_ISA)
    os.environ[_ISA] = "AVX512_CORE_BF16"
    can_pack(torch.bfloat16)
    if before is None:
        del os.environ[_ISA]
    else:
        os.environ[_ISA] = before


class PackedMatrix(ABC):
    """`x ↦ x Wᵀ + bias` with a weight that nothing else can read."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: [out, in]; bias: [out]. Neither is kept as it is."""
        self.out_features, self.in_features = weight.shape

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Returns [..., out]."""

    @abstractmethod
    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in]. Returns `x Wᵀ` without the bias: [rows, out]."""


class BlockedMatrix(PackedMatrix):
    """oneDNN's own layout and product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
        self.bias = None if bias is None else bias.clone()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y

    def project(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return y


class SharedMatrix(PackedMatrix):
    """A plain weight that another module reads as well, such as an embedding's."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = weight
        self.bias = None if bias is None else bias.clone()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.weight, self.bias)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.weight)


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x Wᵀ + bias` by a plain weight. x: [..., in]; weight: [out, in]; bias: [out]. Returns [..., out]."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


class StreamedMatrix(PackedMatrix):
    """The layout and product of cpu.c: one stream of bfloat16 pairs per 64 outputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.packed = kernels.pack(weight.contiguous())
        # [out] float32
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear(x, self.packed, self.out_features, self.bias)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.linear(x, self.packed, self.out_features, None)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies packed matrices of `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
    """weight: [out, in]; bias: [out]. The fastest layout that this machine and the shape allow."""
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and kernels.available():
        return StreamedMatrix(weight, bias)
    return BlockedMatrix(weight, bias)


def return_freed_memory() -> None:
    """Give the system what the plain weights left free: the C library keeps freed blocks of this size otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


_leave_amx_out()
