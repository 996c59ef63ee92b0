"""Linear layers whose weight is quantised: how transformers is asked for them, and their product.

Knows the packages by the names of their classes and imports none that is not needed. On CPU a row's bits must not
depend on its neighbours, so the weight is read out in the number format of the activations for each product, and the
product is ours; the packages' own either round more or let a row see the rest of the batch. On CUDA it is theirs.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import BitsAndBytesConfig

from proto import quantization
from shard.model.packing import PackedMatrix, can_pack, multiply


def loading(method: str | None, checkpoint: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What transformers' `from_pretrained` is to be told besides. A checkpoint that is quantised says so itself."""
    if method is None or quantization.of_checkpoint(checkpoint.to_dict()) is not None:
        return {}
    if method == "bitsandbytes":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    kind = method.removeprefix("bitsandbytes-")
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": asked}


def is_quantized(module: nn.Module) -> bool:
    """Whether the module is a linear layer with a quantised weight."""
    return type(module).__name__ in _MATRICES


class QuantizedMatrix(PackedMatrix):
    """`x ↦ x Wᵀ + bias` with the weight as it was quantised."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        """`module`: whose weight is kept. `dtype`: of activations."""
        self.out_features, self.in_features = int(module.out_features), int(module.in_features)
        self.dtype = dtype
        # [out]
        self.bias = None if module.bias is None else module.bias.detach().to(dtype)

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """[out, in] in `dtype`, made anew."""

    @abstractmethod
    def leave_the_file(self) -> None:
        """Copy the weight: one view into a mapped checkpoint would keep all of it resident."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """That the weight takes, scales and all."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self.dense(), self.bias)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self.dense(), None)


class FourBitMatrix(QuantizedMatrix):
    """bitsandbytes' 4 bits: nf4 and fp4."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        state = module.weight.quant_state
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError("the 4-bit weight was laid out for bitsandbytes' own product already")
        # [out in / 2, 1] uint8, and the scale of each block
        self._packed, self._state = module.weight.data, state

    def leave_the_file(self) -> None:
        self._packed = self._packed.clone()

    def dense(self) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        dense: torch.Tensor = dequantize_4bit(self._packed, self._state)
        return dense.to(self.dtype)

    @property
    def num_bytes(self) -> int:
        scales = [self._state.absmax, *([self._state.state2.absmax] if self._state.nested else [])]
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._packed, *scales))


class EightBitMatrix(QuantizedMatrix):
    """bitsandbytes' 8 bits, whose product rounds activations to 8 bits too, row by row, but for large ones (Dettmers et
    al. 2022). There a value in one row decides how a whole column of all rows is computed; here each row decides alone.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        weight, state = module.weight, module.state
        scales = weight.SCB if weight.SCB is not None else state.SCB
        # [out, in] int8 and [out] float32: the largest of each row, which 127 stands for
        self._rounded, self._largest = weight.data, scales
        self._threshold = float(state.threshold)

    def leave_the_file(self) -> None:
        self._rounded, self._largest = self._rounded.clone(), self._largest.clone()

    def dense(self) -> torch.Tensor:
        return self._rounded.to(self.dtype) * (self._largest / 127).to(self.dtype)[:, None]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._rounded, self._largest))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        operators = torch.ops.bitsandbytes
        # [rows, in]
        rows = x.reshape(-1, self.in_features)
        halves = rows.half()
        large = halves.abs() >= (self._threshold if self._threshold > 0 else torch.inf)
        rounded, scales, _ = operators.int8_vectorwise_quant(halves.masked_fill(large, 0), 0.0)
        y: torch.Tensor = operators.int8_scaled_mm(rounded, self._rounded, scales, self._largest, self.bias, self.dtype)
        if large.any():
            y = y + _product(rows.masked_fill(~large, 0), self.dense(), None)
        return y.view(*x.shape[:-1], self.out_features)


_MATRICES: dict[str, Callable[[Any, torch.dtype], QuantizedMatrix]] = {
    "Linear4bit": FourBitMatrix,
    "Linear8bitLt": EightBitMatrix,
}


def matrix_of(module: nn.Module, dtype: torch.dtype) -> QuantizedMatrix:
    """The weight of a module that `is_quantized`, with our product."""
    return _MATRICES[type(module).__name__](module, dtype)


def num_parameters(network: nn.Module) -> int:
    """Of a network: packed weights count as what they stand for."""
    total = sum(parameter.numel() for parameter in network.parameters())
    modules: list[Any] = [module for module in network.modules() if is_quantized(module)]
    for module in modules:
        total += module.in_features * module.out_features - module.weight.numel()
    return total


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [..., in]; weight: [out, in]; bias: [out]. Returns [..., out]."""
    on_cpu = x.device.type == "cpu" and can_pack(x.dtype)
    return multiply(x, weight, bias) if on_cpu else functional.linear(x, weight, bias)
