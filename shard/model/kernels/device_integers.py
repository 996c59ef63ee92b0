"""Weights in 8 or 4 bits on devices: few rows are multiplied by the stored integers (integers_triton.py), more rows by
the dequantised weight. Activations keep their dtype.

Both multiply by the same weight, since a prompt and the steps after it belong to one text: in groups the scaled one,
rounded to the dtype of activations. Where an output has one scale, that follows the sum of products with the integers.
"""

import math

import torch
from torch.nn import functional

from lorikeet.shard.model.kernels.integer import IntegerWeight
from lorikeet.shard.system import gpu

CHUNK_ELEMENTS = 1 << 26
"""Most elements of a weight that are dequantised at once: 128 MiB in 16 bits."""
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Activations that the kernels multiply."""
WORD_BITS = 16
MOST_SLICE = {4: 32, 8: 64}
"""Most inputs of a slice, by bits."""
LEAST_EXACT, MOST_EXACT = 2.0**-80, 4.0
"""Scales and minimums between them are decoded in the dtype of activations without overflow or loss."""


class DeviceIntegers:
    """A weight in the layout of the kernels, with its bias.

    Its products must follow one another: in two streams at once they would share counters.
    """

    def __init__(self, weight: IntegerWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """bias: [out]; `dtype`: of activations and of the bias."""
        self.num_out, self.num_in = weight.values.shape
        self.bits, self.bias, self.dtype = weight.bits, bias, dtype
        self._num_groups = weight.scales.shape[1]
        follows = self.bits == 8 and self._num_groups == 1 and weight.minimums is None
        size = slice_of(self.bits, 0 if self._num_groups == 1 else weight.group)
        # [blocks, out, slice] int16
        self.words = pack_words(weight.values, self.bits, size)
        num_stored = self.words.shape[0] * self.words.shape[2] * WORD_BITS // self.bits
        self.group = 0 if follows else num_stored if self._num_groups == 1 else weight.group
        """Inputs that share a scale; 0 where an output has one scale, which follows its sum."""
        num_padded = 0 if follows else -(-num_stored // self.group) - self._num_groups
        # [groups, out] float32, zeros for groups beyond the last; minimums or None
        self.scales = _groups(weight.scales, num_padded)
        self.minimums = None if weight.minimums is None else _groups(weight.minimums, num_padded)
        # [1, out] and [out] float32, where the scale follows the sum
        self._powers, self._factors = split_scales(self.scales, dtype)
        self.is_exact = self._is_exact()
        """Whether scales and minimums are numbers of `dtype`: then a weight is decoded in it, otherwise in float32."""
        self.has_kernel = dtype in KERNEL_DTYPES and gpu.has_triton(self.words.device)
        """Whether the kernels compute with the stored integers."""
        # [tiles] int32, or [0] without kernels
        self._counters = torch.zeros(0, dtype=torch.int32, device=self.words.device)
        if self.has_kernel:
            from lorikeet.shard.model.kernels import integers_triton

            self._counters = integers_triton.counters_of(self.words)

    def _is_exact(self) -> bool:
        if self.bits == 8 and self.minimums is not None:
            return False
        parts = [part for part in (self.scales, self.minimums) if part is not None]
        is_moderate = all(
            bool(((part.abs() < MOST_EXACT) & ((part.abs() > LEAST_EXACT) | (part == 0))).all()) for part in parts
        )
        return is_moderate and all(torch.equal(part.to(self.dtype).float(), part) for part in parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        return sum(tensor.nbytes for tensor in (self.words, self.scales, self.minimums) if tensor is not None)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows that are multiplied by different kernels."""
        if not self.has_kernel:
            return ()
        from lorikeet.shard.model.kernels import integers_triton

        few = tuple(tile.rows for tile in integers_triton.TILES[self.bits])
        return *few, integers_triton.MOST_ROWS + 1

    def product(self, x: torch.Tensor, with_bias: bool) -> torch.Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        bias = self.bias if with_bias else None
        if self.has_kernel and x.dtype == self.dtype:
            from lorikeet.shard.model.kernels import integers_triton

            if x.shape[0] <= integers_triton.MOST_ROWS:
                return integers_triton.multiply(
                    x, self.words, self.scales, self.minimums, bias, self._counters, self.bits, self.group,
                    self.is_exact,
                )  # fmt: skip
        return self._multiply_dequantised(x, bias)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in], dequantised."""
        return torch.cat([self._rows(first, last, dtype, self.scales) for first, last in self._chunks()])

    def _multiply_dequantised(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """A chunk of the outputs at a time."""
        products = [
            self._multiply_chunk(x, None if bias is None else bias[first:last], first, last)
            for first, last in self._chunks()
        ]
        return products[0] if len(products) == 1 else torch.cat(products, 1)

    def _multiply_chunk(self, x: torch.Tensor, bias: torch.Tensor | None, first: int, last: int) -> torch.Tensor:
        if self.group:
            return functional.linear(x, self._rows(first, last, x.dtype, self.scales), bias)
        rows = self._rows(first, last, x.dtype, self._powers)
        return multiply_scaled(x, rows, self._factors[first:last], bias)

    def _chunks(self) -> list[tuple[int, int]]:
        """First and last output, excluded, of those that are dequantised at once."""
        size = max(1, CHUNK_ELEMENTS // self.num_in)
        return [(first, min(first + size, self.num_out)) for first in range(0, self.num_out, size)]

    def _rows(self, first: int, last: int, dtype: torch.dtype, scales: torch.Tensor) -> torch.Tensor:
        """[last - first, in] the weights of these outputs, with these scales."""
        if self.has_kernel and dtype == self.dtype:
            from lorikeet.shard.model.kernels import integers_triton

            return integers_triton.dequantise(
                self.words, scales, self.minimums, dtype, first, last - first, self.num_in, self.bits, self.group,
                self.is_exact,
            )  # fmt: skip
        values = unpack_words(self.words[:, first:last], self.bits, self.num_in)
        scales = scales[: self._num_groups, first:last].t()
        minimums = None if self.minimums is None else self.minimums[: self._num_groups, first:last].t()
        return IntegerWeight(self.bits, values, scales, minimums).dense().to(dtype)


def split_scales(scales: torch.Tensor, dtype: torch.dtype, unit: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """scales: [1, out] float32. Returns powers of two, [1, out], that multiply values of 8 bits without rounding in
    `dtype`, and [out] factors, mostly from 1 to 2: their products are the scales. unit: the smallest of the values.
    """
    finfo = torch.finfo(dtype)
    least = round(math.log2(finfo.smallest_normal * finfo.eps / unit))
    exponents = torch.frexp(scales)[1] - 1
    powers = torch.ldexp(torch.ones_like(scales), exponents.clamp(least, 0))
    return powers, (scales / powers)[0]


def multiply_scaled(
    x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x: [rows, in]; weight: [out, in]; factors: [out] float32, of the sums; bias: [out]. Returns [rows, out] in x's
    dtype, rounded once.
    """
    if x.dtype == torch.float32:
        sums = functional.linear(x, weight)
    elif x.device.type == "cpu":
        sums = functional.linear(x.float(), weight.float())
    else:
        sums = torch.mm(x, weight.t(), out_dtype=torch.float32)
    y = torch.empty_like(sums, dtype=x.dtype)
    return torch.mul(sums, factors, out=y) if bias is None else torch.addcmul(bias.float(), sums, factors, out=y)


def _groups(values: torch.Tensor, num_padded: int) -> torch.Tensor:
    """values: [out, groups]. Returns [groups + padded, out]."""
    return functional.pad(values.t(), (0, 0, 0, num_padded)).contiguous()


def slice_of(bits: int, group: int) -> int:
    """Inputs of a slice: a power of two that divides the group, of at least 16 inputs, or with a group of 0 any."""
    size = MOST_SLICE[bits]
    while group % size:
        size //= 2
    return size


def pack_words(values: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """values: [out, in], uint8 of 4 bits, or int8. Returns [blocks, out, size] int16: the integers of a word, from the
    lowest bits on, are `size` inputs apart; those of 8 bits are 128 larger, without sign.
    """
    num_slices = WORD_BITS // bits
    padded = functional.pad(values, (0, -values.shape[1] % (num_slices * size)))
    # [blocks, out, slices, size]
    parts = padded.unflatten(1, (-1, num_slices, size)).transpose(0, 1)
    added = 128 if bits == 8 else 0
    words = parts[:, :, 0].to(torch.int16) + added
    for part in range(1, num_slices):
        words |= (parts[:, :, part].to(torch.int16) + added) << bits * part
    return words.contiguous()


def unpack_words(words: torch.Tensor, bits: int, num_in: int) -> torch.Tensor:
    """What `pack_words` packed: [out, in], uint8 in 4 bits and int8 in 8."""
    parts = [words >> bits * part & (1 << bits) - 1 for part in range(WORD_BITS // bits)]
    parts = [part.to(torch.uint8) if bits == 4 else (part - 128).to(torch.int8) for part in parts]
    return torch.stack(parts, 2).transpose(0, 1).flatten(1)[:, :num_in]
