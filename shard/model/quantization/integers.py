"""Weights rounded to 8 or 4 bits when they are loaded: which layers, how, and their products: kernels/integer.py on
CPU, kernels/device_integers.py on devices.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorikeet.shard.model.kernels import integer
from lorikeet.shard.model.kernels.device_integers import DeviceIntegers
from lorikeet.shard.model.kernels.integer import IntegerWeight, PackedIntegers, StoredWeight
from lorikeet.shard.model.quantization.matrices import QuantizedMatrix
from lorikeet.shard.system import gpu

GROUPS = (128, 32)
"""Weights of a row that may share a scale."""
LEAST_ROW = 2048
"""Weights of a row from which on groups may be larger than 32: small models lose more by them, and gain less memory."""
LEAST_OUTPUTS = 16
"""Layers with fewer stay as they are: they decide, and cost nothing."""
WEIGHTS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Rounded together: as many as fit a processor's cache, or occupy a device."""
_LARGEST_4 = 15
_TRIED_4 = tuple(14 + step / 4 for step in range(9))
"""What the largest weight of a group is rounded to, before values are limited to 15."""
_REFINEMENTS_4 = 2


class Rounding(NamedTuple):
    """How a network is rounded."""

    bits: int
    rounds_activations: bool
    """Else activations keep their dtype; on CPU each product converts the weight to it first."""
    group: int = GROUPS[-1]
    """Weights of a long row that share a scale: the largest of GROUPS up to this one that divides the row."""

    def round(self, weight: torch.Tensor) -> IntegerWeight:
        """weight: [out, in]. Raises ValueError as `round_weight` does."""
        return round_weight(weight, self.bits, self.group if weight.shape[1] >= LEAST_ROW else GROUPS[-1])


class IntegerLinear(nn.Module):
    """A linear layer with a rounded weight, until the layer pass replaces it."""

    def __init__(
        self,
        weight: IntegerWeight | StoredWeight,
        bias: torch.Tensor | None,
        rounds_activations: bool,
        dtype: torch.dtype,
    ) -> None:
        """bias: [out]; `dtype`: of activations."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        device = weight.values.device if isinstance(weight, IntegerWeight) else "cpu"
        # [0]
        self.sample = torch.empty(0, dtype=dtype, device=device)
        self._weight, self.bias, self.rounds_activations = weight, bias, rounds_activations
        self.num_shared = 0
        """Weights that another module holds too, not rounded."""
        self._packed: PackedIntegers | DeviceIntegers | None = None

    @property
    def integers(self) -> IntegerWeight:
        """The weight, on the layer's device. A stored one is read at each call."""
        if isinstance(self._weight, IntegerWeight):
            return self._weight
        return _moved(self._weight.read(0, self.out_features), self.sample.device)

    @property
    def squared_norms(self) -> torch.Tensor | None:
        """[out] float32 in host memory, of a stored weight: known once it is packed; None for others."""
        return self._weight.squared_norms if isinstance(self._weight, StoredWeight) else None

    def parts(self) -> Iterator[IntegerWeight]:
        """The weight on the layer's device, some rows at a time."""
        return (_moved(part, self.sample.device) for part in self._weight.parts())

    @property
    def integers_kind(self) -> tuple[int, int, int, bool]:
        """`IntegerWeight.kind` of the weight, without reading it."""
        return self._weight.kind

    @property
    def is_on_device(self) -> bool:
        return self.sample.device.type != "cpu"

    def move(self, device: torch.device) -> None:
        """Copy the weight to a device; a stored one later, when it is read. The layer is not packed yet."""
        self.sample = self.sample.to(device)
        if isinstance(self._weight, IntegerWeight):
            self._weight = _moved(self._weight, device)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.to(device), requires_grad=False)

    def packed(self) -> PackedIntegers | DeviceIntegers:
        """The weight in the layout of its product. Raises CompilerMissing."""
        if self._packed is None:
            bias = None if self.bias is None else self.bias.detach()
            if self.is_on_device:
                dtype = self.sample.dtype
                self._packed = DeviceIntegers(self.integers, None if bias is None else bias.to(dtype), dtype)
            else:
                self._packed = PackedIntegers(self._weight, None if bias is None else bias.float())
        return self._packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Returns [..., out], without adapters."""
        rows = x.reshape(-1, self.in_features)
        return self.packed().product(rows, with_bias=True).view(*x.shape[:-1], self.out_features)


class IntegerMatrix(QuantizedMatrix):
    """The weight of an IntegerLinear. It is packed once the network is complete."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        self._weight: IntegerWeight | None = None
        self._rounds_activations: bool = module.rounds_activations
        self._integers_kind = module.integers_kind
        # [out] float32
        self._bias = None if self.bias is None else self.bias.float()
        self._packed: PackedIntegers | DeviceIntegers | None = None
        self._module = module

    @property
    def kind(self) -> tuple[object, ...]:
        return *super().kind, self._integers_kind

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        if self._packed is not None:
            return self._packed.nbytes
        return self.weight.nbytes

    @property
    def packed(self) -> PackedIntegers:
        """Once it is packed, on CPU."""
        assert isinstance(self._packed, PackedIntegers)
        return self._packed

    @property
    def weight(self) -> IntegerWeight:
        """Unless it is packed."""
        if self._weight is None:
            self._weight = self._module.integers
        return self._weight

    def copy_from_mmap(self) -> None:
        if self._module.is_on_device or (self._rounds_activations and integer.available()):
            self._packed, self._weight = self._module.packed(), None
            self.least_rows = 1
        else:
            self._weight = self._module.integers
        del self._module

    def dense(self) -> torch.Tensor:
        if isinstance(self._packed, DeviceIntegers):
            return self._packed.dense(self.dtype)
        return self.weight.dense().to(self.dtype)

    @property
    def row_counts(self) -> tuple[int, ...]:
        return self._packed.row_counts if isinstance(self._packed, DeviceIntegers) else ()

    def dense_parts(self) -> Iterator[torch.Tensor]:
        if self._packed is not None:
            yield self.dense()
        elif self._weight is not None:
            yield from (part.dense().to(self.dtype) for part in self._weight.parts())
        else:
            yield from (part.dense().to(self.dtype) for part in self._module.parts())

    @property
    def sums_in_float32(self) -> bool:
        return isinstance(self._packed, DeviceIntegers) and not self._packed.group

    def reads_few_bytes(self, device: torch.device) -> bool:
        return isinstance(self._packed, DeviceIntegers) and self._packed.has_kernel

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if isinstance(self._packed, DeviceIntegers):
            return self._packed.product(rows, with_bias=bias is not None).view(*x.shape[:-1], self.out_features)
        if not self._rounds_activations:
            return super().product(x, bias)
        # half precision, which the kernels lack, is exact in float32
        rows = rows.float() if rows.dtype == torch.float16 else rows
        if self._packed is not None:
            y = self._packed.product(rows, with_bias=bias is not None)
        else:
            y = integer.plain_product(rows, self.weight, None if bias is None else self._bias)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


def _moved(weight: IntegerWeight, device: torch.device) -> IntegerWeight:
    """The weight on a device."""
    tensors = {name: getattr(weight, name) for name in ("values", "scales", "minimums")}
    return replace(weight, **{name: values.to(device) for name, values in tensors.items() if values is not None})


def round_network(network: Any, rounding: Rounding, device: torch.device) -> None:
    """Round the weights of linear layers in place, that of the output head to 8 bits, each on `device`. Embeddings stay
    as they are; the layer pass rounds experts, on CPU. Raises ValueError for a layer that cannot be rounded.
    """
    output = getattr(network, "get_output_embeddings", lambda: None)()
    of_head = rounding._replace(bits=8, group=GROUPS[-1])
    holders = Counter(id(parameter) for module in network.modules() for parameter in module.parameters(recurse=False))
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear | Conv1D) and module.weight.numel() // _num_in(module) >= LEAST_OUTPUTS:
            try:
                made = _rounded(module, of_head if module is output else rounding, device)
            except ValueError as reason:
                raise ValueError(f"{name}: {reason}") from None
            made.num_shared = module.weight.numel() if holders[id(module.weight)] > 1 else 0
            network.set_submodule(name, made)
    network.lorikeet_rounding = rounding  # for experts, which are no modules
    move(network, device)


def move(network: nn.Module, device: torch.device) -> None:
    """Copy a network with rounded layers to a device."""
    if device.type == "cpu":
        return
    for module in network.modules():
        if isinstance(module, IntegerLinear):
            module.move(device)
    network.to(device)


def rounding_of(network: nn.Module) -> Rounding | None:
    """How `round_network` rounded a network, if it did."""
    return getattr(network, "lorikeet_rounding", None)


def pack_rounded(weight: torch.Tensor, bias: torch.Tensor | None, rounding: Rounding) -> IntegerMatrix:
    """weight: [out, in], of the activations' dtype; bias: [out]. Raises ValueError as `round_weight` does."""
    bias = None if bias is None else bias.clone()
    rounded = rounding.round(weight)
    matrix = IntegerMatrix(IntegerLinear(rounded, bias, rounding.rounds_activations, weight.dtype), weight.dtype)
    matrix.copy_from_mmap()
    return matrix


def _num_in(module: nn.Linear | Conv1D) -> int:
    return module.weight.shape[1 if isinstance(module, nn.Linear) else 0]


def _rounded(module: nn.Linear | Conv1D, rounding: Rounding, device: torch.device) -> IntegerLinear:
    weight = module.weight.detach().to(device)
    weight = weight if isinstance(module, nn.Linear) else weight.t()  # Conv1D keeps its weight as [in, out]
    bias = None if module.bias is None else module.bias.detach().clone()
    rounded = rounding.round(weight)
    return IntegerLinear(rounded, bias, rounding.rounds_activations, weight.dtype)


def round_weight(weight: torch.Tensor, bits: int, group: int = GROUPS[-1]) -> IntegerWeight:
    """weight: [out, in]; `group`: as in Rounding, of rows of any length. Rows of 8 bits that have no groups have one
    scale and no minimum, and all rows on devices, where the scale follows the sum. Raises ValueError for values that
    are not finite, and for rows of 4 bits that have no groups.
    """
    num_in = weight.shape[1]
    size = next((own for own in GROUPS if own <= group and num_in % own == 0), 0)
    is_whole = bits == 8 and (not size or weight.device.type != "cpu")
    if not size and not is_whole:
        raise ValueError(f"its rows have {num_in} weights, which is no multiple of {GROUPS[-1]}")
    if not weight.isfinite().all():
        raise ValueError("it has weights that are not finite")
    rows_at_once = max(1, WEIGHTS_AT_ONCE[weight.device.type] // num_in)
    round_part = _round_rows if is_whole else _round_to_8 if bits == 8 else _round_to_4
    parts = [round_part(rows.float().unflatten(1, (-1, size or num_in))) for rows in weight.split(rows_at_once)]
    values, scales, *minimums = (torch.cat(part) for part in zip(*parts, strict=True))
    return IntegerWeight(bits, values.flatten(1), scales, *minimums)


def _round_rows(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """weight: [rows, 1, in]. Returns values of the same shape, -127 to 127, and scales, [rows, 1]."""
    scales = gpu.divide(weight.abs().amax(2), 127.0)
    values = (weight / scales[:, :, None]).round().nan_to_num(0.0)  # a row of zeros has a scale of 0
    return values.to(torch.int8), scales


def _round_to_8(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """weight: [rows, groups, group]. Returns values of the same shape, -128 to 127 between the extremes of a group, and
    scales and minimums, [rows, groups].
    """
    low, high = weight.aminmax(dim=2, keepdim=True)
    scales = gpu.divide(high - low, 255.0)
    values = ((weight - low) / scales).round().nan_to_num(0.0) - 128.0  # equal weights have a scale of 0
    return values.to(torch.int8), scales[:, :, 0], (low + 128.0 * scales)[:, :, 0]


def _round_to_4(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Round to values from 0 to 15. Scale and minimum are searched for the least squares of errors, as in ggml's
    K-quants: several scales are tried, and the best is refined.
    """
    low = weight.amin(2, keepdim=True)
    x = weight - low  # sums of small numbers round less
    span = x.amax(2, keepdim=True)
    least, scales, minimums = torch.full_like(span, torch.inf), torch.zeros_like(span), torch.zeros_like(span)
    for top in _TRIED_4:
        values = (x * (top / span)).round().nan_to_num(0.0).clamp(0, _LARGEST_4)
        scale, minimum = _least_squares(x, values)
        error = (values * scale + minimum - x).square().sum(2, keepdim=True)
        is_better = error < least
        least, scales = torch.where(is_better, error, least), torch.where(is_better, scale, scales)
        minimums = torch.where(is_better, minimum, minimums)
    for _ in range(_REFINEMENTS_4):
        values = ((x - minimums) / scales).round().nan_to_num(0.0).clamp(0, _LARGEST_4)
        scales, minimums = _least_squares(x, values)
    return values.to(torch.uint8), scales[:, :, 0], (minimums + low)[:, :, 0]


def _least_squares(x: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the minimum, [rows, groups, 1], that make `values * scale + minimum` nearest to x. Both are [rows,
    groups, group].
    """
    mean_value, mean = values.mean(2, keepdim=True), x.mean(2, keepdim=True)
    centred = values - mean_value
    squares = centred.square().sum(2, keepdim=True)
    scale = torch.where(squares > 0, (centred * x).sum(2, keepdim=True) / squares, 0.0)  # equal weights need none
    return scale, mean - scale * mean_value
