"""Products of few rows with a weight in four bits, in Triton: `y = x Wᵀ + bias`, with a scale for each group of inputs.

W is (q - zero) scale, as hqq keeps it. The weight is dequantised in registers with the roundings of the dense one, so a
step reads half a byte per weight, and a product of few rows is that of many up to the order of its sums. Bits: as in
eight_bits_triton.py, a row has equal bits for any number of rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

from lorikeet.shard.model.kernels.products_triton import WIDENS, depth_of, multiply_add
from lorikeet.shard.model.kernels.triton import rounded
from lorikeet.shard.system.operators import operator

MOST_ROWS = 64
"""With more rows a product is bound by its arithmetic, and the weight is better dequantised once."""
ROWS, WIDTH, DEPTH = 16, 32, 64
"""Rows and outputs of a tile, and most inputs that one pass takes, all of one group."""


@triton.jit
def _dequantized(quarters, zeros, scales, places, element: tl.constexpr):
    """quarters: [DEPTH, WIDTH] integers below 16; places: [WIDTH] of each output's group."""
    zero = tl.load(zeros + places).to(tl.float32)[None, :]
    scale = tl.load(scales + places).to(tl.float32)[None, :]
    shifted = rounded(quarters.to(tl.float32) - zero, element).to(tl.float32)
    return rounded(shifted * scale, element)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_4bit(
    x, weight, zeros, scales, bias, y, num_rows, num_in, half, num_groups, x_stride,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    WIDENS: tl.constexpr,
):  # fmt: skip
    """x: [rows, in], y: [rows, 2 half] contiguous; weight: [half, in] bytes, the upper four bits those of output o, the
    lower ones of output o + half; zeros, scales: [2 half, num_groups]; bias: [2 half].
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    outputs = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_row, is_output = rows < num_rows, outputs < half
    held = tl.minimum(outputs, half - 1)
    element: tl.constexpr = x.dtype.element_ty
    upper, lower = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, num_in, DEPTH):
        inputs = first + tl.arange(0, DEPTH)
        terms = tl.load(x + rows[:, None] * x_stride + inputs[None, :], mask=is_row[:, None], other=0.0)
        both = tl.load(weight + held[None, :].to(tl.int64) * num_in + inputs[:, None]).to(tl.int32)
        group = first // GROUP
        left = _dequantized(both >> 4, zeros, scales, held * num_groups + group, element)
        right = _dequantized(both & 15, zeros, scales, (held + half) * num_groups + group, element)
        upper = multiply_add(terms, left, upper, WIDENS)
        lower = multiply_add(terms, right, lower, WIDENS)
    if HAS_BIAS:
        upper += tl.load(bias + held).to(tl.float32)[None, :]
        lower += tl.load(bias + half + held).to(tl.float32)[None, :]
    place = y + rows[:, None] * (2 * half) + outputs[None, :]
    mask = is_row[:, None] & is_output[None, :]
    tl.store(place, rounded(upper, element), mask=mask)
    tl.store(place + half, rounded(lower, element), mask=mask)


def supports(x: torch.Tensor) -> bool:
    """Whether the kernel computes products of these rows here. x: [rows, in]."""
    return x.shape[0] <= MOST_ROWS and x.dtype in (torch.bfloat16, torch.float16)


@operator("multiply_4bit", mutates_args=())
def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x: [rows, in]; weight: [out / 2, in] uint8, outputs o and o + out / 2 in one byte; zeros, scales: [out, groups],
    in / groups a multiple of LEAST_DEPTH; bias: [out]. Returns [rows, out].
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_rows, num_in), half, num_groups = x.shape, weight.shape[0], scales.shape[1]
    group = num_in // num_groups
    y = torch.empty(num_rows, 2 * half, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the thread's current device
        multiply_4bit[(triton.cdiv(num_rows, ROWS), triton.cdiv(half, WIDTH))](
            x, weight, zeros, scales, scales if bias is None else bias, y, num_rows, num_in, half, num_groups,
            x.stride(0), HAS_BIAS=bias is not None, GROUP=group, ROWS=ROWS, WIDTH=WIDTH, DEPTH=depth_of(group, DEPTH),
            WIDENS=WIDENS, enable_fp_fusion=False, num_warps=4, num_stages=3,
        )  # fmt: skip
    return y


@multiply.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape[0], 2 * weight.shape[0], dtype=x.dtype, device=x.device)
