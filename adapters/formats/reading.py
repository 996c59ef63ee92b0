"""What an adapter does to its base, as PEFT itself reads it: factors and scaling per module, taken from PEFT's layers.

PEFT matches the targets, converts the names and decides ranks and scalings. What it leaves open is refused here.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

NAME = "adapter"
"""What the adapter is called inside PEFT's network."""
_PREFIX = "base_model.model."
_MISMATCH = re.compile(r"size mismatch for (\S+?): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Found:
    """What an adapter does to one module of the base. Tensors are as the file holds them."""

    module: str
    kind: str
    """linear, embedding, experts, router, replace; or other, which no shard changes and must be as the base has it."""
    rank: int = 0
    scaling: float = 1.0
    num_experts: int = 1
    # [rank, in]; [rank, V] for embeddings; [experts * rank, in] for experts
    a: torch.Tensor | None = None
    # [out, rank]; [out, rank * experts] for experts
    b: torch.Tensor | None = None
    # [out]: DoRA's
    magnitude: torch.Tensor | None = None
    # [out], times the scaling: what B adds
    b_bias: torch.Tensor | None = None
    # [out], in place of the base's bias
    new_bias: torch.Tensor | None = None
    # the shape of the base's own: in place of it
    weight: torch.Tensor | None = None


TENSORS = ("a", "b", "magnitude", "b_bias", "new_bias", "weight")
"""The fields of Found that are tensors."""


def read(skeleton: Skeleton, configuration: dict[str, Any], tensors: Tensors) -> list[Found]:
    """`configuration` as `configuration.served` gave it. Tensors may be on the meta device: only shapes are looked at.

    Raises AdapterInvalid or NotServed.
    """
    with skeleton.lent() as network, _quiet():
        names = {id(module): name for name, module in network.named_modules()}
        _check_rows(network, names, tensors)
        wrapped = _inject(network, configuration)
        _load(wrapped, tensors)
        found = {each.module: each for each in _layers(wrapped, names)}
        for each in _replaced(network, names, skeleton.parameter_ids(), wrapped):
            before = found.get(each.module)
            found[each.module] = each if before is None else _joined(before, each)
    return list(found.values())


def _inject(network: Any, configuration: dict[str, Any]) -> PeftModel:
    values = {
        **configuration,
        "task_type": None,
        "inference_mode": True,
        "lora_dropout": 0.0,
        # no values are drawn on the meta device, and a trained adapter brings its own
        "init_lora_weights": False,
    }
    try:
        return PeftModel(network, LoraConfig(**values), NAME, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    except AdapterError:
        raise
    except re.error as error:
        raise AdapterInvalid(f"a pattern of adapter_config.json is no regular expression: {error}") from None
    except Exception as error:
        raise AdapterInvalid(f"adapter_config.json does not fit the base: {first_sentence(error)}") from None


def _check_rows(network: Any, names: dict[int, str], tensors: Tensors) -> None:
    """Embeddings with another number of rows come with a tokenizer of their own."""
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    rows = {f"{names[id(module)]}.weight": module.weight.shape[0] for module in ends if id(module) in names}
    for key, tensor in tensors.items():
        module = key.removeprefix(_PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        expected = rows.get(module)
        if expected is not None and tensor.dim() == 2 and tensor.shape[0] != expected:
            raise AdapterInvalid(
                f"its {module.removesuffix('.weight')} has {tensor.shape[0]} rows, the base's {expected}: it was "
                "trained with another tokenizer"
            )


def _load(wrapped: PeftModel, tensors: Tensors) -> None:
    for module in wrapped.modules():
        if isinstance(module, LoraLayer):
            # PEFT would move what was read to where the base is, and the base is nowhere
            module._move_adapter_to_device_of_base_layer = _stay
    try:
        result = set_peft_model_state_dict(wrapped, dict(tensors), adapter_name=NAME, low_cpu_mem_usage=True)
    except KeyError as error:
        raise AdapterInvalid(f"it lacks the tensor {_plain(str(error.args[0]))}") from None
    except RuntimeError as error:
        raise AdapterInvalid(_mismatch(str(error))) from None
    except Exception as error:
        raise AdapterInvalid(f"its tensors do not fit the base: {first_sentence(error)}") from None
    if result.unexpected_keys:
        raise AdapterInvalid(
            f"its tensor {_plain(min(result.unexpected_keys))} matches no module of the base that adapter_config.json "
            f"names ({len(result.unexpected_keys)} such tensors)"
        )
    missing = [key for key in result.missing_keys if f".{NAME}" in key]
    if missing:
        raise AdapterInvalid(
            f"it lacks the tensor {_plain(min(missing))} of a module that adapter_config.json names "
            f"({len(missing)} such tensors)"
        )


def _stay(*_: Any, **__: Any) -> None:
    """Nothing moves."""


def _mismatch(text: str) -> str:
    match = _MISMATCH.search(text)
    if match is None:
        return f"its tensors do not fit the base: {text.strip().splitlines()[-1].strip()[:200]}"
    key, has, needs = match.groups()
    return f"made for another base or rank: {_plain(key)} has shape {has}, here it must have {needs}"


def _plain(key: str) -> str:
    return key.removeprefix(_PREFIX).replace(f".{NAME}", "")[:200]


def _layers(wrapped: PeftModel, names: dict[int, str]) -> Iterator[Found]:
    for module in wrapped.modules():
        if isinstance(module, LoraLayer):
            if NAME in module.scaling:
                yield _layer(module, names)
        elif isinstance(module, ModulesToSaveWrapper):
            yield _saved(module, names)


def _layer(layer: Any, names: dict[int, str]) -> Found:
    base = layer.get_base_layer()
    name = names[id(base)]
    found = Found(name, "linear", layer.r[NAME], float(layer.scaling[NAME]))
    if isinstance(layer, ParamWrapper):
        return _parameter(layer, base, found)
    variant = layer.lora_variant.get(NAME)
    if variant is not None and NAME not in layer.lora_magnitude_vector:
        raise NotServed(f"{type(variant).__name__} on {name} is not served")
    if isinstance(layer, Embedding):
        if variant is not None:
            raise NotServed(f"DoRA on the embedding {name} is not served")
        return replace(
            found,
            kind="embedding",
            scaling=found.scaling * float(getattr(base, "scalar_embed_scale", 1.0)),
            a=layer.lora_embedding_A[NAME],
            b=layer.lora_embedding_B[NAME],
        )
    if not isinstance(layer, Linear) or isinstance(layer, Conv2d | Conv3d):
        raise NotServed(f"an adapter on {name}, a {type(base).__name__}, is not served")
    return replace(
        found,
        a=layer.lora_A[NAME].weight,
        b=layer.lora_B[NAME].weight,
        b_bias=layer.lora_B[NAME].bias,
        magnitude=None if variant is None else layer.lora_magnitude_vector[NAME].weight,
    )


def _parameter(layer: Any, base: nn.Module, found: Found) -> Found:
    """A parameter that is targeted itself: the stacked weights of experts, or those of what chooses among them."""
    name = f"{found.module}.{layer.parameter_name}"
    if layer.get_param().dim() == 2 and layer.parameter_name == "weight":
        kind = "linear" if isinstance(base, nn.Linear) else "router"
        return replace(found, kind=kind, a=layer.lora_A[NAME].weight, b=layer.lora_B[NAME].weight)
    if layer.get_param().dim() != 3:
        raise NotServed(f"an adapter on the parameter {name} is not served")
    return replace(
        found,
        module=name,
        kind="experts",
        num_experts=layer.num_experts,
        a=layer.lora_A[NAME].weight,
        b=layer.lora_B[NAME].weight,
    )


def _saved(wrapper: Any, names: dict[int, str]) -> Found:
    name = names[id(wrapper.original_module)]
    module = wrapper.modules_to_save[NAME]
    if set(dict(module.named_parameters())) - {"weight", "bias"}:
        raise NotServed(f"`modules_to_save` with {name}, a {type(module).__name__}, is not served")
    kind = "replace" if isinstance(module, nn.Linear | nn.Embedding) else "other"
    return Found(name, kind, weight=getattr(module, "weight", None), new_bias=getattr(module, "bias", None))


def _replaced(network: Any, names: dict[int, str], own: set[int], wrapped: PeftModel) -> Iterator[Found]:
    """The base's own parameters that the adapter's file brought again: biases, embeddings saved beside."""
    inside = {
        id(each)
        for module in wrapped.modules()
        if isinstance(module, ModulesToSaveWrapper)
        for each in module.modules_to_save.modules()
    }
    for module in network.modules():
        if id(module) not in names or id(module) in inside:
            continue
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in own:
                continue
            yield _replacement(module, names[id(module)], key, parameter)


def _replacement(module: nn.Module, name: str, key: str, parameter: torch.Tensor) -> Found:
    if key == "weight":
        return Found(name, "replace" if isinstance(module, nn.Linear | nn.Embedding) else "other", weight=parameter)
    if key == "bias":
        return Found(name, "linear" if isinstance(module, nn.Linear | Conv1D) else "other", new_bias=parameter)
    raise NotServed(f"another value of {name}.{key} is not served")


def _joined(first: Found, second: Found) -> Found:
    """Of one module: the factors of the one with bias or weight of the other."""
    return replace(
        first,
        new_bias=second.new_bias if first.new_bias is None else first.new_bias,
        weight=second.weight if first.weight is None else first.weight,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT warns of what is refused here or means nothing without training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_sentence(error: BaseException) -> str:
    """An error of a library, as the end of a sentence of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[.!?])\s", text)[0].rstrip(".")[:240]
