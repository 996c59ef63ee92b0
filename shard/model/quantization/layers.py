"""Linear layers with quantised weights: loading them with transformers, recognising them, and the check at startup that
their products are batch-invariant. Classes of packages are recognised by name, so that no package is imported
needlessly; matrices.py has the products.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, TorchAoConfig
from transformers.quantizers.base import get_keys_to_not_convert

from lorikeet.proto import quantization
from lorikeet.shard.model.kernels.integer import IntegerWeight
from lorikeet.shard.model.quantization.integers import IntegerLinear, IntegerMatrix, Rounding, round_network
from lorikeet.shard.model.quantization.matrices import (
    AwqMatrix,
    Float8Matrix,
    FourBitMatrix,
    GptqMatrix,
    GroupedMatrix,
    KernelMatrix,
    QuantizedMatrix,
)
from lorikeet.shard.system import comparison, gpu

_OF_GPTQMODEL = "BaseQuantLinear"
_EIGHT_BITS = "Linear8bitLt"
_MATRICES: dict[str, type[QuantizedMatrix]] = {
    "Linear4bit": FourBitMatrix,
    "HQQLinear": GroupedMatrix,
    IntegerLinear.__name__: IntegerMatrix,
    "Float8Tensor": Float8Matrix,
    "TorchLinear": GptqMatrix,
    "AwqTorchLinear": AwqMatrix,
    _OF_GPTQMODEL: KernelMatrix,
}
"""By the class of the module, of its weight, or of gptqmodel's base class."""
_HQQ_GROUPS = {4: 64, 3: 64, 2: 32}
"""Weights that share a scale and a zero, by bits. LoRAX's except for 2 bits: groups of 16 would take as
much memory as 4 bits, because hqq keeps zeros in 16 bits.
"""
_TORCH_KERNELS = {"gptq": "gptq_torch", "awq": "torch_awq"}
"""gptqmodel's layers that keep the weight in the checkpoint's layout."""
BATCH_INVARIANCE_TOLERANCE = 2.0**-8
"""Root mean square of an output's differences between rows computed alone and in a batch, as a part of its own, that is
allowed where products are not ours: rounding results to bfloat16 is a third of it, rounding activations to 8 bits twice
as much.
"""
NUM_ROWS = 32
"""Rows that are computed alone, two at a time, and in a batch of twice as many, which kernels for few rows compute."""


def loading(method: str | None, checkpoint: Any, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Further arguments of transformers' `from_pretrained`. Raises ValueError where `device` has no kernels."""
    if method is None:
        return {}
    if method in quantization.INTEGERS:  # the network is rounded part by part after it is loaded
        return {"device_map": None}
    if quantization.of_checkpoint(checkpoint.to_dict()) is not None:
        return _reading(method, checkpoint, dtype, device)
    if method == "fp8":
        from torchao.quantization import Float8WeightOnlyConfig

        return {"quantization_config": TorchAoConfig(Float8WeightOnlyConfig())}
    if method.startswith("hqq-"):  # the network is quantised part by part after it is loaded
        return {"device_map": None}
    if method == "bitsandbytes":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    kind = method.removeprefix("bitsandbytes-")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": settings}


def _reading(method: str, checkpoint: Any, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The options for a checkpoint that is quantised, which its configuration states."""
    if method not in _TORCH_KERNELS:
        return {}
    if device == "cpu":
        settings = copy.deepcopy(checkpoint)
        settings.quantization_config["backend"] = _TORCH_KERNELS[method]
        return {"config": settings}
    if method == "awq" and dtype != torch.float16:
        raise ValueError("AWQ kernels on CUDA compute only in float16: use --dtype float16")
    return {}


def quantize_loaded(
    network: Any, method: str | None, dtype: torch.dtype, device: str, rounds_activations: bool = True
) -> None:
    """Quantise plain weights in place, by our rounding or with hqq; others are quantised while they are read. Replace
    bitsandbytes' layers of 8 bits by ours. Raises ValueError for weights that cannot be grouped.
    """
    if method in quantization.INTEGERS:
        bits, group = quantization.INTEGERS[method]
        round_network(network, Rounding(bits, rounds_activations, group), torch.device(device))
    elif method == "bitsandbytes":
        _take_integers(network, dtype, rounds_activations)
    elif method is not None and method.startswith("hqq-"):
        _quantize_with_hqq(network, method, dtype, device)


def _take_integers(network: Any, dtype: torch.dtype, rounds_activations: bool) -> None:
    """Replace bitsandbytes' layers of 8 bits. Its product would round a row of activations by one value, and let a
    large value in one row change how all rows are computed.
    """
    for name, module in list(network.named_modules()):
        if type(module).__name__ == _EIGHT_BITS:
            largest = module.weight.SCB if module.weight.SCB is not None else module.state.SCB  # of each row: 127
            # a copy: the values may be a view into a mapped checkpoint
            weight = IntegerWeight(8, module.weight.data.clone(), gpu.divide(largest.float(), 127.0)[:, None])
            bias = None if module.bias is None else module.bias.detach().clone()
            network.set_submodule(name, IntegerLinear(weight, bias, rounds_activations, dtype))


def _quantize_with_hqq(network: Any, method: str, dtype: torch.dtype, device: str) -> None:
    """All plain linear layers except the output head and tied weights, on `device`."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    num_bits = int(method.removeprefix("hqq-").removesuffix("bit"))
    group = _HQQ_GROUPS[num_bits]
    kept = set(get_keys_to_not_convert(network))
    chosen = [n for n, module in network.named_modules() if isinstance(module, nn.Linear) and n not in kept]
    for name in chosen:
        module = network.get_submodule(name)
        if module.in_features % group:
            raise ValueError(f"{name} has rows of {module.in_features} weights: no multiple of its groups of {group}")
        settings = BaseQuantizeConfig(nbits=num_bits, group_size=group)
        network.set_submodule(name, HQQLinear(module, settings, compute_dtype=dtype, device=device))
    network.to(device)


def is_quantized(module: nn.Module) -> bool:
    """Whether the module is a linear layer with a quantised weight."""
    return _kind(module) is not None


def matrix_of(module: nn.Module, dtype: torch.dtype) -> QuantizedMatrix:
    """The quantised weight of a module, with its product."""
    kind = _kind(module)
    assert kind is not None
    return kind(module, dtype)


def _kind(module: nn.Module) -> type[QuantizedMatrix] | None:
    names = [type(module).__name__, type(getattr(module, "weight", None)).__name__]
    if isinstance(module, nn.Embedding):
        return None
    names += [_OF_GPTQMODEL] if _OF_GPTQMODEL in {kind.__name__ for kind in type(module).__mro__} else []
    return next((_MATRICES[name] for name in names if name in _MATRICES), None)


def num_parameters(network: nn.Module) -> int:
    """Number of parameters of a network: a quantised weight counts as its unquantised elements."""
    modules: list[Any] = [module for module in network.modules() if is_quantized(module)]
    packed = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    total = sum(parameter.numel() for parameter in network.parameters() if id(parameter) not in packed)
    for module in modules:
        total += module.in_features * module.out_features + (0 if module.bias is None else module.bias.numel())
        total -= module.num_shared if isinstance(module, IntegerLinear) else 0
    return total


def check_batch_invariance(matrices: list[QuantizedMatrix], device: torch.device) -> None:
    """Raise ValueError where nothing is quantised, or where a row's result depends on the batch: one matrix of each
    kind and shape multiplies rows two at a time, and together with rows of small and of large values; then as many rows
    as each of its kernels takes, those for prompts among them. So every kernel of these products is compiled, also
    without a bias, as adapters call it.
    """
    if not matrices:
        raise ValueError("this method quantises none of its layers")
    generator = torch.Generator().manual_seed(0)
    tolerance = 0.0 if device.type == "cpu" else BATCH_INVARIANCE_TOLERANCE
    for matrix in {member.kind: member for member in matrices}.values():
        rows = torch.randn(NUM_ROWS, matrix.in_features, generator=generator).to(device, matrix.dtype)
        if matrix.bias is not None:
            matrix.project(rows[:2])
        alone = torch.cat([matrix(pair) for pair in rows.split(2)])
        for num_rows in matrix.row_counts:
            _check_kernel(matrix, rows, alone, num_rows)
        alone = alone.float()
        small, large = (rows.flip(1) / 64).split(NUM_ROWS // 2)[0], (rows.flip(1) * 64).split(NUM_ROWS // 2)[1]
        batched = matrix(torch.cat([rows, small, large]))[:NUM_ROWS].float()
        if torch.equal(batched, alone):
            continue  # the sizes of an output head's rows take memory
        sizes = comparison.channel_sizes(alone).clamp(min=1e-30)
        off = float((comparison.channel_sizes(batched - alone) / sizes).max())
        if not off <= tolerance:
            raise ValueError(
                f"this quantization is not batch-invariant (off by {off:.1e} at {matrix.out_features} × "
                f"{matrix.in_features} weights): a request's text would depend on other requests"
            )


def _check_kernel(matrix: QuantizedMatrix, rows: torch.Tensor, alone: torch.Tensor, num_rows: int) -> None:
    """rows: [NUM_ROWS, in]; alone: their results, [NUM_ROWS, out]. Raise ValueError where results among `num_rows` rows
    differ by more than roundings of the same sums.
    """
    many = rows.repeat(-(-num_rows // NUM_ROWS), 1)[:num_rows]
    together = matrix(many)[:NUM_ROWS]
    if matrix.bias is not None:
        matrix.project(many)
    # cuBLAS may add up parts of a sum in the dtype of the result
    rounds_parts = rows.device.type == "cuda" and not matrix.sums_in_float32
    worst = float(comparison.of_sums(alone[: len(together)], together, matrix.in_features, rounds_parts).max())
    if not worst <= 1:
        raise ValueError(
            f"products of {num_rows} rows differ from those of two rows by {worst:.1f} times what their roundings may "
            f"change, at {matrix.out_features} × {matrix.in_features} weights: a prompt and the tokens after it would "
            "be computed with different weights"
        )
