"""Products of few rows with a weight in 8 or 4 bits, in Triton: `y = x Wᵀ + bias`, with a scale for each output or for
each group of inputs; and the dequantised weight, for products of many rows.

A weight is stored as words of 16 bits, each of which holds two integers of 8 bits or four of 4, without sign, a slice
of SLICE inputs apart. So neighbouring inputs, which a matrix unit takes in pairs, are decoded two at a time: a mask and
one multiplication and addition. A pass takes one block of inputs: a tile of words and as many slices of x.

Bits: a row takes its terms in an order that depends on the weight's shape alone: blocks of a part of the inputs in
order, then the parts in order, whichever program comes last. The shape of a tile changes no bits as long as a matrix
unit sums the inputs of an instruction alike for each number of rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lorikeet.shard.model.kernels.products_triton import multiply_add
from lorikeet.shard.model.kernels.triton import rounded
from lorikeet.shard.system import gpu
from lorikeet.shard.system.operators import operator

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter has no instructions of the device, and cannot multiply bfloat16."""


@triton.constexpr_function
def unit_of(has_scales, is_exact, element):
    """What `weights_of` multiplies weights by: a power of two, so that they are numbers of `element` on the way."""
    is_brain = element == tl.bfloat16
    if has_scales:
        return 2.0**-8 if is_exact and is_brain else 1.0
    return 2.0**-6 if is_brain else 2.0**-9


@triton.jit
def decoded(words, factor, offset, PART: tl.constexpr, BITS: tl.constexpr, element: tl.constexpr):
    """words: int16, [n, m]; factor, offset: of `element`, [n, 1]. `integer * LEAST * factor + offset`, rounded once,
    `integer` from slice PART, 16 times as large in odd slices of 4 bits, LEAST the least positive number of `element`.
    """
    # in the lowest two exponents a number is its bits times LEAST, so the integer is one already
    shift: tl.constexpr = BITS * PART // 8 * 8
    mask: tl.constexpr = 0xFF if BITS == 8 else 0x0F if PART % 2 == 0 else 0xF0
    factor, offset = tl.broadcast_to(factor, words.shape), tl.broadcast_to(offset, words.shape)
    if INTERPRETED:
        least: tl.constexpr = 2.0**-83 if element == tl.bfloat16 else 2.0**26  # times 2^50, a number of float32
        product = ((words >> shift) & mask).to(tl.float32) * (factor.to(tl.float32) * least) * 2.0**-50
        values = rounded(product + offset.to(tl.float32), element)
    elif element == tl.bfloat16:
        values = tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t;
            shr.b32 t, $1, {shift};
            and.b32 t, t, {mask * 0x10001};
            fma.rn.bf16x2 $0, t, $2, $3; }}""",
            "=r,r,r,r", [words, factor, offset], tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        values = tl.inline_asm_elementwise(
            f"""{{ .reg .b32 t;
            shr.b32 t, $1, {shift};
            and.b32 t, t, {mask * 0x10001};
            fma.rn.f16x2 $0, t, $2, $3; }}""",
            "=r,r,r,r", [words, factor, offset], tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return values


@triton.jit
def weights_of(
    words, scale, minimum, PART: tl.constexpr, BITS: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, IS_EXACT: tl.constexpr, element: tl.constexpr,
):  # fmt: skip
    """words: [outputs, inputs]; scale, minimum: [outputs, 1] float32. The weights of slice PART in `element`, rounded
    once, times `unit_of` the same constants; without HAS_SCALES the integers.
    """
    # of the number that is stored, which has no sign
    MIDDLE: tl.constexpr = 128.0 if BITS == 8 else 0.0 if HAS_MINIMUMS else 8.0
    HIGH: tl.constexpr = 0.0625 if BITS == 4 and PART % 2 == 1 else 1.0
    UNIT: tl.constexpr = unit_of(HAS_SCALES, IS_EXACT, element)
    if HAS_SCALES and IS_EXACT and element == tl.bfloat16:
        offset = minimum * UNIT if HAS_MINIMUMS else scale * (-MIDDLE * UNIT)
        values = decoded(words, (scale * (UNIT * 2.0**133 * HIGH)).to(element), offset.to(element), PART, BITS, element)
    else:
        FINE: tl.constexpr = 2.0**-6 if element == tl.bfloat16 else 2.0**-9
        LARGEST: tl.constexpr = 2.0**127 if element == tl.bfloat16 else 2.0**15
        factor = tl.full((1, 1), LARGEST * HIGH, tl.float32).to(element)
        values = decoded(words, factor, tl.full((1, 1), -MIDDLE * FINE, tl.float32).to(element), PART, BITS, element)
        if HAS_SCALES:
            fine_scale = tl.broadcast_to(scale * (1.0 / FINE), words.shape)
            if HAS_MINIMUMS:
                wide = tl.fma(values.to(tl.float32), fine_scale, tl.broadcast_to(minimum, words.shape))
            else:
                wide = values.to(tl.float32) * fine_scale
            values = rounded(wide, element)
    return values


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "num_splits"])
def multiply_integers(
    x, words, scales, minimums, bias, y, partials, counters, num_rows, num_in, num_out, num_blocks, num_splits,
    x_stride, HAS_BIAS: tl.constexpr, IS_PADDED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, HAS_MINIMUMS: tl.constexpr, IS_EXACT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """x: [rows, in]; words: [blocks, out, SLICE] int16; scales: [out] without GROUP, or [groups, out], as minimums;
    RUN: slices of a block that follow one another in one group; bias: [out]; y: [rows, out] contiguous; partials:
    [splits, rows, out] float32; counters: [row tiles * tiles of outputs] zeros, which are zeros again afterwards.
    """
    tile, split = tl.program_id(0), tl.program_id(2)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output, is_row = outputs < num_out, rows < num_rows
    held = tl.minimum(outputs, num_out - 1)
    element: tl.constexpr = x.dtype.element_ty
    SLICES: tl.constexpr = 16 // BITS
    offsets = tl.arange(0, SLICE)
    per_split = tl.cdiv(num_blocks, num_splits)
    start = split * per_split
    stop = tl.minimum(start + per_split, num_blocks)
    block_stride = tl.cast(num_out, tl.int64) * SLICE
    left = words + held[:, None].to(tl.int64) * SLICE + offsets[None, :]
    right = x + rows[None, :].to(tl.int64) * x_stride + offsets[:, None]
    is_term = tl.broadcast_to(is_row[None, :], (SLICE, ROWS))
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
            if IS_PADDED:
                is_term = is_row[None, :] & (first + offsets < num_in)[:, None]
            terms = tl.load(right + first, mask=is_term, other=0.0)
            sums = multiply_add(values, terms, sums, INTERPRETED)
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
    UNIT: tl.constexpr = unit_of(GROUP > 0, IS_EXACT, element)
    sums *= 1.0 / UNIT
    if not GROUP:
        sums *= tl.load(scales + held)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + held).to(tl.float32)[:, None]
    tl.store(y + place, rounded(sums, element), mask=mask)


@triton.jit(do_not_specialize=["first_output", "num_outputs"])
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
    UNIT: tl.constexpr = unit_of(True, IS_EXACT, element)
    scale, minimum = tl.load(scales + held)[:, None] if not GROUP else 0.0, 0.0
    for part in tl.static_range(SLICES):
        first = (block * SLICES + part) * SLICE
        if GROUP and part % RUN == 0:
            place = first // GROUP * num_out + held
            scale = tl.load(scales + place)[:, None]
            if HAS_MINIMUMS:
                minimum = tl.load(minimums + place)[:, None]
        values = weights_of(pairs, scale, minimum, part, BITS, True, HAS_MINIMUMS, IS_EXACT, element)
        values = (values.to(tl.float32) * (1.0 / UNIT)).to(element)
        inputs = first + offsets
        place = y + lanes[:, None].to(tl.int64) * num_in + inputs[None, :]
        tl.store(place, values, mask=is_output[:, None] & (inputs < num_in)[None, :])


@dataclass(frozen=True)
class ProductTile:
    """How a program multiplies. None of it changes the order of a row's sum."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


NARROW = 64
"""Outputs of the narrowest tile."""
WIDE = ProductTile(64, 2 * NARROW, 4, 3)
TILES = {
    4: (ProductTile(8, NARROW, 2, 4), ProductTile(16, NARROW, 2, 4), ProductTile(64, NARROW, 4, 3)),
    8: (ProductTile(8, NARROW, 4, 4), ProductTile(16, NARROW, 4, 4), ProductTile(64, NARROW, 4, 3)),
}
"""By bits, from the fewest rows on."""
LEAST_WIDE = 200
"""Programs from which on the widest tile is used in place of the last of TILES: x is read half as often."""
MOST_ROWS = WIDE.rows
"""With more rows a product is bound by its arithmetic, and the weight is better dequantised once."""
PROGRAMS = {4: 512, 8: 384}
"""Most programs that splits lead to, by bits."""
MOST_SPLITS, LEAST_BLOCKS = 8, 8
"""Most parts of the inputs, and fewest blocks of one."""
MATRIX_UNITS = (8, 0)
"""Compute capability of the first devices whose matrix units Triton uses."""
DEQUANTISED = 16
"""Outputs of a program that dequantises."""


def num_splits_of(num_blocks: int, num_out: int, bits: int) -> int:
    """Parts of the inputs that are summed at once, a power of two: of the weight's shape alone, since the order of sums
    follows from it.
    """
    most = min(MOST_SPLITS, PROGRAMS[bits] // triton.cdiv(num_out, NARROW), num_blocks // LEAST_BLOCKS)
    return 1 << max(1, most).bit_length() - 1


def tile_of(num_rows: int, num_out: int, num_splits: int, bits: int, device: torch.device) -> ProductTile:
    """For a product of so many rows, at most MOST_ROWS."""
    if gpu.capability(device) < MATRIX_UNITS:
        return TILES[bits][0]  # larger ones take too many registers
    tile = next(tile for tile in TILES[bits] if num_rows <= tile.rows)
    is_wide = tile.rows == WIDE.rows and triton.cdiv(num_out, WIDE.outputs) * num_splits >= LEAST_WIDE
    return WIDE if is_wide else tile


def counters_of(words: torch.Tensor) -> torch.Tensor:
    """A counter for each tile of a product, zeros: [tiles] int32. words: [blocks, out, slice]."""
    most_tiles = triton.cdiv(words.shape[1], NARROW) * triton.cdiv(MOST_ROWS, TILES[4][0].rows)
    return torch.zeros(most_tiles, dtype=torch.int32, device=words.device)


def _run_of(group: int, bits: int, size: int) -> int:
    """Slices that share a scale, from the first of each block on. size: inputs of a slice."""
    num_slices = 16 // bits
    block = num_slices * size
    return num_slices if group % block == 0 else group // size if block % group == 0 else 1


@operator("multiply_integers", mutates_args=("counters",))
def multiply(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    bits: int,
    group: int,
    is_exact: bool,
) -> torch.Tensor:
    """x: [rows, in], at most MOST_ROWS; words: [blocks, out, slice] int16, as `device_integers.pack_words` makes them;
    scales, minimums: [groups, out] float32, of groups of `group` inputs, or without a group [1, out] of scales;
    `is_exact`: scales are numbers of x's dtype; bias: [out]; counters: of `counters_of`. Returns [rows, out].
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_rows, num_in), (num_blocks, num_out, size) = x.shape, words.shape
    num_splits = num_splits_of(num_blocks, num_out, bits)
    tile = tile_of(num_rows, num_out, num_splits, bits, x.device)
    y = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    num_partials = num_splits * num_rows * num_out if num_splits > 1 else 0
    partials = torch.empty(num_partials, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(num_out, tile.outputs), triton.cdiv(num_rows, tile.rows), num_splits
    with torch.cuda.device_of(x):  # Triton launches on the thread's current device
        multiply_integers[grid](
            x, words, scales, scales if minimums is None else minimums, scales if bias is None else bias, y, partials,
            counters, num_rows, num_in, num_out, num_blocks, num_splits, x.stride(0), HAS_BIAS=bias is not None,
            IS_PADDED=num_in < num_blocks * size * (16 // bits), BITS=bits, GROUP=group, RUN=_run_of(group, bits, size),
            HAS_MINIMUMS=minimums is not None, IS_EXACT=is_exact, ROWS=tile.rows, OUTPUTS=tile.outputs, SLICE=size,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
        )  # fmt: skip
    return y


@multiply.register_fake
def _(x: torch.Tensor, words: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape[0], words.shape[1], dtype=x.dtype, device=x.device)


@operator("dequantise_integers", mutates_args=())
def dequantise(
    words: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor | None,
    dtype: torch.dtype,
    first: int,
    num_outputs: int,
    num_in: int,
    bits: int,
    group: int,
    is_exact: bool,
) -> torch.Tensor:
    """The weights of `num_outputs` outputs from `first` on, [outputs, in] in `dtype`; others as in `multiply`."""
    num_blocks, num_out, size = words.shape
    y = torch.empty(num_outputs, num_in, dtype=dtype, device=words.device)
    grid = triton.cdiv(num_outputs, DEQUANTISED), num_blocks
    with torch.cuda.device_of(words):
        dequantise_integers[grid](
            words, scales, scales if minimums is None else minimums, y, first, num_outputs, num_in, num_out, BITS=bits,
            GROUP=group, RUN=_run_of(group, bits, size), HAS_MINIMUMS=minimums is not None, IS_EXACT=is_exact,
            OUTPUTS=DEQUANTISED, SLICE=size, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


@dequantise.register_fake
def _(words: torch.Tensor, _scales: object, _minimums: object, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.empty(sizes[1], sizes[2], dtype=dtype, device=words.device)
