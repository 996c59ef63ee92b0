"""Low-rank adapters on CUDA: two Triton kernels for any mix of adapters and ranks in one step.

`shrink` computes h = A x, `expand` updates y with B h, DoRA's scale and the adapter's bias (targets.py has the
specification). Ranks, addresses and rows are read from device memory at fixed addresses: no launch waits for the host.
Bits: a row of a task is a row of a tile of one fixed shape; each of its sums takes its terms in an order that depends
on the module's shape and the adapter's rank alone, and no sum uses atomics. So a row has equal bits in any batch,
provided that a matrix unit computes the rows of a tile alike.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

from typing import Any

import torch
import triton
import triton.language as tl

from lorikeet.shard.batch.row_groups import TASK_ROWS
from lorikeet.shard.model.kernels.products_triton import WIDENS, multiply_add, multiply_rows

ENTRY = tl.constexpr(5)
"""Elements of a slot's entry for a target: rank, addresses of a, b, scale and bias; 0 for none."""
PART = tl.constexpr(4)
"""Elements of a part: target, number of outputs, first column in y, address of the base's bias or 0."""

RANKS = 16
"""Factors of one tile."""
MOST_RANK = 512
"""As in targets.py."""


@triton.jit
def _splits(rank, RANKS: tl.constexpr, SPLITS: tl.constexpr):
    return tl.maximum(1, SPLITS // tl.maximum(1, tl.cdiv(rank, RANKS)))


@triton.jit
def _pointer(entry, index: tl.constexpr, element: tl.constexpr):
    return tl.multiple_of(tl.load(entry + index).to(tl.pointer_type(element)), 16)


@triton.jit(do_not_specialize=["num_targets"])
def shrink(
    x, h, tasks, row_ids, parts, table, num_in, x_stride, num_targets,
    room, ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    WIDENS: tl.constexpr,
):  # fmt: skip
    """h[row, part, split, j] = x[row] . a[j] over the split's inputs, float32, `room` of them per row and part.

    SPLITS programs share the inputs of a task whose rank fits one tile, fewer where it needs more tiles. A pass takes
    DEPTH inputs.
    """
    task, part = tl.program_id(0), tl.program_id(2)
    slot, first, count = (tl.load(tasks + task * 3), tl.load(tasks + task * 3 + 1), tl.load(tasks + task * 3 + 2))
    if count == 0:
        return
    entry = table + (slot * num_targets + tl.load(parts + part * PART)) * ENTRY
    rank = tl.load(entry).to(tl.int32)
    splits = _splits(rank, RANKS, SPLITS)
    span = tl.cdiv(tl.cdiv(num_in, DEPTH), splits) * DEPTH
    lanes = tl.arange(0, ROWS)
    rows = tl.load(row_ids + first + lanes, mask=lanes < count, other=0).to(tl.int64)
    row = (rows * tl.num_programs(2) + part) * room
    # The same number of programs for every rank, so that a captured launch fits any adapter: large ranks loop.
    for piece in range(tl.program_id(1), splits * tl.cdiv(rank, RANKS), tl.num_programs(1)):
        a = _pointer(entry, 1, x.dtype.element_ty)
        split = piece % splits
        factors = (piece // splits) * RANKS + tl.arange(0, RANKS)
        sums = multiply_rows(
            x + rows[:, None] * x_stride, a + factors[None, :] * num_in, 1, split * span,
            tl.minimum(num_in, (split + 1) * span), num_in, lanes < count, factors < rank, ROWS, RANKS, DEPTH, WIDENS,
        )  # fmt: skip
        place = h + row[:, None] + split * tl.cdiv(rank, RANKS) * RANKS + factors[None, :]
        tl.store(place, sums, mask=(lanes < count)[:, None])


@triton.jit(do_not_specialize=["num_targets"])
def expand(
    h, y, tasks, row_ids, parts, table, y_stride, num_targets, room,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, IS_ALIGNED: tl.constexpr,
    IS_EMBEDDING: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Add the adapters to y's rows. For embeddings `h` holds the [rows] token ids, and a row of a, [in, rank], replaces
    the result of shrink. A program has WIDTH outputs. IS_ALIGNED: 16 divides each part's first column and number of
    outputs.
    """
    task, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, first, count = (tl.load(tasks + task * 3), tl.load(tasks + task * 3 + 1), tl.load(tasks + task * 3 + 2))
    num_out = tl.load(parts + part * PART + 1).to(tl.int32)
    column = tl.load(parts + part * PART + 2).to(tl.int32)
    if IS_ALIGNED:
        num_out, column = tl.multiple_of(num_out, 16), tl.multiple_of(column, 16)
    if (count == 0) | (block * WIDTH >= num_out):
        return
    entry = table + (slot * num_targets + tl.load(parts + part * PART)) * ENTRY
    rank = tl.load(entry).to(tl.int32)
    # the number of each: all or none
    num_scales = tl.where(tl.load(entry + 3) != 0, num_out, 0)
    num_biases = tl.where(tl.load(entry + 4) != 0, num_out, 0)
    num_bases = tl.where(tl.load(parts + part * PART + 3) != 0, num_scales, 0)
    if rank + num_scales + num_biases == 0:
        return
    element: tl.constexpr = y.dtype.element_ty
    a, b = _pointer(entry, 1, element), _pointer(entry, 2, element)

    lanes = tl.arange(0, ROWS)
    rows = tl.load(row_ids + first + lanes, mask=lanes < count, other=0).to(tl.int64)
    outputs = block * WIDTH + tl.arange(0, WIDTH)
    splits = _splits(rank, RANKS, SPLITS)
    padded = tl.cdiv(rank, RANKS) * RANKS
    if IS_EMBEDDING:
        row = tl.load(h + rows, mask=lanes < count, other=0) * rank
    else:
        row = (rows * tl.num_programs(2) + part) * room
    delta = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, rank, RANKS):
        factors = start + tl.arange(0, RANKS)
        weights = tl.load(
            b + factors[:, None] * num_out + outputs[None, :],
            mask=(factors < rank)[:, None] & (outputs < num_out)[None, :],
            other=0.0,
        )
        if IS_EMBEDDING:
            mask = (lanes < count)[:, None] & (factors < rank)[None, :]
            high = tl.load(a + row[:, None] + factors[None, :], mask=mask, other=0.0)
            delta = multiply_add(high, weights, delta, WIDENS)
        else:
            value = tl.zeros((ROWS, RANKS), tl.float32)
            for split in range(splits):
                place = h + row[:, None] + split * padded + factors[None, :]
                value += tl.load(place, mask=(lanes < count)[:, None], other=0.0)
            high = value.to(element)
            delta = multiply_add(high, weights, delta, WIDENS)
            if element != tl.float32:  # the rounding error, so that h counts as float32
                low = (value - high.to(tl.float32)).to(element)
                delta = multiply_add(low, weights, delta, WIDENS)

    scale = tl.load(_pointer(entry, 3, tl.float32) + outputs, mask=outputs < num_scales, other=1.0)
    bias = tl.load(_pointer(entry, 4, tl.float32) + outputs, mask=outputs < num_biases, other=0.0)
    base = tl.load(_pointer(parts + part * PART, 3, tl.float32) + outputs, mask=outputs < num_bases, other=0.0)
    place = y + rows[:, None] * y_stride + column + outputs[None, :]
    mask = (lanes < count)[:, None] & (outputs < num_out)[None, :]
    before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    after = scale[None, :] * (before - base[None, :] + delta) + base[None, :] + bias[None, :]
    tl.store(place, after.to(element), mask=mask)


@torch.library.custom_op("lorikeet::adapt", mutates_args=("y",))
def add_delta(
    x: torch.Tensor, y: torch.Tensor, tasks: torch.Tensor, row_ids: torch.Tensor, parts: torch.Tensor,
    table: torch.Tensor, shape: list[int], is_aligned: bool, tiles: list[int],
) -> None:  # fmt: skip
    """x: [rows, in], or [rows] token ids for embeddings; y: [rows, out of all parts], changed in place.

    tasks, row_ids: of RowGroups; parts: [parts, PART]; table: [slots, targets, ENTRY]. shape: tasks to launch, most
    outputs of a part. tiles: DEPTH, SPLITS, warps and stages of shrink, WIDTH, warps and stages of expand.
    """
    num_tasks, num_out = shape
    depth, splits, *of_shrink = tiles[:4]
    width, *of_expand = tiles[4:]
    num_parts, num_targets = parts.shape[0], table.shape[1]
    room = max(MOST_RANK, RANKS * splits)
    fixed: dict[str, Any] = {
        "ROWS": TASK_ROWS,
        "RANKS": RANKS,
        "SPLITS": splits,
        "WIDENS": WIDENS,
        "enable_fp_fusion": True,
    }
    h = x
    if x.dim() > 1:
        h = torch.empty((x.shape[0], num_parts, room), dtype=torch.float32, device=x.device)
        shrink[(num_tasks, splits, num_parts)](
            x, h, tasks, row_ids, parts, table, x.shape[1], x.stride(0), num_targets, room, DEPTH=depth,
            **_options(of_shrink), **fixed,
        )  # fmt: skip
    expand[(num_tasks, triton.cdiv(num_out, width), num_parts)](
        h, y, tasks, row_ids, parts, table, y.stride(0), num_targets, room, WIDTH=width, IS_ALIGNED=is_aligned,
        IS_EMBEDDING=x.dim() == 1, **_options(of_expand), **fixed,
    )  # fmt: skip


def _options(warps_and_stages: list[int]) -> dict[str, int]:
    return dict(zip(("num_warps", "num_stages"), warps_and_stages, strict=True))


@add_delta.register_fake
def _(*_args: object) -> None:
    return None
