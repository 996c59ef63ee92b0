"""Medusa heads on CUDA: Triton kernels for the draft rows of any mix of slots and heads in one step.

`head_block` computes one residual block of each head, y = x + SiLU(W x + b), `head_logits` the logits of heads that
have an output matrix (Cai et al. 2024; SlotHeads in heads.py is the specification). Addresses, tasks and rows are read
from device memory: no launch waits for the host, and there is no launch per slot. Sums are float32 and are rounded once
per block. Bits: a draft row is a row of a tile of one fixed shape, and each of its sums takes all its terms in one
program, in an order that depends on the module's shape alone. So it has equal bits in any batch, provided that a matrix
unit computes the rows of a tile alike.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

from typing import Any

import torch
import triton
import triton.language as tl

from lorikeet.shard.batch.row_groups import TASK_ROWS
from lorikeet.shard.model.kernels.products_triton import WIDENS, multiply_rows
from lorikeet.shard.model.kernels.triton import rounded
from lorikeet.shard.model.medusa.heads import MOST_BLOCKS
from lorikeet.shard.system.operators import operator

ENTRY = tl.constexpr(2 + 2 * MOST_BLOCKS)
"""Elements of a head's entry: blocks, address of its output matrix or 0, then of each block's weight and bias."""


@triton.jit
def _pointer(entry, index, element: tl.constexpr, IS_ALIGNED: tl.constexpr):
    pointer = tl.load(entry + index).to(tl.pointer_type(element))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _product(
    x, rows, is_row, weight, outputs, num_in, num_out,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """[ROWS, WIDTH] float32: x[rows] . weight[outputs]."""
    left, right = x + rows[:, None] * num_in, weight + outputs[None, :].to(tl.int64) * num_in
    return multiply_rows(left, right, 1, 0, num_in, num_in, is_row, outputs < num_out, ROWS, WIDTH, DEPTH, WIDENS)


@triton.jit(do_not_specialize=["num_rows", "num_drafts", "num_behind"])
def head_block(
    x, tasks, sources, places, table, num_in, num_rows, num_drafts, num_behind,
    HEADS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    IS_ALIGNED: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """One block of every head, `num_behind` launches before the last, which computes every head's last block.

    x: [num_rows hidden rows, then num_drafts results, then as many between two blocks; num_in].
    """
    task, piece = tl.program_id(0), tl.program_id(1)
    slot, head = tl.load(tasks + task * 4), tl.load(tasks + task * 4 + 1)
    first, count = tl.load(tasks + task * 4 + 2), tl.load(tasks + task * 4 + 3)
    if count == 0:
        return
    entry = table + (slot * HEADS + head) * ENTRY
    num_blocks = tl.load(entry).to(tl.int32)
    block = num_blocks - 1 - num_behind
    if (block < 0) & (num_blocks + num_behind > 0):
        return
    lanes = tl.arange(0, ROWS)
    is_row = lanes < count
    place = num_rows + tl.load(places + first + lanes, mask=is_row, other=0)
    source = tl.load(sources + first + lanes, mask=is_row, other=0)
    rows = tl.where(block > 0, place + (1 - num_behind % 2) * num_drafts, source).to(tl.int64)
    outputs = piece * WIDTH + tl.arange(0, WIDTH)
    mask = is_row[:, None] & (outputs < num_in)[None, :]
    value = tl.load(x + rows[:, None] * num_in + outputs[None, :], mask=mask, other=0.0).to(tl.float32)
    element: tl.constexpr = x.dtype.element_ty
    if block >= 0:
        weight = _pointer(entry, 2 + 2 * block, element, IS_ALIGNED)
        bias = tl.load(_pointer(entry, 3 + 2 * block, element, IS_ALIGNED) + outputs, mask=outputs < num_in, other=0.0)
        sums = _product(x, rows, is_row, weight, outputs, num_in, num_in, ROWS, WIDTH, DEPTH, WIDENS)
        sums += bias.to(tl.float32)[None, :]
        value += sums / (1.0 + tl.exp(-sums))
    target = (place + (num_behind % 2) * num_drafts).to(tl.int64)
    tl.store(x + target[:, None] * num_in + outputs[None, :], value.to(element), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def head_logits(
    x, logits, tasks, places, table, num_in, num_out, num_rows, logits_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    IS_ALIGNED: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """logits[place] = x[place] . output matrix, for heads that have one."""
    task, piece = tl.program_id(0), tl.program_id(1)
    slot, head = tl.load(tasks + task * 4), tl.load(tasks + task * 4 + 1)
    first, count = tl.load(tasks + task * 4 + 2), tl.load(tasks + task * 4 + 3)
    entry = table + (slot * HEADS + head) * ENTRY
    if (count == 0) | (tl.load(entry + 1) == 0):
        return
    lanes = tl.arange(0, ROWS)
    is_row = lanes < count
    rows = (num_rows + tl.load(places + first + lanes, mask=is_row, other=0)).to(tl.int64)
    outputs = piece * WIDTH + tl.arange(0, WIDTH)
    element: tl.constexpr = x.dtype.element_ty
    weight = _pointer(entry, 1, element, IS_ALIGNED)
    sums = _product(x, rows, is_row, weight, outputs, num_in, num_out, ROWS, WIDTH, DEPTH, WIDENS)
    mask = is_row[:, None] & (outputs < num_out)[None, :]
    tl.store(
        logits + rows[:, None] * logits_stride + outputs[None, :], rounded(sums, logits.dtype.element_ty), mask=mask
    )


def _fixed(table: torch.Tensor, num_in: int, tiles: list[int]) -> dict[str, Any]:
    width, depth, num_warps, num_stages = tiles
    return {
        "HEADS": table.shape[1],
        "ROWS": TASK_ROWS,
        "WIDTH": width,
        "DEPTH": depth,
        "IS_ALIGNED": num_in % 16 == 0,
        "WIDENS": WIDENS,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


@operator("head_blocks", mutates_args=("x",))
def add_drafts(
    x: torch.Tensor, tasks: torch.Tensor, sources: torch.Tensor, places: torch.Tensor, table: torch.Tensor,
    num_rows: int, num_blocks: int, tiles: list[int],
) -> None:  # fmt: skip
    """Compute draft rows from hidden rows, in place. x: [S + E, H], hidden rows first; [S + 2 E, H] for several blocks.

    tasks, sources, places: of HeadGroups; table: [slots, heads, ENTRY]; num_blocks: launches, and most blocks of
    a head; tiles: WIDTH, DEPTH, warps and stages.
    """
    num_in, num_drafts = x.shape[1], places.shape[0]
    grid = (tasks.shape[0], triton.cdiv(num_in, tiles[0]))
    for num_behind in reversed(range(num_blocks)):
        head_block[grid](
            x, tasks, sources, places, table, num_in, num_rows, num_drafts, num_behind,
            **_fixed(table, num_in, tiles),
        )  # fmt: skip


@operator("head_logits", mutates_args=("logits",))
def put_head_logits(
    x: torch.Tensor, logits: torch.Tensor, tasks: torch.Tensor, places: torch.Tensor, table: torch.Tensor,
    num_rows: int, tiles: list[int],
) -> None:  # fmt: skip
    """Logits of heads that have an output matrix, in place. x: [S + E, H]; logits: [S + E, V]."""
    num_in, num_out = x.shape[1], logits.shape[1]
    head_logits[(tasks.shape[0], triton.cdiv(num_out, tiles[0]))](
        x, logits, tasks, places, table, num_in, num_out, num_rows, logits.stride(0), **_fixed(table, num_in, tiles)
    )


@add_drafts.register_fake
@put_head_logits.register_fake
def _(*_args: object) -> None:
    return None
