"""Products of few rows with a weight in 8 or 4 bits, in Triton: `y = x Wᵀ + bias`, with a scale for each output or for
each group of inputs.

A weight is stored as words of 16 bits, each of which holds two integers of 8 bits or four of 4, a slice of SLICE inputs
apart. So the words of neighbouring inputs, which a matrix unit takes in pairs, are decoded two at a time: a mask and a
bias make both the bits of numbers in the dtype of x. A pass takes one block of inputs: a tile of words and as many
slices of x.

Bits: a row takes its terms in an order that depends on the weight's shape alone: blocks of a part of the inputs in
order, then the parts in order, whichever program comes last.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

from lorikeet.shard.model.kernels.products_triton import multiply_add
from lorikeet.shard.model.kernels.triton import rounded

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter has no instructions of the device, and cannot multiply bfloat16."""


@triton.jit
def decoded(words, PART: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr, element: tl.constexpr):
    """words: int16. The integers in slice PART less MIDDLE, exact in `element`."""
    if INTERPRETED:
        if BITS == 4:
            values = (((words >> (4 * PART)) & 15).to(tl.float32) - MIDDLE).to(element)
        else:
            values = ((words << 8) >> 8 if PART == 0 else words >> 8).to(tl.float32).to(element)
    elif BITS == 8 and element == tl.bfloat16:
        # the sign has the place of the lowest bit of the exponent: 128 or 256, which is subtracted
        values = tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t, high, low, minus;
            shr.b32 t, $1, {8 * PART};
            lop3.b32 high, t, 0x00800080, 0x43004300, 0xEA;
            lop3.b32 low, t, 0x007F007F, 0x43004300, 0xEA;
            mov.b32 minus, 0xBF80BF80;
            fma.rn.bf16x2 $0, high, minus, low; }}""",
            "=r,r", [words], tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    # `lop3` makes the bits of 2^n plus the integer, n being 7 (bfloat16) or 10 (float16), and inverts the sign of 8
    # bits; `fma` subtracts, without rounding
    elif element == tl.bfloat16:
        values = tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t, one, less;
            shr.b32 t, $1, {4 * PART};
            lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, {0xC300C300 + MIDDLE * 0x10001};
            fma.rn.bf16x2 $0, t, one, less; }}""",
            "=r,r", [words], tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        values = tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t, one, less;
            shr.b32 t, $1, {BITS * PART};
            lop3.b32 t, t, {"0x000F000F, 0x64006400" if BITS == 4 else "0x00FF00FF, 0x64806480"}, 0x6A;
            mov.b32 one, 0x3C003C00;
            mov.b32 less, {0xE400E400 + (MIDDLE if BITS == 4 else 128) * 0x10001};
            fma.rn.f16x2 $0, t, one, less; }}""",
            "=r,r", [words], tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return values


@triton.jit
def scaled(values, scale, element: tl.constexpr):
    """values, scale: of `element`. Their product, rounded once."""
    if INTERPRETED:
        product = rounded(values.to(tl.float32) * scale.to(tl.float32), element)
    elif element == tl.bfloat16:
        product = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r", [values, scale], tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        product = values * scale
    return product


@triton.jit
def weights_of(
    pairs, scale, minimum, PART: tl.constexpr, BITS: tl.constexpr, IS_GROUPED: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
    IS_EXACT: tl.constexpr, element: tl.constexpr,
):  # fmt: skip
    """pairs: [outputs, inputs] words; scale, minimum: [outputs, 1] float32 of slice PART. The weights of that slice in
    `element`, rounded once; without IS_GROUPED before their scale, exact.
    """
    values = decoded(pairs, PART, BITS, 8 if BITS == 4 and not HAS_MINIMUMS else 0, element)
    if IS_GROUPED:
        if IS_EXACT and not HAS_MINIMUMS:
            values = scaled(values, tl.broadcast_to(scale.to(element), values.shape), element)
        else:
            wide = values.to(tl.float32) * scale
            values = rounded(wide + minimum if HAS_MINIMUMS else wide, element)
    return values


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_splits"])
def multiply_integers(
    x, words, scales, minimums, bias, y, partials, counters, num_rows, num_in, num_out, num_blocks, num_splits,
    x_stride, HAS_BIAS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, IS_EXACT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """x: [rows, in]; words: [blocks, out, SLICE] int16; scales: [out] without GROUP, or [groups, out], as minimums;
    RUN: slices of a block that follow one another in one group; bias: [out]; y: [rows, out] contiguous; partials:
    [splits, rows, out] float32; counters: [row tiles * tiles of outputs] zeros, which are zeros again afterwards.
    """
    tile, split = tl.program_id(0), tl.program_id(2)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    # rows and outputs beyond the last are the last once more, and are not written
    held_rows, held = tl.minimum(rows, num_rows - 1).to(tl.int64), tl.minimum(outputs, num_out - 1)
    element: tl.constexpr = x.dtype.element_ty
    SLICES: tl.constexpr = 16 // BITS
    offsets = tl.arange(0, SLICE)
    per_split = tl.cdiv(num_blocks, num_splits)
    start = split * per_split
    stop = tl.minimum(start + per_split, num_blocks)
    block_stride = tl.cast(num_out, tl.int64) * SLICE
    left = words + held[:, None].to(tl.int64) * SLICE + offsets[None, :]
    right = x + held_rows[None, :] * x_stride + offsets[:, None]
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for block in range(start, stop):
        pairs = tl.load(left + block * block_stride)
        scale, minimum = 0.0, 0.0
        for part in tl.static_range(SLICES):
            first = (block * SLICES + part) * SLICE
            if GROUP and part % RUN == 0:
                place = first // GROUP * num_out + held
                scale = tl.load(scales + place)[:, None]
                if HAS_MINIMUMS:
                    minimum = tl.load(minimums + place)[:, None]
            values = weights_of(pairs, scale, minimum, part, BITS, GROUP > 0, HAS_MINIMUMS, IS_EXACT, element)
            terms = tl.load(right + first, mask=(first + offsets < num_in)[:, None], other=0.0)
            sums = multiply_add(values, terms, sums, INTERPRETED)
    is_output, is_row = outputs < num_out, rows < num_rows
    mask = is_output[:, None] & is_row[None, :]
    place = rows[None, :].to(tl.int64) * num_out + outputs[:, None]
    if num_splits > 1:
        size = num_rows.to(tl.int64) * num_out
        tl.store(partials + split * size + place, sums, mask=mask)
        tl.debug_barrier()  # all threads have written before one announces it
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tile
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != num_splits - 1:
            return
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for other in range(num_splits):
            sums += tl.load(partials + other * size + place, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(counter, 0)
    if not GROUP:
        sums *= tl.load(scales + held)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + held).to(tl.float32)[:, None]
    tl.store(y + place, rounded(sums, element), mask=mask)


@triton.jit(do_not_specialize=["num_blocks", "first_output"])
def dequantise_integers(
    words, scales, minimums, y, first_output, num_outputs, num_in, num_out, BITS: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, HAS_MINIMUMS: tl.constexpr, IS_EXACT: tl.constexpr, OUTPUTS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """y: [outputs, in] contiguous: the weights of `num_outputs` outputs from `first_output` on; words, scales and
    minimums: as in multiply_integers.
    """
    lanes = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    block = tl.program_id(1)
    is_output = lanes < num_outputs
    held = first_output + tl.minimum(lanes, num_outputs - 1)
    element: tl.constexpr = y.dtype.element_ty
    SLICES: tl.constexpr = 16 // BITS
    offsets = tl.arange(0, SLICE)
    pairs = tl.load(words + (block.to(tl.int64) * num_out + held)[:, None] * SLICE + offsets[None, :])
    scale, minimum = tl.load(scales + held)[:, None] if not GROUP else 0.0, 0.0
    for part in tl.static_range(SLICES):
        first = (block * SLICES + part) * SLICE
        if GROUP and part % RUN == 0:
            place = first // GROUP * num_out + held
            scale = tl.load(scales + place)[:, None]
            if HAS_MINIMUMS:
                minimum = tl.load(minimums + place)[:, None]
        values = weights_of(pairs, scale, minimum, part, BITS, True, HAS_MINIMUMS, IS_EXACT, element)
        inputs = first + offsets
        place = y + lanes[:, None].to(tl.int64) * num_in + inputs[None, :]
        tl.store(place, values, mask=is_output[:, None] & (inputs < num_in)[None, :])
