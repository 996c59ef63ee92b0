"""Matrix products in Triton: the tile loop that kernels for adapters, heads and experts share, and `y = x Wᵉ` of rows
that are sorted by matrix, for devices where torch has no such kernel.

A task of the latter is a tile of neighbouring rows of one matrix. Every sum takes its terms in the order of the inputs,
so a row's bits depend on its matrix, itself and the height of tiles, which depends on the number of rows alone.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

from lorikeet.shard.model.kernels.pairs import SortedPairs
from lorikeet.shard.model.kernels.pairs_triton import partition_pairs
from lorikeet.shard.model.kernels.triton import rounded
from lorikeet.shard.system import gpu
from lorikeet.shard.system.operators import operator

FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile: where each matrix has few on average, and where it has many."""
WIDTH = 64
"""Outputs of a tile."""
DEPTH = 64
"""Inputs that one pass takes."""
LEAST_DEPTH = 16
"""The fewest inputs that a matrix unit takes at once."""


@triton.jit
def multiply_add(left, right, sums, WIDENS: tl.constexpr):
    """left: [m, k], right: [k, n], sums: [m, n] float32. Returns sums + left right."""
    if WIDENS:
        # one order of sums for every shape: those of 16-bit numbers are exact
        sums += tl.dot(left.to(tl.float64), right.to(tl.float64)).to(tl.float32)
    else:
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton.jit
def multiply_rows(
    left, right, stride, start, stop, num_in, is_row, is_output,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """[ROWS, WIDTH] float32: left · right over the inputs from `start` to `stop`, DEPTH at a time and in their order.

    left: [ROWS, 1], right: [1, WIDTH] addresses of the first inputs; those of `right` are `stride` elements apart;
    is_row: [ROWS], is_output: [WIDTH].
    """
    offsets = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(start, stop, DEPTH):
        inputs = first + offsets
        is_input = inputs < num_in
        terms = tl.load(left + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        places = right + inputs[:, None].to(tl.int64) * stride
        weights = tl.load(places, mask=is_input[:, None] & is_output[None, :], other=0.0)
        sums = multiply_add(terms, weights, sums, WIDENS)
    return sums


def depth_of(group: int, most: int) -> int:
    """Inputs that one pass takes of groups of so many, at most `most`: a power of two. 0 where none divides a group."""
    depth = most
    while depth >= LEAST_DEPTH and group % depth:
        depth //= 2
    return depth if depth >= LEAST_DEPTH else 0


WIDENS = not isinstance(multiply_add, triton.JITFunction)
"""Triton's interpreter cannot multiply bfloat16, and its sums follow from the shape of a tile."""


@triton.jit
def multiply(
    x, matrices, y, tasks, num_in, num_out, x_stride, matrix_stride, in_stride, out_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """x: [rows, in]; matrices: [matrices, in, out]; y: [rows, out] contiguous; tasks: [tasks, 3] matrix, first row,
    number of rows.
    """
    task, block = tl.program_id(0), tl.program_id(1)
    matrix, first, count = (tl.load(tasks + task * 3), tl.load(tasks + task * 3 + 1), tl.load(tasks + task * 3 + 2))
    if count == 0:
        return
    lanes = tl.arange(0, ROWS)
    rows = (first + lanes).to(tl.int64)
    outputs = block * WIDTH + tl.arange(0, WIDTH)
    weights = matrices + matrix.to(tl.int64) * matrix_stride + outputs[None, :].to(tl.int64) * out_stride
    sums = multiply_rows(
        x + rows[:, None] * x_stride, weights, in_stride, 0, num_in, num_in, lanes < count, outputs < num_out,
        ROWS, WIDTH, DEPTH, WIDENS,
    )  # fmt: skip
    mask = (lanes < count)[:, None] & (outputs < num_out)[None, :]
    tl.store(y + rows[:, None] * num_out + outputs[None, :], rounded(sums, y.dtype.element_ty), mask=mask)


def multiply_tiles(x: torch.Tensor, matrices: torch.Tensor, pairs: SortedPairs) -> torch.Tensor:
    """x: [P, in] as the pairs lie; matrices: [experts, in, out], strided at will. Returns [P, out]."""
    num_pairs, num_experts = x.shape[0], matrices.shape[0]
    num_rows = FEW_ROWS if num_pairs <= FEW_ROWS * num_experts else most_rows(x.device)
    return multiply_tasks(x.contiguous(), matrices, partition_pairs(pairs, num_rows).tasks, num_rows)


def most_rows(device: torch.device) -> int:
    """Rows of a tile where each matrix has many. Without matrix units the larger tile takes too many registers."""
    return MANY_ROWS if gpu.capability(device) >= (8, 0) else FEW_ROWS


@operator("multiply_grouped", mutates_args=())
def multiply_tasks(x: torch.Tensor, matrices: torch.Tensor, tasks: torch.Tensor, num_rows: int) -> torch.Tensor:
    """x: [rows, in]; matrices: [matrices, in, out]; tasks: [tasks, 3] of up to `num_rows` rows. Returns [rows, out]."""
    y = x.new_empty(x.shape[0], matrices.shape[2])
    multiply[(tasks.shape[0], triton.cdiv(matrices.shape[2], WIDTH))](
        x, matrices, y, tasks, x.shape[1], matrices.shape[2], x.stride(0), *matrices.stride(), ROWS=num_rows,
        WIDTH=WIDTH, DEPTH=DEPTH, WIDENS=WIDENS,
    )  # fmt: skip
    return y


@multiply_tasks.register_fake
def _(x: torch.Tensor, matrices: torch.Tensor, _tasks: torch.Tensor, _num_rows: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], matrices.shape[2])
