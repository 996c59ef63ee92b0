"""Low-rank adapters on CUDA: two Triton kernels for any mix of adapters and ranks in one step, and two more for sums of
adapters, which a step with such rows launches too.

`shrink` computes h = A x, and `expand` updates y with B h, DoRA's scale and the adapter's bias (targets.py has the
specification). Ranks, addresses and rows are read from device memory at fixed addresses: no launch waits for the host.
Programs share the tasks that are used, not those that a captured launch has room for.
Bits: a row of a task is a row of a tile of one fixed shape; each of its sums takes its terms in an order that depends
on the module's shape and the adapter's rank alone, and no sum uses atomics. So a row has equal bits in any batch,
provided that a matrix unit computes the rows of a tile alike.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

from lorikeet.proto.params import MAX_MERGED
from lorikeet.shard.batch.row_groups import TASK_ROWS
from lorikeet.shard.model.kernels.products_triton import WIDENS, multiply_add, multiply_rows
from lorikeet.shard.model.kernels.triton import rounded
from lorikeet.shard.system.operators import operator

ENTRY = tl.constexpr(5)
"""Elements of a slot's entry for a target: rank, addresses of a, b, scale and bias; 0 for none."""
PART = tl.constexpr(4)
"""Elements of a part: target, number of outputs, first column in y, address of the base's bias or 0."""

MOST_PARTS = tl.constexpr(MAX_MERGED)
"""Most adapters of a sum."""
SUM = tl.constexpr(2 + 3 * MAX_MERGED)
"""Elements of a sum: number of adapters, whether they share factors; their slots, weights of A x and weights of B."""

RANKS = 16
"""Factors of one tile."""
MOST_RANK = 512
"""As in targets.py."""
MOST_TILES = tl.constexpr(MOST_RANK // RANKS)


@triton.jit
def _splits(rank, RANKS: tl.constexpr, SPLITS: tl.constexpr):
    return tl.maximum(1, SPLITS // tl.maximum(1, tl.cdiv(rank, RANKS)))


@triton.jit
def _pointer(entry, index: tl.constexpr, element: tl.constexpr):
    return tl.multiple_of(tl.load(entry + index).to(tl.pointer_type(element)), 16)


@triton.jit
def _num_used(tasks, num_tasks):
    """The number of tasks up to the last that has rows."""
    used = 0
    for first in range(0, num_tasks, 128):
        places = first + tl.arange(0, 128)
        counts = tl.load(tasks + places * 3 + 2, mask=places < num_tasks, other=0)
        used = tl.maximum(used, tl.max(tl.where(counts > 0, places + 1, 0), 0))
    return used


@triton.jit(do_not_specialize=["num_targets", "num_tasks", "num_parts"])
def shrink(
    x, h, tasks, row_ids, parts, table, num_in, x_stride, num_targets, num_tasks, num_parts, room,
    ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """h[row, part, split, j] = x[row] . a[j] over the split's inputs, float32, `room` of them per row and part.

    SPLITS pieces share the inputs of a task whose rank fits one tile, fewer where it needs more tiles. A pass takes
    DEPTH inputs.
    """
    lanes = tl.arange(0, ROWS)
    num_items = _num_used(tasks, num_tasks) * num_parts * SPLITS
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        task, part, piece = item // SPLITS // num_parts, item // SPLITS % num_parts, item % SPLITS
        slot, first, count = tl.load(tasks + task * 3), tl.load(tasks + task * 3 + 1), tl.load(tasks + task * 3 + 2)
        target = tl.load(parts + part * PART)
        rows = tl.load(row_ids + first + lanes, mask=lanes < count, other=0).to(tl.int64)
        entry = table + (slot * num_targets + target) * ENTRY
        rank = tl.load(entry).to(tl.int32)
        rank = tl.where(count > 0, rank, 0)
        splits = _splits(rank, RANKS, SPLITS)
        span = tl.cdiv(tl.cdiv(num_in, DEPTH), splits) * DEPTH
        row = (rows * num_parts + part) * room
        # The same number of pieces for every rank, so that a captured launch fits any adapter: large ranks loop.
        for at in range(piece, splits * tl.cdiv(rank, RANKS), SPLITS):
            a = _pointer(entry, 1, x.dtype.element_ty)
            split = at % splits
            factors = (at // splits) * RANKS + tl.arange(0, RANKS)
            sums = multiply_rows(
                x + rows[:, None] * x_stride, a + factors[None, :] * num_in, 1, split * span,
                tl.minimum(num_in, (split + 1) * span), num_in, lanes < count, factors < rank, ROWS, RANKS, DEPTH,
                WIDENS,
            )  # fmt: skip
            place = h + row[:, None] + split * tl.cdiv(rank, RANKS) * RANKS + factors[None, :]
            tl.store(place, sums, mask=(lanes < count)[:, None])


@triton.jit
def _sum_splits(h, row, is_row, factors, rank, RANKS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, RANKS] float32: the sums of all splits, in their order."""
    padded = tl.cdiv(rank, RANKS) * RANKS
    # without factors nothing has been written
    splits = tl.where(rank > 0, _splits(rank, RANKS, SPLITS), 0)
    value = tl.zeros((ROWS, RANKS), tl.float32)
    for split in tl.static_range(SPLITS):
        place = h + row[:, None] + split * padded + factors[None, :]
        value += tl.load(place, mask=(tl.where(is_row, splits, 0) > split)[:, None], other=0.0)
    return value


@triton.jit
def _multiply_factors(value, weights, delta, WIDENS: tl.constexpr):
    """delta + value weights. value: [rows, factors] float32, which counts as float32 whatever the dtype of weights."""
    element: tl.constexpr = weights.dtype
    high = value.to(element)
    delta = multiply_add(high, weights, delta, WIDENS)
    if element != tl.float32:
        low = (value - high.to(tl.float32)).to(element)
        delta = multiply_add(low, weights, delta, WIDENS)
    return delta


@triton.jit
def _factors_of_ids(a, ids, is_row, factors, rank):
    """[rows, factors] float32 of token ids: rows of a, [in, rank]."""
    mask = is_row[:, None] & (factors < rank)[None, :]
    return tl.load(a + ids[:, None] * rank + factors[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_b(b, factors, outputs, rank, num_out, IS_WHOLE: tl.constexpr):
    """[factors, outputs] of b, [rank, num_out]; with IS_WHOLE all outputs exist."""
    mask = (factors < rank)[:, None]
    if not IS_WHOLE:
        mask = mask & (outputs < num_out)[None, :]
    return tl.load(b + factors[:, None] * num_out + outputs[None, :], mask=mask, other=0.0)


@triton.jit
def _load_results(results, outputs, is_row, num_out, IS_WHOLE: tl.constexpr):
    """[rows, outputs] of y, as `_load_b`."""
    mask = is_row[:, None]
    if not IS_WHOLE:
        mask = mask & (outputs < num_out)[None, :]
    return tl.load(results + outputs[None, :], mask=mask, other=0.0)


@triton.jit
def _share(parts, num_parts, num_tasks, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """How programs share the blocks of WIDTH outputs: the most blocks of a share, and the end of each part's shares in
    those of a task, [PARTS]. There is one share for each program or, with many tasks, up to four for each part.
    """
    places = tl.arange(0, PARTS)
    num_out = tl.load(parts + places * PART + 1, mask=places < num_parts, other=0).to(tl.int32)
    blocks = tl.cdiv(num_out, WIDTH)
    num_programs = tl.num_programs(0)
    most = tl.max(blocks, 0)
    if num_tasks * num_parts * 2 > num_programs:
        length = tl.maximum(tl.cdiv(most, 4), 1)
    else:
        length = tl.maximum(tl.cdiv(tl.sum(blocks, 0) * num_tasks, num_programs), 1)
        while (length < most) & (tl.sum(tl.cdiv(blocks, length), 0) * num_tasks > num_programs):
            length += 1
    return length, tl.cumsum(tl.cdiv(blocks, length), 0)


@triton.jit(do_not_specialize=["num_targets", "num_tasks", "num_parts"])
def expand(
    h, y, tasks, row_ids, parts, table, y_stride, num_targets, num_tasks, num_parts, room,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    IS_ALIGNED: tl.constexpr, IS_WHOLE: tl.constexpr, IS_EMBEDDING: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Add the adapters of the tasks' rows to y. A program takes neighbouring blocks of WIDTH outputs of one task and
    part; it reads what they share once, and weights and y of the next block while it computes one.

    For embeddings `h` holds the [rows] token ids, and a row of a, [in, rank], replaces the result of shrink. PARTS: a
    power of two, at least num_parts. IS_ALIGNED: 16 divides each part's first column and number of outputs; IS_WHOLE:
    WIDTH divides the latter.
    """
    element: tl.constexpr = y.dtype.element_ty
    lanes, factors = tl.arange(0, ROWS), tl.arange(0, RANKS)
    used = _num_used(tasks, num_tasks)
    length, ends = _share(parts, num_parts, used, WIDTH, PARTS)
    num_shares = tl.max(ends, 0)
    for item in tl.range(tl.program_id(0), used * num_shares, tl.num_programs(0), num_stages=1):
        task, place = item // num_shares, item % num_shares
        part = tl.sum((ends <= place).to(tl.int32), 0)
        begin = (place - tl.max(tl.where(ends <= place, ends, 0), 0)) * length
        slot, first, count = tl.load(tasks + task * 3), tl.load(tasks + task * 3 + 1), tl.load(tasks + task * 3 + 2)
        target = tl.load(parts + part * PART)
        num_out = tl.load(parts + part * PART + 1).to(tl.int32)
        column = tl.load(parts + part * PART + 2).to(tl.int32)
        is_row = lanes < count
        rows = tl.load(row_ids + first + lanes, mask=is_row, other=0).to(tl.int64)
        if IS_ALIGNED:
            num_out, column = tl.multiple_of(num_out, 16), tl.multiple_of(column, 16)
        entry = table + (slot * num_targets + target) * ENTRY
        rank = tl.load(entry).to(tl.int32)
        # the number of each: all or none
        num_scales = tl.where(tl.load(entry + 3) != 0, num_out, 0)
        num_biases = tl.where(tl.load(entry + 4) != 0, num_out, 0)
        num_bases = tl.where(tl.load(parts + part * PART + 3) != 0, num_scales, 0)
        if (count > 0) & (rank + num_scales + num_biases > 0):
            end = tl.minimum(begin + length, tl.cdiv(num_out, WIDTH))
            a, b = _pointer(entry, 1, element), _pointer(entry, 2, element)
            scales, biases = _pointer(entry, 3, tl.float32), _pointer(entry, 4, tl.float32)
            bases = _pointer(parts + part * PART, 3, tl.float32)
            outputs = begin * WIDTH + tl.arange(0, WIDTH)
            results = y + rows[:, None] * y_stride + column
            weights = _load_b(b, factors, outputs, rank, num_out, IS_WHOLE)
            before = _load_results(results, outputs, is_row, num_out, IS_WHOLE)
            if IS_EMBEDDING:
                row = tl.load(h + rows, mask=is_row, other=0)
                value = _factors_of_ids(a, row, is_row, factors, rank)
            else:
                row = (rows * num_parts + part) * room
                value = _sum_splits(h, row, is_row, factors, rank, RANKS, SPLITS, ROWS)
            # One stage: with more, some versions of ptxas mistranslate a rounding inside a pipelined loop on Hopper.
            for block in tl.range(begin, end, num_stages=1):
                # the last block is read again
                following = tl.minimum(block + 1, end - 1) * WIDTH + tl.arange(0, WIDTH)
                next_weights = _load_b(b, factors, following, rank, num_out, IS_WHOLE)
                next_before = _load_results(results, following, is_row, num_out, IS_WHOLE)
                delta = _multiply_factors(value, weights, tl.zeros((ROWS, WIDTH), tl.float32), WIDENS)
                for start in tl.range(RANKS, rank, RANKS, num_stages=1):
                    others = start + factors
                    if IS_EMBEDDING:
                        more = _factors_of_ids(a, row, is_row, others, rank)
                    else:
                        more = _sum_splits(h, row, is_row, others, rank, RANKS, SPLITS, ROWS)
                    more_weights = _load_b(b, others, outputs, rank, num_out, IS_WHOLE)
                    delta = _multiply_factors(more, more_weights, delta, WIDENS)
                after = before.to(tl.float32) + delta
                if num_scales + num_biases > 0:
                    scale = tl.load(scales + outputs, mask=outputs < num_scales, other=1.0)
                    bias = tl.load(biases + outputs, mask=outputs < num_biases, other=0.0)
                    base = tl.load(bases + outputs, mask=outputs < num_bases, other=0.0)
                    after = scale[None, :] * (before.to(tl.float32) - base[None, :] + delta)
                    after = after + base[None, :] + bias[None, :]
                mask = is_row[:, None]
                if not IS_WHOLE:
                    mask = mask & (outputs < num_out)[None, :]
                tl.store(results + outputs[None, :], rounded(after, element), mask=mask)
                weights, before, outputs = next_weights, next_before, following


@triton.jit
def _members(compositions, table, index, target, num_targets, RANKS: tl.constexpr):
    """Of the adapters of a sum, [MOST_PARTS]: their entries' places in the table, ranks, and the ends of their tiles
    among those of the sum, at most MOST_RANK // RANKS.
    """
    places = tl.arange(0, MOST_PARTS)
    is_member = places < tl.load(compositions + index * SUM)
    slots = tl.load(compositions + index * SUM + 2 + places, mask=is_member, other=0)
    entries = (slots * num_targets + target) * ENTRY
    ranks = tl.load(table + entries, mask=is_member, other=0).to(tl.int32)
    return entries, ranks, tl.minimum(tl.cumsum(tl.cdiv(ranks, RANKS), 0), MOST_TILES)


@triton.jit
def _member(values, place):
    """The value of one adapter of a sum."""
    return tl.sum(tl.where(tl.arange(0, MOST_PARTS) == place, values, 0), 0)


@triton.jit(do_not_specialize=["num_slots", "num_targets", "num_tasks", "num_parts"])
def shrink_sums(
    x, h, tasks, row_ids, parts, table, compositions, num_slots, num_in, x_stride, num_targets, num_tasks, num_parts,
    room,
    ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """As `shrink`, for the rows of sums: the factors of their adapters, one after the other, in whole tiles."""
    lanes = tl.arange(0, ROWS)
    num_items = _num_used(tasks, num_tasks) * num_parts * SPLITS
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        task, part, piece = item // SPLITS // num_parts, item // SPLITS % num_parts, item % SPLITS
        slot, first, count = tl.load(tasks + task * 3), tl.load(tasks + task * 3 + 1), tl.load(tasks + task * 3 + 2)
        if (count > 0) & (slot >= num_slots):
            target = tl.load(parts + part * PART)
            rows = tl.load(row_ids + first + lanes, mask=lanes < count, other=0).to(tl.int64)
            entries, ranks, ends = _members(compositions, table, slot - num_slots, target, num_targets, RANKS)
            num_tiles = tl.max(ends, 0)
            splits = _splits(num_tiles * RANKS, RANKS, SPLITS)
            span = tl.cdiv(tl.cdiv(num_in, DEPTH), splits) * DEPTH
            row = (rows * num_parts + part) * room
            for at in range(piece, splits * num_tiles, SPLITS):
                split, tile = at % splits, at // splits
                place = h + row[:, None] + split * num_tiles * RANKS + tile * RANKS + tl.arange(0, RANKS)[None, :]
                member = tl.sum((ends <= tile).to(tl.int32), 0)
                factors = (tile - tl.max(tl.where(ends <= tile, ends, 0), 0)) * RANKS + tl.arange(0, RANKS)
                a = _pointer(table + _member(entries, member), 1, x.dtype.element_ty)
                sums = multiply_rows(
                    x + rows[:, None] * x_stride, a + factors[None, :] * num_in, 1, split * span,
                    tl.minimum(num_in, (split + 1) * span), num_in, lanes < count, factors < _member(ranks, member),
                    ROWS, RANKS, DEPTH, WIDENS,
                )  # fmt: skip
                tl.store(place, sums, mask=(lanes < count)[:, None])


@triton.jit
def _factors_of_member(
    h, a, row, is_row, first, tile, num_tiles, rank,
    IS_EMBEDDING: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """[ROWS, RANKS] float32 of one tile of an adapter whose tiles begin at `first` among `num_tiles` of a sum."""
    factors = tl.arange(0, RANKS)
    if IS_EMBEDDING:
        value = _factors_of_ids(a, row, is_row, tile * RANKS + factors, rank)
    else:
        value = _sum_splits(h, row, is_row, (first + tile) * RANKS + factors, num_tiles * RANKS, RANKS, SPLITS, ROWS)
    return value


@triton.jit
def _sum_of_adapters(
    h, row, is_row, composition, table, target, num_targets, outputs, num_out,
    element: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    IS_WHOLE: tl.constexpr, IS_EMBEDDING: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """[ROWS, WIDTH] float32: what a sum adds to `outputs`, tile by tile, and within a tile adapter by adapter. row:
    [ROWS] where h begins, or token ids.
    """
    factors = tl.arange(0, RANKS)
    num_members = tl.load(composition)
    shares_factors = tl.load(composition + 1) != 0
    slots = composition + 2
    shrinks = (slots + MOST_PARTS).to(tl.pointer_type(tl.float32))
    expands = shrinks + MOST_PARTS
    num_tiles, most = 0, 0
    for member in range(num_members):
        tiles = tl.cdiv(tl.load(table + (tl.load(slots + member) * num_targets + target) * ENTRY).to(tl.int32), RANKS)
        num_tiles += tiles
        most = tl.maximum(most, tiles)
    num_tiles = tl.minimum(num_tiles, MOST_TILES)
    delta = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in range(most):
        shared = tl.zeros((ROWS, RANKS), tl.float32)
        if shares_factors:
            first = 0
            for member in range(num_members):
                entry = table + (tl.load(slots + member) * num_targets + target) * ENTRY
                rank = tl.load(entry).to(tl.int32)
                if tile * RANKS < rank:
                    value = _factors_of_member(
                        h, _pointer(entry, 1, element), row, is_row, first, tile, num_tiles, rank,
                        IS_EMBEDDING, RANKS, SPLITS, ROWS,
                    )  # fmt: skip
                    shared += tl.load(shrinks + member) * value
                first += tl.cdiv(rank, RANKS)
        first = 0
        for member in range(num_members):
            entry = table + (tl.load(slots + member) * num_targets + target) * ENTRY
            rank = tl.load(entry).to(tl.int32)
            if tile * RANKS < rank:
                value = shared
                if not shares_factors:
                    value = tl.load(shrinks + member) * _factors_of_member(
                        h, _pointer(entry, 1, element), row, is_row, first, tile, num_tiles, rank,
                        IS_EMBEDDING, RANKS, SPLITS, ROWS,
                    )  # fmt: skip
                weights = _load_b(
                    _pointer(entry, 2, element), tile * RANKS + factors, outputs, rank, num_out, IS_WHOLE
                )  # fmt: skip
                delta = _multiply_factors(tl.load(expands + member) * value, weights, delta, WIDENS)
            first += tl.cdiv(rank, RANKS)
    return delta


@triton.jit(do_not_specialize=["num_slots", "num_targets", "num_tasks", "num_parts"])
def expand_sums(
    h, y, tasks, row_ids, parts, table, compositions, num_slots, y_stride, num_targets, num_tasks, num_parts, room,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    IS_WHOLE: tl.constexpr, IS_EMBEDDING: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """As `expand`, for the rows of sums. For embeddings `h` holds the [rows] token ids."""
    element: tl.constexpr = y.dtype.element_ty
    lanes = tl.arange(0, ROWS)
    used = _num_used(tasks, num_tasks)
    length, ends = _share(parts, num_parts, used, WIDTH, PARTS)
    num_shares = tl.max(ends, 0)
    for item in tl.range(tl.program_id(0), used * num_shares, tl.num_programs(0), num_stages=1):
        task, place = item // num_shares, item % num_shares
        part = tl.sum((ends <= place).to(tl.int32), 0)
        begin = (place - tl.max(tl.where(ends <= place, ends, 0), 0)) * length
        slot, first, count = tl.load(tasks + task * 3), tl.load(tasks + task * 3 + 1), tl.load(tasks + task * 3 + 2)
        if (count > 0) & (slot >= num_slots):
            target = tl.load(parts + part * PART)
            num_out = tl.load(parts + part * PART + 1).to(tl.int32)
            column = tl.load(parts + part * PART + 2).to(tl.int32)
            is_row = lanes < count
            rows = tl.load(row_ids + first + lanes, mask=is_row, other=0).to(tl.int64)
            if IS_EMBEDDING:
                begins = tl.load(h + rows, mask=is_row, other=0)
            else:
                begins = (rows * num_parts + part) * room
            for block in tl.range(begin, tl.minimum(begin + length, tl.cdiv(num_out, WIDTH)), num_stages=1):
                columns = block * WIDTH + tl.arange(0, WIDTH)
                delta = _sum_of_adapters(
                    h, begins, is_row, compositions + (slot - num_slots) * SUM, table, target, num_targets, columns,
                    num_out, element, ROWS, RANKS, WIDTH, SPLITS, IS_WHOLE, IS_EMBEDDING, WIDENS,
                )  # fmt: skip
                places = y + rows[:, None] * y_stride + column + columns[None, :]
                is_place = is_row[:, None] & (columns < num_out)[None, :]
                before = tl.load(places, mask=is_place, other=0.0).to(tl.float32)
                tl.store(places, rounded(before + delta, element), mask=is_place)


def room_of(splits: int) -> int:
    """Elements of h for each row and part."""
    return max(MOST_RANK, RANKS * splits)


@operator("shrink_rows", mutates_args=())
def shrink_rows(
    x: torch.Tensor, tasks: torch.Tensor, row_ids: torch.Tensor, parts: torch.Tensor, table: torch.Tensor,
    num_programs: int, tiles: list[int],
) -> torch.Tensor:  # fmt: skip
    """Returns h for `expand_rows`, [rows, parts, room] float32, defined for the tasks' rows.

    x: [rows, in]; tasks, row_ids: of RowGroups; parts: [parts, PART]; table: [slots, targets, ENTRY]; num_programs: at
    most; tiles: DEPTH, SPLITS, warps and stages.
    """
    depth, splits, warps, stages = tiles
    num_parts, num_items = parts.shape[0], tasks.shape[0] * parts.shape[0] * splits
    h = x.new_empty((x.shape[0], num_parts, room_of(splits)), dtype=torch.float32)
    shrink[(max(1, min(num_programs, num_items)),)](
        x, h, tasks, row_ids, parts, table, x.shape[1], x.stride(0), table.shape[1], tasks.shape[0], num_parts,
        h.shape[2], ROWS=TASK_ROWS, RANKS=RANKS, DEPTH=depth, SPLITS=splits, WIDENS=WIDENS, enable_fp_fusion=True,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return h


@shrink_rows.register_fake
def _(
    x: torch.Tensor, _tasks: object, _row_ids: object, parts: torch.Tensor, _table: object, _programs: int,
    tiles: list[int],
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], parts.shape[0], room_of(tiles[1])), dtype=torch.float32)


@operator("expand_rows", mutates_args=("y",))
def expand_rows(
    h: torch.Tensor, y: torch.Tensor, tasks: torch.Tensor, row_ids: torch.Tensor, parts: torch.Tensor,
    table: torch.Tensor, num_outs: list[int], num_programs: int, is_aligned: bool, splits: int, tiles: list[int],
) -> None:  # fmt: skip
    """y: [rows, out of all parts], changed in place. h: of `shrink_rows` with as many `splits`, or [rows] token ids for
    embeddings; num_outs: outputs of each part; tiles: WIDTH, warps and stages; the rest as there.
    """
    width, warps, stages = tiles
    num_parts, num_blocks, is_embedding = parts.shape[0], triton.cdiv(max(num_outs), width), h.dim() == 1
    is_whole = all(num_out % width == 0 for num_out in num_outs)
    expand[(max(1, min(num_programs, tasks.shape[0] * num_parts * num_blocks)),)](
        h, y, tasks, row_ids, parts, table, y.stride(0), table.shape[1], tasks.shape[0], num_parts,
        0 if is_embedding else h.shape[2], ROWS=TASK_ROWS, RANKS=RANKS, WIDTH=width, SPLITS=splits,
        PARTS=triton.next_power_of_2(num_parts), IS_ALIGNED=is_aligned, IS_WHOLE=is_whole,
        IS_EMBEDDING=is_embedding, WIDENS=WIDENS, enable_fp_fusion=True, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@expand_rows.register_fake
def _(*_args: object) -> None:
    return None


@operator("shrink_sums_rows", mutates_args=())
def shrink_sums_rows(
    x: torch.Tensor, tasks: torch.Tensor, row_ids: torch.Tensor, parts: torch.Tensor, table: torch.Tensor,
    compositions: torch.Tensor, num_programs: int, tiles: list[int],
) -> torch.Tensor:  # fmt: skip
    """As `shrink_rows`, for the rows of sums. compositions: [sums, SUM] int32, the last slots of the table."""
    depth, splits, warps, stages = tiles
    num_parts, num_items = parts.shape[0], tasks.shape[0] * parts.shape[0] * splits
    h = x.new_empty((x.shape[0], num_parts, room_of(splits)), dtype=torch.float32)
    shrink_sums[(max(1, min(num_programs, num_items)),)](
        x, h, tasks, row_ids, parts, table, compositions, table.shape[0] - compositions.shape[0], x.shape[1],
        x.stride(0), table.shape[1], tasks.shape[0], num_parts, h.shape[2], ROWS=TASK_ROWS, RANKS=RANKS, DEPTH=depth,
        SPLITS=splits, WIDENS=WIDENS, enable_fp_fusion=True, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return h


@shrink_sums_rows.register_fake
def _(
    x: torch.Tensor, _tasks: object, _row_ids: object, parts: torch.Tensor, _table: object, _compositions: object,
    _programs: int, tiles: list[int],
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], parts.shape[0], room_of(tiles[1])), dtype=torch.float32)


@operator("expand_sums_rows", mutates_args=("y",))
def expand_sums_rows(
    h: torch.Tensor, y: torch.Tensor, tasks: torch.Tensor, row_ids: torch.Tensor, parts: torch.Tensor,
    table: torch.Tensor, compositions: torch.Tensor, num_outs: list[int], num_programs: int, splits: int,
    tiles: list[int],
) -> None:  # fmt: skip
    """As `expand_rows`, for the rows of sums. h: of `shrink_sums_rows`."""
    width, warps, stages = tiles
    num_parts, num_blocks, is_embedding = parts.shape[0], triton.cdiv(max(num_outs), width), h.dim() == 1
    is_whole = all(num_out % width == 0 for num_out in num_outs)
    expand_sums[(max(1, min(num_programs, tasks.shape[0] * num_parts * num_blocks)),)](
        h, y, tasks, row_ids, parts, table, compositions, table.shape[0] - compositions.shape[0], y.stride(0),
        table.shape[1], tasks.shape[0], num_parts, 0 if is_embedding else h.shape[2], ROWS=TASK_ROWS, RANKS=RANKS,
        WIDTH=width, SPLITS=splits, PARTS=triton.next_power_of_2(num_parts), IS_WHOLE=is_whole,
        IS_EMBEDDING=is_embedding, WIDENS=WIDENS, enable_fp_fusion=True, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@expand_sums_rows.register_fake
def _(*_args: object) -> None:
    return None
