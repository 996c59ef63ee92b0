"""Products of few rows with a weight in eight bits, in Triton: `y = x Wᵀ · scale + bias`, W float8_e4m3fn or int8.

The weight is converted in registers, so a step reads one byte per weight; both formats are exact in bfloat16 and
float16. Devices that do not convert FP8 move its bits into those of a float16, where NaN becomes 480. Bits: a row is a
row of a tile of one shape, and its sums take their terms in the order of the inputs. So it has equal bits for any
number of rows, provided that a matrix unit computes the rows of a tile alike.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

from lorikeet.shard.model.kernels.products_triton import WIDENS, multiply_add
from lorikeet.shard.model.kernels.triton import rounded
from lorikeet.shard.system import gpu
from lorikeet.shard.system.operators import operator

MOST_ROWS = 64
"""With more rows a product is bound by its arithmetic, and the weight is better converted once."""
ROWS, WIDTH, DEPTH = 16, 32, 128
"""Rows and outputs of a tile, and inputs that one pass takes."""
CONVERTS_FP8 = (8, 9)
"""Compute capability of the first devices that convert FP8."""


@triton.jit
def _decoded(bits):
    """The values of float8_e4m3fn as float32: 256 times those of the same exponent and mantissa in a float16."""
    bits = bits.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit(do_not_specialize=["num_rows"])
def multiply_8bit(
    x, weight, scales, bias, y, num_rows, num_in, num_out, x_stride, HAS_BIAS: tl.constexpr, IS_ENCODED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """x: [rows, in], y: [rows, out] contiguous; weight: [out, in] contiguous, with IS_ENCODED the bits of FP8 as uint8;
    scales, bias: [out]. Programs of the same outputs are neighbours: the weight comes from memory once.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    outputs = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_row, is_output = rows < num_rows, outputs < num_out
    offsets = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, num_in, DEPTH):
        inputs = first + offsets
        is_input = inputs < num_in
        terms = tl.load(
            x + rows[:, None] * x_stride + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        places = weight + outputs[None, :].to(tl.int64) * num_in + inputs[:, None]
        factors = tl.load(places, mask=is_input[:, None] & is_output[None, :], other=0.0)
        values = _decoded(factors) if IS_ENCODED else factors.to(tl.float32)
        sums = multiply_add(terms, values.to(terms.dtype), sums, WIDENS)
    sums *= tl.load(scales + outputs, mask=is_output, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    place = y + rows[:, None] * num_out + outputs[None, :]
    tl.store(place, rounded(sums, y.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel computes this product here. x: [rows, in]; weight: [out, in]."""
    has_dtypes = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype in (torch.int8, torch.float8_e4m3fn)
    return x.shape[0] <= MOST_ROWS and has_dtypes and weight.is_contiguous()


@operator("multiply_8bit", mutates_args=())
def multiply(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [rows, in]; weight: [out, in] in eight bits; scales: [out] float32; bias: [out]. Returns [rows, out]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_out = x.shape[0], weight.shape[0]
    y = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    is_encoded = weight.dtype == torch.float8_e4m3fn and gpu.capability(x.device) < CONVERTS_FP8
    weight = weight.view(torch.uint8) if is_encoded else weight
    with torch.cuda.device_of(x):  # Triton launches on the thread's current device
        multiply_8bit[(triton.cdiv(num_rows, ROWS), triton.cdiv(num_out, WIDTH))](
            x, weight, scales, scales if bias is None else bias, y, num_rows, x.shape[1], num_out, x.stride(0),
            HAS_BIAS=bias is not None, IS_ENCODED=is_encoded, ROWS=ROWS, WIDTH=WIDTH, DEPTH=DEPTH, WIDENS=WIDENS,
            enable_fp_fusion=False, num_warps=4, num_stages=4,
        )  # fmt: skip
    return y


@multiply.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
