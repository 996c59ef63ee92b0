"""The tensors of a `.gguf` file as integers with scales, without loss (ggml's block formats).

A row of a tensor is a sequence of blocks of bytes. Every function takes them as [out, blocks, bytes] uint8. Values of a
type that are multiplied as 4 bits are from 0 to 15; others are int8.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from lorikeet.proto.gguf.header import TYPES
from lorikeet.shard.model.kernels.integer import MIDDLE, IntegerWeight

SIZES = {kind.name: kind.num_bytes for kind in TYPES.values()}
"""Bytes of a block."""


class Parts(NamedTuple):
    """What blocks mean, as in IntegerWeight."""

    # [out, ..., n]: all values of a row, in order
    values: torch.Tensor
    # [out, blocks] or [out, blocks, groups of a block], float32
    scales: torch.Tensor
    # as scales
    minimums: torch.Tensor | None = None


class Format(NamedTuple):
    """A type of tensors as integers."""

    bits: int
    group: int
    """Values with one scale."""
    has_minimums: bool
    read: Callable[[torch.Tensor], Parts]


def read_blocks(kind: str, rows: torch.Tensor) -> IntegerWeight:
    """rows: [out, bytes] uint8, of one of FORMATS. Returns a weight [out, in]."""
    form = FORMATS[kind]
    values, scales, minimums = form.read(rows.view(len(rows), -1, SIZES[kind]))
    dtype = torch.int8 if form.bits == 8 else torch.uint8
    values = values.flatten(1)
    values = values.view(dtype) if values.dtype == torch.uint8 else values.to(dtype)
    return IntegerWeight(
        form.bits, values, scales.flatten(1).float(), None if minimums is None else minimums.flatten(1).float()
    )


def _q8_0(blocks: torch.Tensor) -> Parts:
    """A scale, 32 values in 8 bits."""
    return Parts(blocks[..., 2:], _halves(blocks[..., :2]))


def _q8_k(blocks: torch.Tensor) -> Parts:
    """A scale in float32, 256 values in 8 bits, their sums."""
    return Parts(blocks[..., 4:260], blocks[..., :4].clone().view(torch.float32))


def _q4_0(blocks: torch.Tensor) -> Parts:
    """A scale, 32 values in 4 bits around 8."""
    return Parts(_nibbles(blocks[..., 2:]), _halves(blocks[..., :2]))


def _q4_1(blocks: torch.Tensor) -> Parts:
    """A scale, a minimum, 32 values in 4 bits."""
    return Parts(_nibbles(blocks[..., 4:]), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q5_0(blocks: torch.Tensor) -> Parts:
    """A scale, the fifth bits of 32 values around 16, their lower 4 bits."""
    values = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return Parts(values.view(torch.int8) - 16, _halves(blocks[..., :2]))


def _q5_1(blocks: torch.Tensor) -> Parts:
    """A scale, a minimum, the fifth bits of 32 values, their lower 4 bits."""
    values = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return Parts(values, _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q2_k(blocks: torch.Tensor) -> Parts:
    """16 scales and minimums in 4 bits, 256 values in 2 bits, a scale of scales and one of minimums."""
    packed, values = blocks[..., :16], _shifted(blocks[..., 16:80].unflatten(2, (2, 32)), (0, 2, 4, 6), 3)
    of_scales, of_minimums = _halves(blocks[..., 80:82]), _halves(blocks[..., 82:84])
    return Parts(values, (packed & 15) * of_scales[..., None], -((packed >> 4) * of_minimums[..., None]))


def _q3_k(blocks: torch.Tensor) -> Parts:
    """The third bits of 256 values around 4, their lower 2 bits, 16 scales in 6 bits around 32, a scale of scales."""
    high = _shifted(blocks[..., :32], range(8), 1)
    low = _shifted(blocks[..., 32:96].unflatten(2, (2, 32)), (0, 2, 4, 6), 3).flatten(2, 3)
    packed = blocks[..., 96:108]
    scales = (
        _shifted(packed[..., :8], (0, 4), 15).flatten(2) | _shifted(packed[..., 8:], (0, 2, 4, 6), 3).flatten(2) << 4
    )
    scales = (scales.view(torch.int8) - 32) * _halves(blocks[..., 108:110])[..., None]
    return Parts((low | high << 2) + (MIDDLE - 4), scales)


def _q4_k(blocks: torch.Tensor) -> Parts:
    """A scale of scales and one of minimums, 8 of each in 6 bits, 256 values in 4 bits."""
    # [out, blocks, 4, 32] bytes, whose halves are two groups
    return Parts(_nibbles(blocks[..., 16:].unflatten(2, (4, 32))), *_scales_of_k(blocks))


def _q5_k(blocks: torch.Tensor) -> Parts:
    """A block of Q4_K with a fifth bit of each value: group g's are bit g of 32 bytes."""
    low = _nibbles(blocks[..., 48:].unflatten(2, (4, 32))).unflatten(3, (2, 32)).flatten(2, 3)
    # [out, blocks, 8, 32]
    return Parts(low | _shifted(blocks[..., 16:48], range(8), 1) << 4, *_scales_of_k(blocks))


def _q6_k(blocks: torch.Tensor) -> Parts:
    """256 values around 32 in 4 bits, 2 more bits of each, 16 scales in 8 bits, a scale of scales."""
    # [out, blocks, 2, 4, 32]
    low = _shifted(blocks[..., :128].unflatten(2, (2, 64)), (0, 4), 15).unflatten(4, (2, 32)).flatten(3, 4)
    high = _shifted(blocks[..., 128:192].unflatten(2, (2, 32)), (0, 2, 4, 6), 3)
    scales = blocks[..., 192:208].view(torch.int8) * _halves(blocks[..., 208:210])[..., None]
    return Parts((low | high << 4).view(torch.int8) - 32, scales)


def _q1_0(blocks: torch.Tensor) -> Parts:
    """A scale, the signs of 128 values."""
    return Parts(_bits(blocks[..., 2:]) * 2 + (MIDDLE - 1), _halves(blocks[..., :2]))


def _q2_0(blocks: torch.Tensor) -> Parts:
    """A scale, 64 values from -1 to 2 in 2 bits."""
    values = torch.stack([blocks[..., 2:] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    return Parts(values + (MIDDLE - 1), _halves(blocks[..., :2]))


def _tq1_0(blocks: torch.Tensor) -> Parts:
    """256 values from -1 to 1, five of them the digits of a byte on base 3, a scale."""
    runs = ((blocks[..., :32], 5), (blocks[..., 32:48], 5), (blocks[..., 48:52], 4))
    digits = [torch.stack([run * 3**power for power in range(count)], 2).flatten(2) for run, count in runs]
    # a byte is the fraction of its digits, whose first is the whole part of three times it
    values = (torch.cat(digits, 2).short() * 3 >> 8).to(torch.uint8)
    return Parts(values + (MIDDLE - 1), _halves(blocks[..., 52:54]))


def _tq2_0(blocks: torch.Tensor) -> Parts:
    """256 values from -1 to 2 in 2 bits, a scale."""
    values = _shifted(blocks[..., :64].unflatten(2, (2, 32)), (0, 2, 4, 6), 3)
    return Parts(values + (MIDDLE - 1), _halves(blocks[..., 64:66]))


def _mxfp4(blocks: torch.Tensor) -> Parts:
    """An exponent, 32 numbers in 4 bits."""
    return Parts(_values("MXFP4")[_nibbles(blocks[..., 1:]).int()], _scales_of_mxfp4()[blocks[..., 0].int()])


def _nvfp4(blocks: torch.Tensor) -> Parts:
    """4 scales of 8 bits, 4 groups of 16 numbers in 4 bits."""
    values = _values("NVFP4")[_nibbles(blocks[..., 4:].unflatten(2, (4, 8))).int()]
    return Parts(values, _scales_of_nvfp4()[blocks[..., :4].int()])


def _iq4_nl(blocks: torch.Tensor) -> Parts:
    """A scale, places of 32 values in a table."""
    return Parts(_values("IQ4_NL")[_nibbles(blocks[..., 2:]).int()], _halves(blocks[..., :2]))


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    """A scale of scales, 8 scales in 6 bits around 32, places of 256 values in a table."""
    high = torch.stack([blocks[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(2)
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(2)
    scales = ((low | high << 4).view(torch.int8) - 32) * _halves(blocks[..., :2])[..., None]
    return Parts(_values("IQ4_NL")[_nibbles(blocks[..., 8:].unflatten(2, (8, 16))).int()], scales)


def _iq2_xxs(blocks: torch.Tensor) -> Parts:
    """A scale of scales; of each 32 values the places of 4 times 8 in a grid, their signs, a scale in 4 bits."""
    words = _words(blocks[..., 2:]).unflatten(2, (8, 2))
    places = blocks[..., 2:].unflatten(2, (8, 8))[..., :4]
    scales = _halves(blocks[..., :2])[..., None] * ((words[..., 1] >> 28) + 0.5) * 0.25
    return Parts(_grid("IQ2_XXS")[places.int()] * _signs_of_words(words[..., 1]), scales)


def _iq2_xs(blocks: torch.Tensor) -> Parts:
    """A scale of scales; of each 8 values their place in a grid and their signs; 16 scales in 4 bits."""
    pairs = _pairs(blocks[..., 2:66])
    scales = _halves(blocks[..., :2])[..., None] * (_in_turn(blocks[..., 66:]) + 0.5) * 0.25
    return Parts(_grid("IQ2_XS")[pairs & 511] * _signs()[pairs >> 9], scales)


def _iq2_s(blocks: torch.Tensor) -> Parts:
    """A scale of scales; of each 8 values their place in a grid, its two upper bits last, and signs; 16 scales."""
    places = blocks[..., 2:34].int() | _shifted(blocks[..., 66:74, None], (0, 2, 4, 6), 3).flatten(2).int() << 8
    scales = _halves(blocks[..., :2])[..., None] * (_in_turn(blocks[..., 74:]) + 0.5) * 0.25
    return Parts(_grid("IQ2_S")[places].flatten(2) * _plus_or_minus(blocks[..., 34:66]), scales)


def _iq3_xxs(blocks: torch.Tensor) -> Parts:
    """A scale of scales; of each 4 values their place in a grid; of each 32 their signs and a scale in 4 bits."""
    words = _words(blocks[..., 66:])
    scales = _halves(blocks[..., :2])[..., None] * ((words >> 28) + 0.5) * 0.5
    return Parts(_grid("IQ3_XXS")[blocks[..., 2:66].int()].flatten(2) * _signs_of_words(words).flatten(2), scales)


def _iq3_s(blocks: torch.Tensor) -> Parts:
    """A scale of scales; of each 4 values their place in a grid, its upper bit later; signs; 8 scales in 4 bits."""
    places = blocks[..., 2:66].int() | _bits(blocks[..., 66:74]).int() << 8
    scales = _halves(blocks[..., :2])[..., None] * (_in_turn(blocks[..., 106:]) * 2 + 1)
    return Parts(_grid("IQ3_S")[places].flatten(2) * _plus_or_minus(blocks[..., 74:106]), scales)


def _iq1_s(blocks: torch.Tensor) -> Parts:
    """A scale of scales; of each 8 values their place in a grid of -1, 0 and 1; of each 32 the upper bits of places, a
    scale in 3 bits and the sign of an eighth, which is added.
    """
    # [out, blocks, 8]
    pairs = _pairs(blocks[..., 34:])
    upper = torch.stack([pairs >> shift & 7 for shift in (0, 3, 6, 9)], 3).flatten(2)
    scales = _halves(blocks[..., :2])[..., None] * ((pairs >> 12 & 7) * 2 + 1)
    eighths = torch.where(pairs >> 15 == 0, 0.125, -0.125)
    return Parts(_grid("IQ1_S")[blocks[..., 2:34].int() | upper << 8] + 1, scales, scales * (eighths - 1))


def _iq1_m(blocks: torch.Tensor) -> Parts:
    """Each 8 values have their place in a grid of -1, 0 and 1, its upper bits and the sign of an eighth; a block has
    16 scales in 3 bits and a quarter of the scale of scales.
    """
    upper, pairs = _in_turn(blocks[..., 32:48]).int(), _pairs(blocks[..., 48:])
    bits = torch.stack([pairs[..., index] >> 12 << 4 * index for index in range(4)]).sum(0)
    whole = bits.to(torch.int16).view(torch.float16).float()
    scales = torch.stack([pairs >> shift & 7 for shift in (0, 3, 6, 9)], 3).flatten(2) * 2 + 1
    eighths = _grid("IQ1_M")[blocks[..., :32].int() | (upper & 7) << 8] * 8
    eighths += torch.where(upper & 8 == 0, 1, -1)[..., None].to(torch.int8)
    return Parts(eighths, whole[..., None] * scales / 8)


FORMATS = {
    "Q8_0": Format(8, 32, False, _q8_0),
    "Q8_K": Format(8, 256, False, _q8_k),
    "Q4_0": Format(4, 32, False, _q4_0),
    "Q4_1": Format(4, 32, True, _q4_1),
    "Q5_0": Format(8, 32, False, _q5_0),
    "Q5_1": Format(8, 32, True, _q5_1),
    "Q2_K": Format(4, 16, True, _q2_k),
    "Q3_K": Format(4, 16, False, _q3_k),
    "Q4_K": Format(4, 32, True, _q4_k),
    "Q5_K": Format(8, 32, True, _q5_k),
    "Q6_K": Format(8, 16, False, _q6_k),
    "IQ1_S": Format(4, 32, True, _iq1_s),
    "IQ1_M": Format(8, 16, False, _iq1_m),
    "IQ2_XXS": Format(8, 32, False, _iq2_xxs),
    "IQ2_XS": Format(8, 16, False, _iq2_xs),
    "IQ2_S": Format(8, 16, False, _iq2_s),
    "IQ3_XXS": Format(8, 32, False, _iq3_xxs),
    "IQ3_S": Format(8, 32, False, _iq3_s),
    "IQ4_NL": Format(8, 32, False, _iq4_nl),
    "IQ4_XS": Format(8, 32, False, _iq4_xs),
    "TQ1_0": Format(4, 256, False, _tq1_0),
    "TQ2_0": Format(4, 256, False, _tq2_0),
    "MXFP4": Format(8, 32, False, _mxfp4),
    "NVFP4": Format(8, 16, False, _nvfp4),
    "Q1_0": Format(4, 128, False, _q1_0),
    "Q2_0": Format(4, 64, False, _q2_0),
}


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """pairs: [out, blocks, 2] bytes of a number in half precision. Returns [out, blocks] float32."""
    return pairs.clone(memory_format=torch.contiguous_format).view(torch.float16)[..., 0].float()


def _pairs(stored: torch.Tensor) -> torch.Tensor:
    """stored: [..., 2 n] bytes. Returns [..., n] int32: numbers of two bytes."""
    return stored[..., ::2].int() | stored[..., 1::2].int() << 8


def _words(stored: torch.Tensor) -> torch.Tensor:
    """stored: [..., 4 n] bytes. Returns [..., n] int64: numbers of four bytes."""
    return torch.stack([stored[..., index::4].long() << 8 * index for index in range(4)]).sum(0)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """packed: [..., n]. Returns [..., 2 n]: all low halves, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _in_turn(packed: torch.Tensor) -> torch.Tensor:
    """packed: [..., n]. Returns [..., 2 n]: of each byte the low half, then the high one."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """packed: [..., n]. Returns [..., 8 n]: of each byte its bits from the lowest."""
    return torch.stack([packed >> index & 1 for index in range(8)], -1).flatten(-2)


def _shifted(packed: torch.Tensor, shifts: Sequence[int], mask: int) -> torch.Tensor:
    """packed: [..., n]. Returns [..., shifts, n]: a part of each byte, all first parts first."""
    return torch.stack([packed >> shift & mask for shift in shifts], -2)


def _scales_of_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums, [out, blocks, 8], of blocks of 256 values that begin with them."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], 2)
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], 2)
    of_scales, of_minimums = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return scales * of_scales[..., None], -(minimums * of_minimums[..., None])


def _plus_or_minus(stored: torch.Tensor) -> torch.Tensor:
    """stored: [..., n]. Returns [..., 8 n] int8: -1 for each bit that is set, else 1."""
    return 1 - 2 * _bits(stored).view(torch.int8)


def _signs_of_words(words: torch.Tensor) -> torch.Tensor:
    """words: [...]. Returns [..., 4, 8] int8: signs of 4 times 8 values, seven bits for each eight."""
    return _signs()[torch.stack([words >> shift & 127 for shift in (0, 7, 14, 21)], -1)]


@cache
def _signs() -> torch.Tensor:
    """[128, 8] int8: of seven bits the signs of eight values, an even number of which are negative."""
    return _plus_or_minus(torch.from_numpy(np.frombuffer(_of_package("IQ2_XXS").ksigns, np.uint8).copy())[:, None])


@cache
def _grid(kind: str) -> torch.Tensor:
    """[points, 4 or 8] int8: the points of a type's grid."""
    form = _of_package(kind)
    form.init_grid()
    return torch.from_numpy(form.grid.reshape(form.grid_shape).astype(np.int8))


@cache
def _values(kind: str) -> torch.Tensor:
    """[16] int8: what the four bits of a type stand for."""
    return torch.tensor(_of_package(kind).kvalues, dtype=torch.int8)


@cache
def _scales_of_mxfp4() -> torch.Tensor:
    """[256] float32: what a byte of a scale stands for."""
    return torch.from_numpy(_of_package("MXFP4").e8m0_to_fp32_half(np.arange(256, dtype=np.uint8)))


@cache
def _scales_of_nvfp4() -> torch.Tensor:
    """[256] float32: what a byte of a scale stands for."""
    return torch.from_numpy(_of_package("NVFP4").ue4m3_to_fp32(np.arange(256, dtype=np.uint8)))


def _of_package(kind: str) -> Any:
    """The class of the package `gguf` for a type, with its tables."""
    from gguf import quants

    return getattr(quants, kind)
