"""Linear layers whose weight is quantised: how transformers is asked for them, which they are, and the check at start
that each row of theirs is computed alone. Knows the packages by the names of their classes and imports none that is
not needed; the products are those of `quantized_matrices`.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, TorchAoConfig
from transformers.quantizers.base import get_keys_to_not_convert

from lorikeet.proto import quantization
from lorikeet.shard.model.quantization.matrices import (
    AwqMatrix,
    EightBitMatrix,
    Float8Matrix,
    FourBitMatrix,
    GptqMatrix,
    GroupedMatrix,
    KernelMatrix,
    QuantizedMatrix,
)

_OF_GPTQMODEL = "BaseQuantLinear"
_MATRICES: dict[str, type[QuantizedMatrix]] = {
    "Linear4bit": FourBitMatrix,
    "Linear8bitLt": EightBitMatrix,
    "HQQLinear": GroupedMatrix,
    "Float8Tensor": Float8Matrix,
    "TorchLinear": GptqMatrix,
    "AwqTorchLinear": AwqMatrix,
    _OF_GPTQMODEL: KernelMatrix,
}
"""By the class of the module, of its weight, or of gptqmodel's layers at large."""
_HQQ_GROUPS = {4: 64, 3: 64, 2: 32}
"""Weights that share a scale and a zero, by bits. LoRAX's but for 2: 16 would take the room of 4 bits, since hqq keeps
zeros in 16 bits.
"""
_TORCH_KERNELS = {"gptq": "gptq_torch", "awq": "torch_awq"}
"""gptqmodel's layers that keep the weight as the checkpoint has it."""
BATCH_INVARIANCE_TOLERANCE = 2.0**-8
"""How far a row may be from itself in other company, of its root mean square, where products are not ours: the rounding
of results to bfloat16 is a third of it, that of activations to 8 bits twice as much.
"""


def loading(method: str | None, checkpoint: Any, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """What transformers' `from_pretrained` is to be told besides. Raises ValueError where `device` cannot."""
    if method is None:
        return {}
    if quantization.of_checkpoint(checkpoint.to_dict()) is not None:
        return _reading(method, checkpoint, dtype, device)
    if method == "fp8":
        from torchao.quantization import Float8WeightOnlyConfig

        return {"quantization_config": TorchAoConfig(Float8WeightOnlyConfig())}
    if method.startswith("hqq-"):  # the network is quantised once it is loaded, part by part
        return {"device_map": None}
    if method == "bitsandbytes":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    kind = method.removeprefix("bitsandbytes-")
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": asked}


def _reading(method: str, checkpoint: Any, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The same for a checkpoint that is quantised: it says so itself."""
    if method not in _TORCH_KERNELS:
        return {}
    if device == "cpu":
        asked = copy.deepcopy(checkpoint)
        asked.quantization_config["backend"] = _TORCH_KERNELS[method]
        return {"config": asked}
    if method == "awq" and dtype != torch.float16:
        raise ValueError("on CUDA its kernels compute in float16 alone: --dtype float16")
    return {}


def quantize_loaded(network: Any, method: str | None, dtype: torch.dtype, device: str) -> None:
    """Quantise by hqq, in place and on `device`, what transformers has loaded plain, but for the output head and what
    is tied. Raises ValueError for weights that hqq cannot group.
    """
    if method is None or not method.startswith("hqq-"):
        return
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    num_bits = int(method.removeprefix("hqq-").removesuffix("bit"))
    group = _HQQ_GROUPS[num_bits]
    kept = set(get_keys_to_not_convert(network))
    chosen = [n for n, module in network.named_modules() if isinstance(module, nn.Linear) and n not in kept]
    for name in chosen:
        module = network.get_submodule(name)
        if module.in_features % group:
            raise ValueError(f"{name} has rows of {module.in_features} weights, which groups of {group} do not divide")
        asked = BaseQuantizeConfig(nbits=num_bits, group_size=group)
        network.set_submodule(name, HQQLinear(module, asked, compute_dtype=dtype, device=device))
    network.to(device)


def is_quantized(module: nn.Module) -> bool:
    """Whether the module is a linear layer with a quantised weight."""
    return _kind(module) is not None


def matrix_of(module: nn.Module, dtype: torch.dtype) -> QuantizedMatrix:
    """The weight of a module that `is_quantized`, with its product."""
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
    """Of a network: packed weights count as what they stand for."""
    modules: list[Any] = [module for module in network.modules() if is_quantized(module)]
    packed = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    total = sum(parameter.numel() for parameter in network.parameters() if id(parameter) not in packed)
    for module in modules:
        total += module.in_features * module.out_features + (0 if module.bias is None else module.bias.numel())
    return total


def check_batch_invariance(matrices: list[QuantizedMatrix], device: torch.device) -> None:
    """Raise ValueError where nothing is quantised, or where what a row gives depends on rows beside it: one matrix of
    each kind and shape is asked for two rows alone, and beside rows of small and of large values.
    """
    if not matrices:
        raise ValueError("none of its layers is of a kind that this method quantises")
    generator = torch.Generator().manual_seed(0)
    tolerance = 0.0 if device.type == "cpu" else BATCH_INVARIANCE_TOLERANCE
    for matrix in {(type(each), each.in_features, each.out_features): each for each in matrices}.values():
        rows = torch.randn(2, matrix.in_features, generator=generator).to(device, matrix.dtype)
        alone = matrix(rows).float()
        beside = matrix(torch.cat([rows, rows.flip(1) / 64, rows.flip(1) * 64])).float()[:2]
        off = float((beside - alone).square().mean().sqrt() / alone.square().mean().sqrt().clamp(min=1e-30))
        if not off <= tolerance:
            raise ValueError(
                f"what a row gives depends on the rows beside it (by {off:.1e} of it, at {matrix.out_features} × "
                f"{matrix.in_features} weights), so a request's text would depend on others"
            )
