"""Weights in 8 or 4 bits on devices: few rows are multiplied by the stored integers (eight_bits_triton.py,
four_bits_triton.py), more rows by the dequantised weight. Activations keep their dtype.
"""

from dataclasses import replace

import torch
from torch.nn import functional

from lorikeet.shard.model.kernels.integer import IntegerWeight
from lorikeet.shard.system import gpu

CHUNK_ELEMENTS = 1 << 26
"""Most elements of a weight that are dequantised at once: 128 MiB in 16 bits."""
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Activations that the kernels for few rows multiply."""


class DeviceIntegers:
    """A weight in the layout of the kernels, with its bias."""

    def __init__(self, weight: IntegerWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """bias: [out]; `dtype`: of activations and of the bias."""
        self.num_out, self.num_in = weight.values.shape
        self.bits, self.bias = weight.bits, bias
        if self.bits == 4 and self.num_out % 2:
            weight = _padded(weight)
            self.bias = None if bias is None else functional.pad(bias, (0, 1))
        values, half = weight.values, len(weight.values) // 2
        # [out, in] int8, or [out / 2, in] uint8 whose upper four bits are output o, the lower ones output o + out / 2
        self.stored = ((values[:half] << 4 | values[half:]) if self.bits == 4 else values).contiguous()
        # [out, groups] float32
        self.scales = weight.scales.contiguous()
        # [out, groups] float32 or None
        self.minimums = None if weight.minimums is None else weight.minimums.contiguous()
        self.has_kernel = dtype in KERNEL_DTYPES and self._is_supported()
        """Whether few rows are multiplied by the stored integers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        return sum(each.nbytes for each in (self.stored, self.scales, self.minimums) if each is not None)

    def _is_supported(self) -> bool:
        """Whether the kernels read this layout here."""
        if not gpu.has_triton(self.stored.device):
            return False
        from lorikeet.shard.model.kernels.products_triton import DEPTH, depth_of

        return self._is_by_output or depth_of(self.num_in // self.scales.shape[1], DEPTH) > 0

    @property
    def _is_by_output(self) -> bool:
        """Whether each output has one scale, which follows the sum."""
        return self.bits == 8 and self.scales.shape[1] == 1 and self.minimums is None

    def product(self, x: torch.Tensor, with_bias: bool) -> torch.Tensor:
        """x: [rows, in]. Returns [rows, out]."""
        bias = self.bias if with_bias else None
        few = self._multiply_stored(x, bias) if self.has_kernel else None
        y = self._multiply_dequantised(x, bias) if few is None else few
        return y if y.shape[1] == self.num_out else y[:, : self.num_out].contiguous()

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in], dequantised."""
        return torch.cat([rows.dense().to(dtype) for rows in self._chunks()])[: self.num_out]

    def _multiply_stored(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """None for more rows than the kernels compute, and for another dtype."""
        from lorikeet.shard.model.kernels import eight_bits_triton, four_bits_triton

        if self.bits == 4:
            if not four_bits_triton.supports(x):
                return None
            forms = four_bits_triton.Form
            form = forms.MIDDLE if self.minimums is None else forms.MINIMUMS
            return four_bits_triton.multiply(x, self.stored, self.minimums, self.scales, bias, form)
        if not eight_bits_triton.supports(x, self.stored):
            return None
        scales = self.scales[:, 0] if self._is_by_output else self.scales
        return eight_bits_triton.multiply(x, self.stored, scales, bias, self.minimums)

    def _multiply_dequantised(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """A chunk of the outputs at a time."""
        chunks = self._chunks()
        biases = [None] * len(chunks) if bias is None else bias.split(len(chunks[0].values))
        pairs = zip(chunks, biases, strict=True)
        products = [functional.linear(x, rows.dense().to(x.dtype), own) for rows, own in pairs]
        return products[0] if len(products) == 1 else torch.cat(products, 1)

    def _chunks(self) -> list[IntegerWeight]:
        """The rows of the weight, those together that are dequantised at once."""
        values = torch.cat([self.stored >> 4, self.stored & 15]) if self.bits == 4 else self.stored
        size = max(1, CHUNK_ELEMENTS // self.num_in)
        values, scales = values.split(size), self.scales.split(size)
        minimums = [None] * len(scales) if self.minimums is None else self.minimums.split(size)
        return [IntegerWeight(self.bits, *each) for each in zip(values, scales, minimums, strict=True)]


def _padded(weight: IntegerWeight) -> IntegerWeight:
    """With one more row, of zeros."""
    values, scales = (functional.pad(each, (0, 0, 0, 1)) for each in (weight.values, weight.scales))
    minimums = None if weight.minimums is None else functional.pad(weight.minimums, (0, 0, 0, 1))
    return replace(weight, values=values, scales=scales, minimums=minimums)
