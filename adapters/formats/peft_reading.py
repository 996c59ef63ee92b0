"""An adapter's changes to its base, as PEFT reads them: factors and scaling per module, taken from PEFT's layers.

PEFT matches the targets, converts the names and sets ranks and scalings. This module rejects what PEFT would ignore.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.lora.layer import Conv2d, Conv3d, Embedding, Linear, LoraLayer, ParamWrapper
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorikeet.adapters.errors import AdapterError, AdapterInvalid, NotServed
from lorikeet.adapters.formats.skeleton import Skeleton

NAME = "default"
"""The adapter's name in PEFT's network: PEFT's own default, which some files contain in the names of their tensors."""
_PREFIX = "base_model.model."
_WITH_NAME = re.compile(rf"\.{NAME}(?=\.\w+$|$)")
_MISMATCH = re.compile(r"size mismatch for (\S+?): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """An adapter's change to one module of the base. Tensors are those of the file."""

    module: str
    kind: str
    """linear, embedding, experts, router, replace; or other, which no shard supports and must equal the base's."""
    rank: int = 0
    scaling: float = 1.0
    num_experts: int = 1
    # [rank, in]; [rank, V] for embeddings; [experts * rank, in] for experts
    a: torch.Tensor | None = None
    # [out, rank]; [out, rank * experts] for experts
    b: torch.Tensor | None = None
    # [out]: of DoRA
    magnitude: torch.Tensor | None = None
    # [out], times the scaling: added to B's output
    b_bias: torch.Tensor | None = None
    # [out], replaces the base's bias
    new_bias: torch.Tensor | None = None
    # replaces the base's weight, in its shape
    weight: torch.Tensor | None = None


TENSORS = ("a", "b", "magnitude", "b_bias", "new_bias", "weight")
"""The tensor fields of ModuleChange."""


def read(skeleton: Skeleton, configuration: dict[str, Any], tensors: Tensors) -> list[ModuleChange]:
    """`configuration` comes from `configuration.served`. Tensors may be on the meta device: only shapes are read.

    Raises AdapterInvalid or NotServed.
    """
    with skeleton.borrowed() as network, warnings.catch_warnings():
        # PEFT warns about training, and about what is rejected here
        warnings.simplefilter("ignore")
        names = {id(module): name for name, module in network.named_modules()}
        _check_names(tensors)
        _check_rows(network, names, tensors)
        wrapped = _inject(network, configuration)
        _load(wrapped, tensors)
        changes = {change.module: change for change in _layers(wrapped, names)}
        for change in _replaced(network, names, skeleton.parameter_ids(), wrapped):
            earlier = changes.get(change.module)
            changes[change.module] = change if earlier is None else _joined(earlier, change)
    return list(changes.values())


def _inject(network: Any, configuration: dict[str, Any]) -> PeftModel:
    values = {**configuration, "task_type": None, "inference_mode": True, "lora_dropout": 0.0}
    values["init_lora_weights"] = False  # the file has the values, and none can be drawn on the meta device
    try:
        return PeftModel(network, LoraConfig(**values), NAME, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    except AdapterError:
        raise
    except re.error as error:
        raise AdapterInvalid(f"a pattern of adapter_config.json is not a regular expression: {error}") from None
    except Exception as error:
        raise AdapterInvalid(f"adapter_config.json does not fit the base: {first_sentence(error)}") from None


def _check_names(tensors: Tensors) -> None:
    """PEFT reads names with and without the adapter's; of two names for one parameter it would ignore one."""
    parameters: dict[str, str] = {}
    for key in tensors:
        first = parameters.setdefault(_WITH_NAME.sub("", key).removesuffix(".weight"), key)
        if first != key:
            raise AdapterInvalid(f"its tensors {first[:200]} and {key[:200]} are values of one parameter")


def _check_rows(network: Any, names: dict[int, str], tensors: Tensors) -> None:
    """Embeddings with another number of rows belong to another tokenizer."""
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    rows = {f"{names[id(module)]}.weight": module.weight.shape[0] for module in ends if id(module) in names}
    for key, tensor in tensors.items():
        module = key.removeprefix(_PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        expected = rows.get(module)
        if expected is not None and tensor.dim() == 2 and tensor.shape[0] != expected:
            problem = f"its {module.removesuffix('.weight')} has {tensor.shape[0]} rows, the base's {expected}"
            raise AdapterInvalid(f"{problem}: it was trained with another tokenizer")


def _load(wrapped: PeftModel, tensors: Tensors) -> None:
    for module in wrapped.modules():
        if isinstance(module, LoraLayer):
            # PEFT would move tensors to the base's device, which is meta
            module._move_adapter_to_device_of_base_layer = lambda *_, **__: None
    try:
        result = set_peft_model_state_dict(wrapped, dict(tensors), adapter_name=NAME, low_cpu_mem_usage=True)
    except KeyError as error:
        raise AdapterInvalid(f"it lacks the tensor {_plain(str(error.args[0]))}") from None
    except RuntimeError as error:
        raise AdapterInvalid(_mismatch(str(error))) from None
    except Exception as error:
        raise AdapterInvalid(f"its tensors do not fit the base: {first_sentence(error)}") from None
    if result.unexpected_keys:
        problem = f"its tensor {_plain(min(result.unexpected_keys))} matches no module of the base that"
        raise AdapterInvalid(f"{problem} adapter_config.json names ({len(result.unexpected_keys)} such tensors)")
    if missing := [key for key in result.missing_keys if f".{NAME}" in key]:
        problem = f"it lacks the tensor {_plain(min(missing))} of a module that adapter_config.json names"
        raise AdapterInvalid(f"{problem} ({len(missing)} such tensors)")


def _mismatch(text: str) -> str:
    if (match := _MISMATCH.search(text)) is None:
        return f"its tensors do not fit the base: {text.strip().splitlines()[-1].strip()[:200]}"
    key, has, needs = match.groups()
    return f"made for another base or rank: {_plain(key)} has shape {has}, but must have {needs}"


def _plain(key: str) -> str:
    return key.removeprefix(_PREFIX).replace(f".{NAME}", "")[:200]


def _layers(wrapped: PeftModel, names: dict[int, str]) -> Iterator[ModuleChange]:
    for module in wrapped.modules():
        if isinstance(module, LoraLayer):
            if NAME in module.scaling:
                yield _layer(module, names)
        elif isinstance(module, ModulesToSaveWrapper):
            yield from _saved(module, names)


def _layer(layer: Any, names: dict[int, str]) -> ModuleChange:
    base = layer.get_base_layer()
    name = names[id(base)]
    change = ModuleChange(name, "linear", layer.r[NAME], float(layer.scaling[NAME]))
    if isinstance(layer, ParamWrapper):
        return _parameter(layer, base, change)
    variant = layer.lora_variant.get(NAME)
    if variant is not None and NAME not in layer.lora_magnitude_vector:
        raise NotServed(f"{type(variant).__name__} on {name} is not served")
    if isinstance(layer, Embedding):
        if variant is not None:
            raise NotServed(f"DoRA on the embedding {name} is not served")
        scaling = change.scaling * float(getattr(base, "scalar_embed_scale", 1.0))
        a, b = layer.lora_embedding_A[NAME], layer.lora_embedding_B[NAME]
        return replace(change, kind="embedding", scaling=scaling, a=a, b=b)
    if not isinstance(layer, Linear) or isinstance(layer, Conv2d | Conv3d):
        raise NotServed(f"an adapter on {name}, a {type(base).__name__}, is not served")
    magnitude = None if variant is None else layer.lora_magnitude_vector[NAME].weight
    return replace(_with_factors(layer, change), b_bias=layer.lora_B[NAME].bias, magnitude=magnitude)


def _with_factors(layer: Any, change: ModuleChange) -> ModuleChange:
    return replace(change, a=layer.lora_A[NAME].weight, b=layer.lora_B[NAME].weight)


def _parameter(layer: Any, base: nn.Module, change: ModuleChange) -> ModuleChange:
    """A parameter that is itself a target: the stacked weights of experts, or those of their router."""
    name = f"{change.module}.{layer.parameter_name}"
    if layer.get_param().dim() == 2 and layer.parameter_name == "weight":
        kind = "linear" if isinstance(base, nn.Linear) else "router"
        return replace(_with_factors(layer, change), kind=kind)
    if layer.get_param().dim() != 3:
        raise NotServed(f"an adapter on the parameter {name} is not served")
    return replace(_with_factors(layer, change), module=name, kind="experts", num_experts=layer.num_experts)


def _saved(wrapper: Any, names: dict[int, str]) -> Iterator[ModuleChange]:
    """The wrapper's module and those inside it that have parameters, such as the layers of a classifier's head."""
    outer, saved = names[id(wrapper.original_module)], wrapper.modules_to_save[NAME]
    for inner, module in saved.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        name = f"{outer}.{inner}" if inner else outer
        if set(parameters) - {"weight", "bias"}:
            raise NotServed(f"`modules_to_save` with {name}, a {type(module).__name__}, is not served")
        if parameters:
            kind = "replace" if isinstance(module, nn.Linear | nn.Embedding) else "other"
            yield ModuleChange(name, kind, weight=parameters.get("weight"), new_bias=parameters.get("bias"))


def _replaced(network: Any, names: dict[int, str], base_ids: set[int], wrapped: PeftModel) -> Iterator[ModuleChange]:
    """The base's own parameters that the adapter's file contains too: biases, embeddings saved with it."""
    saved = (module for module in wrapped.modules() if isinstance(module, ModulesToSaveWrapper))
    inside = {id(submodule) for module in saved for submodule in module.modules_to_save.modules()}
    for module in network.modules():
        if id(module) not in names or id(module) in inside:
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in base_ids:
                yield _replacement(module, names[id(module)], key, parameter)


def _replacement(module: nn.Module, name: str, key: str, parameter: torch.Tensor) -> ModuleChange:
    if key == "weight":
        kind = "replace" if isinstance(module, nn.Linear | nn.Embedding) else "other"
        return ModuleChange(name, kind, weight=parameter)
    if key == "bias":
        return ModuleChange(name, "linear" if isinstance(module, nn.Linear | Conv1D) else "other", new_bias=parameter)
    raise NotServed(f"replacing {name}.{key} is not served")


def _joined(first: ModuleChange, second: ModuleChange) -> ModuleChange:
    """Two changes of one module: the factors of the first with bias or weight of the second."""
    bias = second.new_bias if first.new_bias is None else first.new_bias
    return replace(first, new_bias=bias, weight=second.weight if first.weight is None else first.weight)


def first_sentence(error: BaseException) -> str:
    """The first sentence of a library's error, to end one of our sentences."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[.!?])\s", text)[0].rstrip(".")[:240]
