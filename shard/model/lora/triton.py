"""Low-rank adapters on CUDA: one Triton kernel for any mix of adapters and ranks in one step.

Programs compute h = A x ("shrink"), meet, and then update y with B h, DoRA's scale and the adapter's bias ("expand";
targets.py has the specification). Ranks, addresses and rows are read from device memory at fixed addresses: no launch
waits for the host. Programs share the tasks that are used, not those that a captured launch has room for.
Bits: a row of a task is a row of a tile of one fixed shape; each of its sums takes its terms in an order that depends
on the module's shape and the adapter's rank alone, and no sum uses atomics. So a row has equal bits in any batch,
provided that a matrix unit computes the rows of a tile alike.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

from lorikeet.shard.batch.row_groups import TASK_ROWS
from lorikeet.shard.model.kernels.products_triton import WIDENS, multiply_add, multiply_rows
from lorikeet.shard.system.operators import operator

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


@triton.jit
def _shrink(
    x, h, tasks, row_ids, parts, table, task, piece, part, num_in, x_stride, num_targets, num_parts, room,
    ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """h[row, part, split, j] = x[row] . a[j] over the split's inputs, float32, `room` of them per row and part.

    SPLITS pieces share the inputs of a task whose rank fits one tile, fewer where it needs more tiles. A pass takes
    DEPTH inputs.
    """
    slot, first, count = (tl.load(tasks + task * 3), tl.load(tasks + task * 3 + 1), tl.load(tasks + task * 3 + 2))
    entry = table + (slot * num_targets + tl.load(parts + part * PART)) * ENTRY
    rank = tl.load(entry).to(tl.int32)
    rank = tl.where(count > 0, rank, 0)
    splits = _splits(rank, RANKS, SPLITS)
    span = tl.cdiv(tl.cdiv(num_in, DEPTH), splits) * DEPTH
    lanes = tl.arange(0, ROWS)
    rows = tl.load(row_ids + first + lanes, mask=lanes < count, other=0).to(tl.int64)
    row = (rows * num_parts + part) * room
    # The same number of pieces for every rank, so that a captured launch fits any adapter: large ranks loop.
    for at in range(piece, splits * tl.cdiv(rank, RANKS), SPLITS):
        a = _pointer(entry, 1, x.dtype.element_ty)
        split = at % splits
        factors = (at // splits) * RANKS + tl.arange(0, RANKS)
        sums = multiply_rows(
            x + rows[:, None] * x_stride, a + factors[None, :] * num_in, 1, split * span,
            tl.minimum(num_in, (split + 1) * span), num_in, lanes < count, factors < rank, ROWS, RANKS, DEPTH, WIDENS,
        )  # fmt: skip
        place = h + row[:, None] + split * tl.cdiv(rank, RANKS) * RANKS + factors[None, :]
        tl.store(place, sums, mask=(lanes < count)[:, None])


@triton.jit
def _expand(
    h, y, tasks, row_ids, parts, table, task, block, part, y_stride, num_targets, num_parts, room,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, IS_ALIGNED: tl.constexpr,
    IS_EMBEDDING: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Add the adapters to WIDTH outputs of a task's rows. For embeddings `h` holds the [rows] token ids, and a row of
    a, [in, rank], replaces the result of shrink. IS_ALIGNED: 16 divides each part's first column and number of outputs.
    """
    slot, first, count = (tl.load(tasks + task * 3), tl.load(tasks + task * 3 + 1), tl.load(tasks + task * 3 + 2))
    num_out = tl.load(parts + part * PART + 1).to(tl.int32)
    column = tl.load(parts + part * PART + 2).to(tl.int32)
    if IS_ALIGNED:
        num_out, column = tl.multiple_of(num_out, 16), tl.multiple_of(column, 16)
    entry = table + (slot * num_targets + tl.load(parts + part * PART)) * ENTRY
    rank = tl.load(entry).to(tl.int32)
    # the number of each: all or none
    num_scales = tl.where(tl.load(entry + 3) != 0, num_out, 0)
    num_biases = tl.where(tl.load(entry + 4) != 0, num_out, 0)
    num_bases = tl.where(tl.load(parts + part * PART + 3) != 0, num_scales, 0)
    if (count > 0) & (block * WIDTH < num_out) & (rank + num_scales + num_biases > 0):
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
            row = (rows * num_parts + part) * room
        delta = tl.zeros((ROWS, WIDTH), tl.float32)
        # One stage: with more, some versions of ptxas mistranslate a rounding inside a pipelined loop on Hopper.
        for start in tl.range(0, rank, RANKS, num_stages=1):
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
                for split in tl.range(0, splits, num_stages=1):
                    place = h + row[:, None] + split * padded + factors[None, :]
                    # past the first cache, which does not see what other multiprocessors write
                    value += tl.load(place, mask=(lanes < count)[:, None], other=0.0, cache_modifier=".cg")
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


@triton.jit
def _num_used(tasks, num_tasks):
    """The number of tasks up to the last that has rows."""
    used = 0
    for first in range(0, num_tasks, 128):
        places = first + tl.arange(0, 128)
        counts = tl.load(tasks + places * 3 + 2, mask=places < num_tasks, other=0)
        used = tl.maximum(used, tl.max(tl.where(counts > 0, places + 1, 0), 0))
    return used


@triton.jit
def _meet(meeting):
    """Return once every program has called it: what they wrote before can be read. meeting: two zeros, which are zeros
    again when all have left. All programs must run at once.
    """
    num_programs = tl.num_programs(0)
    tl.debug_barrier()  # all threads have written before one announces it
    tl.atomic_add(meeting, 1, sem="acq_rel", scope="gpu")
    while tl.atomic_add(meeting, 0, sem="acq_rel", scope="gpu") < num_programs:
        pass
    if tl.atomic_add(meeting + 1, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        tl.store(meeting, 0)
        tl.store(meeting + 1, 0)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_targets", "num_tasks", "num_parts"])
def adapt(
    x, h, y, tasks, row_ids, parts, table, meeting, num_in, x_stride, y_stride, num_targets, num_tasks, num_parts,
    num_blocks, room, ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, SHRINKS: tl.constexpr, EXPANDS: tl.constexpr, IS_ALIGNED: tl.constexpr,
    IS_EMBEDDING: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Programs share the pieces of all used tasks; with both SHRINKS and EXPANDS they meet in between."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    used = _num_used(tasks, num_tasks)
    if SHRINKS:
        for item in tl.range(program, used * num_parts * SPLITS, num_programs, num_stages=1):
            _shrink(
                x, h, tasks, row_ids, parts, table, item // SPLITS // num_parts, item % SPLITS,
                item // SPLITS % num_parts, num_in, x_stride, num_targets, num_parts, room,
                ROWS, RANKS, DEPTH, SPLITS, WIDENS,
            )  # fmt: skip
    if SHRINKS and EXPANDS:
        _meet(meeting)
    if EXPANDS:
        for item in tl.range(program, used * num_parts * num_blocks, num_programs, num_stages=1):
            _expand(
                h, y, tasks, row_ids, parts, table, item // num_blocks // num_parts, item % num_blocks,
                item // num_blocks % num_parts, y_stride, num_targets, num_parts, room,
                ROWS, RANKS, WIDTH, SPLITS, IS_ALIGNED, IS_EMBEDDING, WIDENS,
            )  # fmt: skip


@operator("adapt", mutates_args=("y", "meeting"))
def add_delta(
    x: torch.Tensor, y: torch.Tensor, tasks: torch.Tensor, row_ids: torch.Tensor, parts: torch.Tensor,
    table: torch.Tensor, meeting: torch.Tensor, shape: list[int], is_aligned: bool, tiles: list[int],
) -> None:  # fmt: skip
    """x: [rows, in], or [rows] token ids for embeddings; y: [rows, out of all parts], changed in place.

    tasks, row_ids: of RowGroups; parts: [parts, PART]; table: [slots, targets, ENTRY]; meeting: [2] int32 zeros. shape:
    tasks to launch, most outputs of a part, programs that the device runs at once, and whether it certainly does, so
    that they may wait for each other. tiles: DEPTH, SPLITS, warps and stages of shrink, WIDTH, warps and stages of
    expand; there is one launch where both have the same number of warps.
    """
    num_tasks, num_out, most_programs, may_meet = shape
    depth, splits, *of_shrink = tiles[:4]
    width, *of_expand = tiles[4:]
    num_parts, num_targets = parts.shape[0], table.shape[1]
    room, num_blocks = max(MOST_RANK, RANKS * splits), triton.cdiv(num_out, width)
    is_embedding = x.dim() == 1
    h = x if is_embedding else x.new_empty((x.shape[0], num_parts, room), dtype=torch.float32)

    def launch(num_items: int, options: list[int], shrinks: bool, expands: bool) -> None:
        warps, stages = options
        adapt[(max(1, min(most_programs, num_items)),)](
            x, h, y, tasks, row_ids, parts, table, meeting, 0 if is_embedding else x.shape[1], x.stride(0), y.stride(0),
            num_targets, num_tasks, num_parts, num_blocks, room, ROWS=TASK_ROWS, RANKS=RANKS, DEPTH=depth, WIDTH=width,
            SPLITS=splits, SHRINKS=shrinks, EXPANDS=expands, IS_ALIGNED=is_aligned, IS_EMBEDDING=is_embedding,
            WIDENS=WIDENS, enable_fp_fusion=True, num_warps=warps, num_stages=stages,
            launch_cooperative_grid=shrinks and expands,
        )  # fmt: skip

    num_shrunk, num_expanded = num_tasks * num_parts * splits, num_tasks * num_parts * num_blocks
    if is_embedding:
        launch(num_expanded, of_expand, shrinks=False, expands=True)
    elif may_meet and MEETS and of_shrink[0] == of_expand[0]:
        launch(max(num_shrunk, num_expanded), of_shrink, shrinks=True, expands=True)
    else:
        launch(num_shrunk, of_shrink, shrinks=True, expands=False)
        launch(num_expanded, of_expand, shrinks=False, expands=True)


MEETS = isinstance(adapt, triton.JITFunction)
"""Triton's interpreter runs one program after the other: none can wait for a later one."""


@add_delta.register_fake
def _(*_args: object) -> None:
    return None
