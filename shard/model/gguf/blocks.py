"""The tensors of a `.gguf` file as integers with scales, without loss (ggml's block formats).

A row of a tensor is a sequence of blocks of bytes. Every function takes them as [out, blocks, bytes] uint8.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from lorikeet.shard.model.kernels.integer import IntegerWeight

_MIDDLE_OF_6_BITS = 32


class Blocks(NamedTuple):
    """One format of blocks."""

    num_bytes: int
    read: Callable[[torch.Tensor], IntegerWeight]


def read_blocks(kind: str, rows: torch.Tensor) -> IntegerWeight:
    """rows: [out, bytes] uint8, of one of FORMATS. Returns a weight [out, in]."""
    blocks = FORMATS[kind]
    return blocks.read(rows.view(len(rows), -1, blocks.num_bytes))


def _q8_0(blocks: torch.Tensor) -> IntegerWeight:
    """A scale, 32 values in 8 bits."""
    return IntegerWeight(8, blocks[..., 2:].flatten(1).view(torch.int8), _halves(blocks[..., :2]))


def _q4_0(blocks: torch.Tensor) -> IntegerWeight:
    """A scale, 32 values in 4 bits around 8."""
    return IntegerWeight(4, _nibbles(blocks[..., 2:]).flatten(1), _halves(blocks[..., :2]))


def _q4_1(blocks: torch.Tensor) -> IntegerWeight:
    """A scale, a minimum, 32 values in 4 bits."""
    scales, minimums = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return IntegerWeight(4, _nibbles(blocks[..., 4:]).flatten(1), scales, minimums)


def _q4_k(blocks: torch.Tensor) -> IntegerWeight:
    """A scale of scales and one of minimums, 8 of each in 6 bits, 256 values in 4 bits."""
    scales, minimums = _scales_of_k(blocks)
    # [out, blocks, 4, 32] bytes, whose halves are two groups
    values = _nibbles(blocks[..., 16:].unflatten(2, (4, 32)))
    return IntegerWeight(4, values.flatten(1), scales, minimums)


def _q5_k(blocks: torch.Tensor) -> IntegerWeight:
    """The same with a fifth bit of each value: group g's are bit g of 32 bytes."""
    scales, minimums = _scales_of_k(blocks)
    low = _nibbles(blocks[..., 48:].unflatten(2, (4, 32))).unflatten(3, (2, 32)).flatten(2, 3)
    # [out, blocks, 8, 32]
    high = torch.stack([blocks[..., 16:48] >> group & 1 for group in range(8)], 2)
    return IntegerWeight(8, (low | high << 4).flatten(1).view(torch.int8), scales, minimums)


def _q6_k(blocks: torch.Tensor) -> IntegerWeight:
    """256 values in 4 bits, 2 more bits of each, 16 scales in 8 bits, a scale of scales."""
    # [out, blocks, 2, 64] and [out, blocks, 2, 32]
    low, high = blocks[..., :128].unflatten(2, (2, 64)), blocks[..., 128:192].unflatten(2, (2, 32))
    quarters = [low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4]
    parts = [quarter | (high >> 2 * index & 3) << 4 for index, quarter in enumerate(quarters)]
    # [out, blocks, 2, 4, 32]
    values = torch.stack(parts, 3).view(torch.int8) - _MIDDLE_OF_6_BITS
    scales = blocks[..., 192:208].view(torch.int8).float() * _halves(blocks[..., 208:210])[..., None]
    return IntegerWeight(8, values.flatten(1), scales.flatten(1))


FORMATS = {
    "Q8_0": Blocks(34, _q8_0),
    "Q4_0": Blocks(18, _q4_0),
    "Q4_1": Blocks(20, _q4_1),
    "Q4_K": Blocks(144, _q4_k),
    "Q5_K": Blocks(176, _q5_k),
    "Q6_K": Blocks(210, _q6_k),
}


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """pairs: [out, blocks, 2] bytes of a number in half precision. Returns [out, blocks] float32."""
    return pairs.contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """packed: [..., n]. Returns [..., 2 n]: all low halves, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _scales_of_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums, [out, groups], of blocks of 256 values that begin with them."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], 2)
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], 2)
    of_scales, of_minimums = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return (scales * of_scales[..., None]).flatten(1), (-(minimums * of_minimums[..., None])).flatten(1)
