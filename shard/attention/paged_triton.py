"""Attention over paged K and V in Triton: `store` writes a step's K and V, `attend` reads them.

The rows of a tile are the query heads of one K and V head, token by token. Keys are divided into spans of a fixed
number of absolute positions. The results of spans (online softmax, Dao 2023) are merged in the order of positions, with
the same operations either by the program that computes all spans of a tile or, if programs share them, by the last of
these to end.
Bits: a row's result is one sequence of operations, determined by the layer, the row's position and the keys it sees.
Invisible keys leave its sums unchanged, tiles have one shape per dtype and head size, and no sum is atomic. So a row
has equal bits in any batch, in any chunks, on pages of any size and however spans are shared, provided that a matrix
unit computes all rows of a tile alike.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' source, annotations included)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lorikeet.shard.attention.spans import HEADER, RECORD, SHORT_SPANS, short_span
from lorikeet.shard.system import gpu
from lorikeet.shard.system.operators import operator

MOST_DIM = 256
"""The largest head size."""
TENSOR_CORES = (8, 0)
"""Compute capability from which on Triton multiplies by matrix units."""
SMALL_MEMORY = ((8, 6), (8, 9), (12, 0))
"""Those with 100 KB of shared memory on a multiprocessor: two programs of the larger tile do not fit."""
LARGE_MEMORY = (9, 0)
"""From which on three buffers of K and V fit for two programs."""
LOG2E = 1.4426950408889634
_NOTHING = tl.constexpr(float("-inf"))
_HEADER, _RECORD = tl.constexpr(HEADER), tl.constexpr(RECORD)
_FOLD_ROWS = tl.constexpr(8)
"""Rows whose spans are merged at once: few registers."""
_LARGEST_FP8 = tl.constexpr(448.0)


@triton.jit
def _rounded(x):
    """x rounded to float8_e4m3fn, in float32."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)


@triton.jit
def _put(x, pool, scales, slot, heads, row_stride, head_stride, row, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
         WIDTH: tl.constexpr, HAS_SCALES: tl.constexpr, WIDENS: tl.constexpr):  # fmt: skip
    offsets = tl.arange(0, WIDTH)
    mask = (heads < KV_HEADS)[:, None] & (offsets < DIM)[None, :]
    values = tl.load(x + row * row_stride + heads[:, None] * head_stride + offsets[None, :], mask=mask, other=0.0)
    place = pool + (slot * KV_HEADS + heads[:, None]) * DIM + offsets[None, :]
    if HAS_SCALES:
        values = values.to(tl.float32)
        largest = tl.max(tl.abs(values), 1)
        scale = tl.where(largest > 0, tl.div_rn(largest, tl.full(largest.shape, _LARGEST_FP8, tl.float32)), 1.0)
        values = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
        if WIDENS:
            values = _rounded(values)
        tl.store(scales + slot * KV_HEADS + heads, scale, mask=heads < KV_HEADS)
    tl.store(place, values.to(pool.dtype.element_ty), mask=mask)


@triton.jit
def store(
    key, value, slots, keys, values, key_scales, value_scales,
    key_row, key_head, value_row, value_head,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, HAS_SCALES: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Write K and V of one row and HEADS heads to the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots + row)
    _put(key, keys, key_scales, slot, heads, key_row, key_head, row,
         KV_HEADS, KEY_DIM, KEY_WIDTH, HAS_SCALES, WIDENS)  # fmt: skip
    _put(value, values, value_scales, slot, heads, value_row, value_head, row,
         KV_HEADS, VALUE_DIM, VALUE_WIDTH, HAS_SCALES, WIDENS)  # fmt: skip


@triton.jit
def _dot(left, right, sums, WIDENS: tl.constexpr):
    if WIDENS:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def _merge(most, total, sums, span_most, span_total, span_sums):
    """Merge the result of the next span. Explicit fused operations leave no rounding to the compiler."""
    both = tl.maximum(most, span_most)
    origin = tl.where(both == _NOTHING, 0.0, both)
    before, after = tl.exp2(most - origin), tl.exp2(span_most - origin)
    total = tl.fma(total, before, span_total * after)
    sums = tl.fma(sums, tl.broadcast_to(before[:, None], sums.shape), span_sums * after[:, None])
    return both, total, sums


@triton.jit
def _divide(most, total, sums, sinks, heads, valid, HAS_SINKS: tl.constexpr):
    """The weighted mean; a sink has a weight and no value."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=valid, other=0.0) * 1.4426950408889634
        both = tl.maximum(most, sink)
        before = tl.exp2(most - both)
        total = tl.fma(total, before, tl.exp2(sink - both))
        sums = sums * before[:, None]
    return sums / tl.where(valid, total, 1.0)[:, None]


@triton.jit
def _fold(
    partials, stats, sinks, output, partial, num_spans, first_row, first, count, kv_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge a tile's results of single spans in the order of positions; AHEAD of them are read in advance. They are
    read past the first cache, which does not see what other multiprocessors write.
    """
    dims = tl.arange(0, VALUE_WIDTH)
    for block in range(0, count, _FOLD_ROWS):
        lanes = block + tl.arange(0, _FOLD_ROWS)
        valid = lanes < count
        spans = tl.where(valid, num_spans, 0)
        heads = kv_head * GROUP + (first + lanes) % GROUP
        rows = (first_row + (first + lanes) // GROUP).to(tl.int64)
        most = tl.full((_FOLD_ROWS,), _NOTHING, tl.float32)
        total = tl.zeros((_FOLD_ROWS,), tl.float32)
        sums = tl.zeros((_FOLD_ROWS, VALUE_WIDTH), tl.float32)
        for begin in range(0, num_spans, AHEAD):
            for ahead in tl.static_range(AHEAD):
                mask = spans > begin + ahead
                place = (partial + (begin + ahead) * count + lanes).to(tl.int64) * KV_HEADS + kv_head
                span_most = tl.load(stats + place * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
                span_total = tl.load(stats + place * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
                offsets = place[:, None] * VALUE_WIDTH + dims[None, :]
                span_sums = tl.load(partials + offsets, mask=mask[:, None], other=0.0, cache_modifier=".cg")
                most, total, sums = _merge(most, total, sums, span_most, span_total, span_sums)
        mean = _divide(most, total, sums, sinks, heads, valid, HAS_SINKS)
        offsets = (rows * (KV_HEADS * GROUP) + heads)[:, None] * VALUE_DIM + dims[None, :]
        mask = valid[:, None] & (dims < VALUE_DIM)[None, :]
        tl.store(output + offsets, mean.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _start_of(span, SPAN: tl.constexpr, SHORT: tl.constexpr, NUM_SHORT: tl.constexpr):
    """The first position of a span, see spans.spans_at."""
    return tl.minimum(span, NUM_SHORT) * SHORT + tl.maximum(span - NUM_SHORT, 0) * SPAN


@triton.jit(do_not_specialize=["kind"])
def attend(
    query, keys, values, key_scales, value_scales, sinks, slopes, tables, partials, stats, arrived, output,
    kind, query_row, query_head, scale, cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr, SHORT: tl.constexpr,
    NUM_SHORT: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    WIDENS: tl.constexpr,
):  # fmt: skip
    """Programs iterate over the items of their kind, for every K and V head. Scores are exponents of two: `scale`
    includes log2(e), or with a cap the factor of its tanh, which is computed by exp2.
    """
    items, num_items = tables + tl.load(tables + kind * _HEADER), tl.load(tables + kind * _HEADER + 1)
    folds = tables + tl.load(tables + kind * _HEADER + 2)
    lanes, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    key_dims, value_dims = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    for work in range(tl.program_id(0), num_items * KV_HEADS, tl.num_programs(0)):
        item = items + (work // KV_HEADS) * _RECORD
        kv_head = work % KV_HEADS
        first_row, first, count, start = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        pages, first_span, end_span = tables + tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
        fold = tl.load(item + 7)
        valid = lanes < count
        tokens = (first + lanes) // GROUP
        heads = kv_head * GROUP + (first + lanes) % GROUP
        positions = start + tokens
        rows = (first_row + tokens).to(tl.int64)
        last = start + (first + count - 1) // GROUP
        lowest = 0
        if WINDOW > 0:
            lowest = (tl.maximum(0, start + first // GROUP - WINDOW + 1) // COLUMNS) * COLUMNS
        queries = tl.load(
            query + rows[:, None] * query_row + heads[:, None] * query_head + key_dims[None, :],
            mask=valid[:, None] & (key_dims < KEY_DIM)[None, :],
            other=0.0,
        )
        if HAS_SLOPES:
            slope = tl.load(slopes + heads, mask=valid, other=0.0) * 1.4426950408889634

        most = tl.full((ROWS,), _NOTHING, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
        span_most = tl.full((ROWS,), _NOTHING, tl.float32)
        span_total = tl.zeros((ROWS,), tl.float32)
        span_sums = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
        span_end = _start_of(first_span + 1, SPAN, SHORT, NUM_SHORT)
        stop = tl.minimum(_start_of(end_span, SPAN, SHORT, NUM_SHORT), last + 1)
        # one loop over the keys of all spans, so that the copies of the next tile go on at the end of a span
        for at in range(tl.maximum(_start_of(first_span, SPAN, SHORT, NUM_SHORT), lowest), stop, COLUMNS):
            page = tl.load(pages + at // PAGE).to(tl.int64)
            slots = page * PAGE + at % PAGE + columns
            seen = at + columns
            is_there = seen <= last
            found = tl.load(
                keys + (slots[:, None] * KV_HEADS + kv_head) * KEY_DIM + key_dims[None, :],
                mask=is_there[:, None] & (key_dims < KEY_DIM)[None, :],
                other=0.0,
            )
            scores = _dot(queries, tl.trans(found.to(queries.dtype)), tl.zeros((ROWS, COLUMNS), tl.float32), WIDENS)
            scores *= scale
            if HAS_SCALES:
                scores *= tl.load(key_scales + slots * KV_HEADS + kv_head, mask=is_there, other=0.0)[None, :]
            if HAS_CAP:
                scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
            distance = positions[:, None] - seen[None, :]
            if HAS_SLOPES:
                scores -= slope[:, None] * distance.to(tl.float32)
            visible = distance >= 0
            if WINDOW > 0:
                visible = visible & (distance < WINDOW)
            scores = tl.where(visible, scores, _NOTHING)

            both = tl.maximum(span_most, tl.max(scores, 1))
            origin = tl.where(both == _NOTHING, 0.0, both)
            before = tl.exp2(span_most - origin)
            weights = tl.exp2(scores - origin[:, None])
            span_most = both
            span_total = span_total * before + tl.sum(weights, 1)
            brought = tl.load(
                values + (slots[:, None] * KV_HEADS + kv_head) * VALUE_DIM + value_dims[None, :],
                mask=is_there[:, None] & (value_dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            if HAS_SCALES:
                weights *= tl.load(value_scales + slots * KV_HEADS + kv_head, mask=is_there, other=0.0)[None, :]
                if queries.dtype == tl.float16:  # a small scale is out of its range
                    weights, brought = weights.to(tl.bfloat16), brought.to(tl.bfloat16)
                else:
                    weights, brought = weights.to(queries.dtype), brought.to(queries.dtype)
            else:
                weights = weights.to(brought.dtype)
            span_sums = _dot(weights, brought, span_sums * before[:, None], WIDENS)
            if (at + COLUMNS >= span_end) | (at + COLUMNS >= stop):
                most, total, sums = _merge(most, total, sums, span_most, span_total, span_sums)
                span_most = tl.full((ROWS,), _NOTHING, tl.float32)
                span_total = tl.zeros((ROWS,), tl.float32)
                span_sums = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
                span_end += tl.where(span_end < NUM_SHORT * SHORT, SHORT, SPAN)

        if fold < 0:
            mean = _divide(most, total, sums, sinks, heads, valid, HAS_SINKS)
            place = (rows * (KV_HEADS * GROUP) + heads) * VALUE_DIM
            mask = valid[:, None] & (value_dims < VALUE_DIM)[None, :]
            tl.store(output + place[:, None] + value_dims[None, :], mean.to(output.dtype.element_ty), mask=mask)
        else:
            partial, begin, num_spans = (
                tl.load(folds + fold * _RECORD),
                tl.load(folds + fold * _RECORD + 1),
                tl.load(folds + fold * _RECORD + 2),
            )
            place = (partial + (first_span - begin) * count + lanes).to(tl.int64) * KV_HEADS + kv_head
            tl.store(partials + place[:, None] * VALUE_WIDTH + value_dims[None, :], sums, mask=valid[:, None])
            tl.store(stats + place * 2, most, mask=valid)
            tl.store(stats + place * 2 + 1, total, mask=valid)
            tl.debug_barrier()  # all threads have written before one announces it
            counter = arrived + fold * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_spans - 1:
                tl.store(counter, 0)
                _fold(partials, stats, sinks, output, partial, num_spans, first_row, first, count, kv_head,
                      KV_HEADS, GROUP, VALUE_DIM, VALUE_WIDTH, HAS_SINKS, 8)  # fmt: skip


_WIDENS = not isinstance(attend, triton.JITFunction)
"""Triton's interpreter cannot multiply bfloat16, and rounds to eight bits wrongly if the exponent changes."""


def width_of(dim: int) -> int:
    """Elements of a head in a tile."""
    return max(16, triton.next_power_of_2(dim))


@dataclass(frozen=True)
class AttentionTile:
    """The shape of a tile and its compiler options: one for each dtype and head size."""

    rows: int
    columns: int
    num_warps: int = 4
    num_stages: int = 2


def tile_of(dtype: torch.dtype, key_dim: int, value_dim: int, capability: tuple[int, int]) -> AttentionTile:
    """Every tile of a layer has this shape, on devices of this compute capability. docs/cuda-kernels.md has what each
    takes: none exceeds the shared memory of a multiprocessor, and registers suffice.
    """
    is_wide = max(key_dim, value_dim) > 128
    if dtype == torch.float32:  # matrix units do not support it
        return AttentionTile(rows=16, columns=32, num_warps=8 if is_wide else 4, num_stages=1)
    if capability < TENSOR_CORES:  # Triton does not use those of Turing
        return AttentionTile(rows=16, columns=32, num_warps=8 if is_wide else 4, num_stages=1)
    if is_wide:
        return AttentionTile(rows=64, columns=32, num_warps=8)
    if capability in SMALL_MEMORY:
        return AttentionTile(rows=64, columns=32, num_stages=3)
    # with five there are three buffers of K and V: with fewer the copies of the next tile begin late in an iteration
    return AttentionTile(rows=64, columns=64, num_stages=5 if capability >= LARGE_MEMORY else 3)


@operator("store_kv", mutates_args=("keys", "values", "key_scales", "value_scales"))
def store_kv(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    key_scales: torch.Tensor | None, value_scales: torch.Tensor | None,
) -> None:  # fmt: skip
    """key: [T, kv_heads, key_dim], value: [T, kv_heads, value_dim]; slots: [T] int64; keys: [N, P, kv_heads, key_dim],
    values: [N, P, kv_heads, value_dim]; scales: [N, P, kv_heads] float32 where these are float8_e4m3fn.
    """
    num_heads, key_dim, value_dim = key.shape[1], key.shape[2], value.shape[2]
    widths = width_of(key_dim), width_of(value_dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, 2048 // max(widths)))
    has_scales = key_scales is not None
    store[(key.shape[0], triton.cdiv(num_heads, heads))](
        key, value, slots, keys, values, key_scales if has_scales else keys, value_scales if has_scales else values,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV_HEADS=num_heads, HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_WIDTH=widths[0], VALUE_WIDTH=widths[1], HAS_SCALES=has_scales, WIDENS=_WIDENS, enable_fp_fusion=True,
    )  # fmt: skip


store_kv.register_fake(lambda *_: None)


@operator("attend_paged", mutates_args=("partials", "stats", "arrived", "output"))
def attend_paged(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None, sinks: torch.Tensor | None, slopes: torch.Tensor | None, tables: torch.Tensor,
    partials: torch.Tensor, stats: torch.Tensor, arrived: torch.Tensor, output: torch.Tensor, kind: int, window: int,
    span: int, num_programs: int, scaling: float, softcap: float,
) -> None:  # fmt: skip
    """query: [T, heads, key_dim], contiguous in the last dimension; keys, values, scales: as in `store_kv`;
    sinks, slopes: [heads] float32; tables: int32 of `spans.pack`; partials, stats: float32 results of single spans;
    arrived: int32 zeros, as many as tiles that programs share times kv_heads; output: [T, heads, value_dim]. window,
    softcap: 0 for none.
    """
    num_kv_heads, page_size = keys.shape[2], keys.shape[1]
    key_dim, value_dim = keys.shape[3], values.shape[3]
    tile = tile_of(query.dtype, key_dim, value_dim, gpu.capability(query.device))
    has_scales = key_scales is not None
    scale = scaling / softcap * 2 * LOG2E if softcap else scaling * LOG2E
    attend[(num_programs,)](
        query, keys, values, key_scales if has_scales else keys, value_scales if has_scales else values,
        output if sinks is None else sinks, output if slopes is None else slopes, tables, partials, stats, arrived,
        output, kind, query.stride(0), query.stride(1), scale, softcap * LOG2E,
        KV_HEADS=num_kv_heads, GROUP=query.shape[1] // num_kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_WIDTH=width_of(key_dim), VALUE_WIDTH=width_of(value_dim), PAGE=page_size, SPAN=span,
        SHORT=short_span(span), NUM_SHORT=SHORT_SPANS * span // short_span(span), WINDOW=window,
        ROWS=tile.rows, COLUMNS=tile.columns, HAS_SCALES=has_scales, HAS_CAP=softcap > 0,
        HAS_SINKS=sinks is not None, HAS_SLOPES=slopes is not None, WIDENS=_WIDENS, enable_fp_fusion=True,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


attend_paged.register_fake(lambda *_: None)
