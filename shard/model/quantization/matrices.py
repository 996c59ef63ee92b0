"""Quantised weight matrices, each with its product; one class per storage format.

On CPU a row's bits must not depend on its neighbours, so each product dequantises the weight to the activations' number
format and is ours; the packages' products either round more or depend on the other rows. On CUDA the package's product
is used where it has a batch-invariant kernel, and ours for few rows of weights in eight bits, and of hqq's four
(kernels/eight_bits_triton.py, kernels/four_bits_triton.py).
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from lorikeet.shard.model.kernels.device_integers import KERNEL_DTYPES, multiply_scaled, split_scales
from lorikeet.shard.model.kernels.packing import PackedMatrix, can_pack, multiply
from lorikeet.shard.system import gpu

GROUP = 64
"""Weights with one scale, of the kernel for four bits."""
LEAST_8BIT = {torch.int8: 1.0, torch.float8_e4m3fn: 2.0**-9}
"""The smallest positive value."""
FEW_AND_MANY = 64, 65
"""Rows that the kernels for 8-bit floats and for hqq's 4 bits multiply at most, and one more."""
UNIT_ROWS = 1024
"""Rows of the identity by which a matrix is dequantised at once."""


class QuantizedMatrix(PackedMatrix):
    """`x ↦ x Wᵀ + bias` with a quantised weight."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        """`module`: with the weight. `dtype`: of activations."""
        self.out_features, self.in_features = int(module.out_features), int(module.in_features)
        self.dtype = dtype
        # [out]
        self.bias = None if module.bias is None else module.bias.detach().to(dtype)

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides which kernels multiply by it."""
        return type(self), self.in_features, self.out_features, self.bias is None

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """Dequantised: [out, in] in `dtype`."""

    def dense_parts(self) -> Iterator[torch.Tensor]:
        """Dequantised: [rows, in] in `dtype`, all rows in order."""
        yield self.dense()

    def copy_from_mmap(self) -> None:
        """Copy the weight where it may be a view into a mapped checkpoint: a view keeps all of it resident."""

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        products, start = [], 0
        for rows in self.dense_parts():
            stop = start + len(rows)
            products.append(_product(x, rows, None if bias is None else bias[start:stop]))
            start = stop
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows that are multiplied by different kernels of ours."""
        return ()

    @property
    def sums_in_float32(self) -> bool:
        """Whether products of any number of rows are rounded once, after their sum."""
        return False

    def reads_few_bytes(self, device: torch.device) -> bool:
        """Whether a step of few rows reads the quantised weight alone. Otherwise it writes and reads the dequantised
        one too, and quantization saves memory, not time.
        """
        return False


class FourBitMatrix(QuantizedMatrix):
    """bitsandbytes' 4 bits: nf4 and fp4. On CUDA its kernel multiplies by the packed weight."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        state = module.weight.quant_state
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError("the 4-bit weight has the layout of bitsandbytes' CPU product already")
        # [out in / 2, 1] uint8, and the scale of each block
        self._packed, self._state = module.weight.data, state

    def copy_from_mmap(self) -> None:
        self._packed = self._packed.clone()

    def dense(self) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        dense: torch.Tensor = dequantize_4bit(self._packed, self._state)
        return dense.to(self.dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().product(x, bias) if x.device.type == "cpu" else self._on_device(x, bias)

    def reads_few_bytes(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def _on_device(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from bitsandbytes import matmul_4bit

        y: torch.Tensor = matmul_4bit(x, self._packed, quant_state=self._state, bias=bias)
        return y


class GroupedMatrix(QuantizedMatrix):
    """hqq's 4, 3 and 2 bits: a scale and a zero for each group of weights."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        self._module = module

    @property
    def _is_in_nibbles(self) -> bool:
        """Whether the weight has the layout of the kernel for few rows: groups of 64 in the order of a row's inputs,
        and two outputs, half of them apart, in a byte.
        """
        meta = self._module.meta
        plain = not (meta.get("quant_scale") or meta.get("quant_zero") or meta.get("view_as_float"))
        kind = (meta["packing"], meta["axis"], meta["scale"].dtype, meta["zero"].dtype)
        fits = self.in_features % GROUP == 0 == self.out_features % 2 and meta["group_size"] == GROUP
        return plain and fits and kind == ("4bit_u8", 1, self.dtype, self.dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        few = self._of_few(x, bias) if gpu.has_triton(x.device) and self._is_in_nibbles else None
        return super().product(x, bias) if few is None else few

    def reads_few_bytes(self, device: torch.device) -> bool:
        return gpu.has_triton(device) and self._is_in_nibbles and self.dtype in KERNEL_DTYPES

    @property
    def row_counts(self) -> tuple[int, ...]:
        return FEW_AND_MANY if self.reads_few_bytes(self._module.W_q.device) else ()

    def _of_few(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x: [..., in]. Returns [..., out], None of more rows than the kernel computes."""
        from lorikeet.shard.model.kernels import four_bits_triton as kernel

        rows, meta = x.reshape(-1, self.in_features), self._module.meta
        if not kernel.supports(rows):
            return None
        weight = self._module.W_q.view(self.out_features // 2, self.in_features)
        zeros, scales = (meta[name].view(self.out_features, -1) for name in ("zero", "scale"))
        return kernel.multiply(rows, weight, zeros, scales, bias).view(*x.shape[:-1], -1)

    def dense(self) -> torch.Tensor:
        dense: torch.Tensor = self._module.dequantize()
        return dense.to(self.dtype)


class Float8Matrix(QuantizedMatrix):
    """torchao's 8-bit floats (e4m3) with a scale for each row of W; activations keep their format."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        # [out, in] float8_e4m3fn and [out, 1] float32, as one tensor of torchao's
        self._weight = module.weight.detach()
        # [256] bfloat16: what each byte means; looked up four times as fast as a processor converts it
        self._meanings = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).bfloat16()

    def dense(self) -> torch.Tensor:
        weight = self._weight
        if weight.device.type != "cpu":
            made: torch.Tensor = weight.dequantize(self.dtype)
            return made
        values = self._meanings.index_select(0, weight.qdata.view(torch.uint8).int().view(-1))
        dense: torch.Tensor = (values.view(weight.shape) * weight.scale).to(self.dtype)
        return dense

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.device.type == "cpu":
            return super().product(x, bias)
        return _product_8bit(x, self._weight.qdata, self._weight.scale.float().flatten(), bias)

    def reads_few_bytes(self, device: torch.device) -> bool:
        return gpu.has_triton(device) and self.dtype in KERNEL_DTYPES

    @property
    def row_counts(self) -> tuple[int, ...]:
        return FEW_AND_MANY if self.reads_few_bytes(self._weight.device) else ()

    @property
    def sums_in_float32(self) -> bool:
        return True


class GptqMatrix(QuantizedMatrix):
    """A checkpoint's GPTQ weight (Frantar et al. 2022) in the layout of gptqmodel's torch layer."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        self._module = module

    def copy_from_mmap(self) -> None:
        for name, buffer in list(self._module.named_buffers(recurse=False)):
            setattr(self._module, name, buffer.clone())

    def dense(self) -> torch.Tensor:
        # not the instance's method, which would be compiled for each shape
        dense: torch.Tensor = type(self._module).dequantize_weight(self._module)
        return dense.t().to(self.dtype).contiguous()


class AwqMatrix(GptqMatrix):
    """A checkpoint's AWQ weight (Lin et al. 2023) in the layout of gptqmodel's torch layer."""

    def dense(self) -> torch.Tensor:
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        held = self._module
        dense: torch.Tensor = dequantize_gemm(held.qweight, held.qzeros, held.scales, held.bits, held.group_size)
        return dense.t().to(self.dtype).contiguous()


class KernelMatrix(GptqMatrix):
    """A checkpoint's GPTQ or AWQ weight in the layout of one of gptqmodel's kernels, which alone can read it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._module(x)
        return y

    def reads_few_bytes(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) if self.bias is None else self(x) - self.bias

    def dense(self) -> torch.Tensor:
        """The product with a row of the identity is a column of W."""
        unit = torch.eye(self.in_features, dtype=self.dtype, device=self._module.qweight.device)
        return torch.cat([self.project(rows) for rows in unit.split(UNIT_ROWS)]).t()


def _product_8bit(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x: [..., in]; weight: [out, in] in eight bits; scales: [out] float32, which follow the sums for any number of
    rows; bias: [out]. Returns [..., out].
    """
    rows = x.reshape(-1, x.shape[-1])
    if gpu.has_triton(x.device):
        from lorikeet.shard.model.kernels import eight_bits_triton as kernel

        if kernel.supports(rows, weight):
            return kernel.multiply(rows, weight, scales, bias).view(*x.shape[:-1], -1)
    powers, factors = split_scales(scales[None], x.dtype, LEAST_8BIT[weight.dtype])
    values = weight.to(x.dtype) * powers[0, :, None].to(x.dtype)  # without rounding
    return multiply_scaled(rows, values, factors, bias).view(*x.shape[:-1], -1)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [..., in]; weight: [out, in]; bias: [out]. Returns [..., out]."""
    on_cpu = x.device.type == "cpu" and can_pack(x.dtype)
    return multiply(x, weight, bias) if on_cpu else functional.linear(x, weight, bias)
