"""Weight matrices packed for the CPU, each with the product that reads its layout.

Every product gives a row equal bits with any other rows, from two rows on, and those of compiled code alone too.
torch's `linear` does not: in float32 it calls a library that on some processors sums few rows in another order than
many.
"""

import os
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import nn

from lorikeet.shard.model.kernels import cpu, float32

_ISA = "ONEDNN_MAX_CPU_ISA"

PACKED_AT_ONCE = 1 << 22
"""Elements of a weight that are packed anew for a product."""
ROWS_HINT = 64
"""Row count that oneDNN's layout is chosen for; measured: 1 to 512 give the same speed."""


def _disable_amx() -> None:
    """Disable AMX in oneDNN: with it bfloat16 products depend on the number of rows. oneDNN reads the variable at its
    first call, which is made here; processes started later are not affected.
    """
    before = os.environ.get(_ISA)
    os.environ[_ISA] = "AVX512_CORE_BF16"
    onednn_multiplies(torch.bfloat16)
    if before is None:
        del os.environ[_ISA]
    else:
        os.environ[_ISA] = before


class PackedMatrix(ABC):
    """`x ↦ x Wᵀ + bias` with a weight in the layout of its product."""

    bias: torch.Tensor | None
    """[out]"""
    least_rows = 2
    """Rows of a product from which on a row's bits do not depend on the others."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: [out, in]."""
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Returns [..., out]."""
        return self.product(x, self.bias)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in]. Returns `x Wᵀ` without the bias: [rows, out]."""
        return self.product(x, None)

    @abstractmethod
    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., in]; bias: [out], as in `bias`. Returns [..., out]."""


class SharedMatrix(PackedMatrix):
    """A plain weight that another module reads too, such as an embedding."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight)
        self.weight = weight
        self.bias = None if bias is None else bias.clone()
        if weight.dtype == torch.bfloat16 and not onednn_multiplies(weight.dtype):
            self.least_rows = 1

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply(x, self.weight, bias)


class BlockedMatrix(SharedMatrix):
    """oneDNN's layout and product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x Wᵀ + bias` by a plain weight. x: [..., in]; weight: [out, in]; bias: [out]. Returns [..., out]."""
    if not onednn_multiplies(x.dtype):
        return _multiply_float32(x, weight, bias) if x.dtype == torch.float32 else cpu.plain_linear(x, weight, bias)
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _multiply_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`multiply` by a weight that is packed anew, a part of its outputs at a time."""
    parts = weight.split(max(1, PACKED_AT_ONCE // weight.shape[1]))
    biases = [None] * len(parts) if bias is None else bias.split(len(parts[0]))
    products = [
        float32.linear(x, float32.pack(part), len(part), None if own is None else own.contiguous())
        for part, own in zip(parts, biases, strict=True)
    ]
    return products[0] if len(products) == 1 else torch.cat(products, -1)


class StreamedMatrix(PackedMatrix):
    """The layout and product of cpu.c: one stream of bfloat16 pairs per 64 outputs."""

    least_rows = 1

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight)
        self.packed = cpu.pack(weight.contiguous())
        # [out] float32
        self.bias = None if bias is None else bias.float()

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return cpu.linear(x, self.packed, self.out_features, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, bit for bit. ids: [...] int64. Returns [..., in]. Raises IndexError."""
        return cpu.take_rows(self.packed, self.out_features, self.in_features, ids)


class PackedEmbedding(nn.Embedding):
    """An embedding that reads the packed weight of the output head, so that both have one copy of it."""

    matrix: StreamedMatrix

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [...] int64. Returns [..., in]. Raises IndexError."""
        return self.matrix.rows(input)


def embed_by(embedding: nn.Embedding, matrix: StreamedMatrix) -> bool:
    """Let the embedding read the rows of `matrix`, which has its weight, and drop the weight. False, and nothing
    happened, where it does not compute the same then: its class may read the weight itself. What the class does with
    the result of torch's `forward` is kept.
    """
    kind, weight = type(embedding), embedding.weight
    ids = torch.tensor([0, len(weight) // 2, len(weight) - 1])
    expected = embedding(ids)
    bases = (PackedEmbedding,) if kind is nn.Embedding else (kind, PackedEmbedding)
    embedding.__class__ = type(kind.__name__, bases, {})
    embedding.matrix = matrix  # type: ignore[assignment]
    embedding.weight = nn.Parameter(weight.new_empty(0, matrix.in_features), requires_grad=False)
    try:
        is_same = torch.equal(embedding(ids), expected)
    except (IndexError, RuntimeError):
        is_same = False
    if not is_same:
        embedding.__class__, embedding.weight = kind, weight
        del embedding.matrix
    return is_same


class Float32Matrix(PackedMatrix):
    """The layout and product of float32.c."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight)
        self.packed = float32.pack(weight)
        # [out]
        self.bias = None if bias is None else bias.clone()

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return float32.linear(x, self.packed, self.out_features, bias)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """GELU of the product with the bias, with the bits of the two one after the other. x: [..., in]."""
        return float32.linear(x, self.packed, self.out_features, self.bias, is_gelu=True)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies packed matrices of `dtype`."""
    if onednn_multiplies(dtype):
        return True
    return cpu.available() if dtype == torch.bfloat16 else dtype == torch.float32 and float32.available()


@cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of `dtype` on this processor that give a row equal bits with any others."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return _sums_rows_alike()
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _sums_rows_alike() -> bool:
    """oneDNN 3.10, of torch 2.11, sums few rows in float32 in another order than many on some processors."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((64, 64), (8, 512)):
        weight, x = (torch.randn(rows, shape[1], generator=generator) for rows in (shape[0], 200))
        together, *few = (
            torch.ops.mkldnn._linear_pointwise(x[:count].contiguous(), weight, None, "none", [], "")
            for count in (200, 2, 3, 7, 8, 33)
        )
        if not all(torch.equal(part, together[: len(part)]) for part in few):
            return False
    return True


def can_stream(weight: torch.Tensor) -> bool:
    """Whether a weight, [out, in], can be a StreamedMatrix."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and cpu.available()


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
    """weight: [out, in]; bias: [out]. The fastest layout that this machine and the shape allow."""
    if can_stream(weight):
        return StreamedMatrix(weight, bias)
    if weight.dtype == torch.float32 and float32.available():
        return Float32Matrix(weight, bias)
    return BlockedMatrix(weight, bias) if onednn_multiplies(weight.dtype) else SharedMatrix(weight.contiguous(), bias)


_disable_amx()
