"""An adapter's changes to its base, as PEFT reads them (`read`, `PlannedReader`) and merges them (`merge`).

PEFT matches the targets, converts the names and sets ranks and scalings. This module rejects what PEFT would ignore.
"""

import hashlib
import json
import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.tuners.lora.layer import Conv2d, Conv3d, Embedding, Linear, LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING
from peft.utils.merge_utils import dare_linear, dare_ties, task_arithmetic, ties
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorikeet.adapters.errors import AdapterError, AdapterInvalid, NotServed
from lorikeet.adapters.formats import configuration, folding, norms, vocabulary
from lorikeet.adapters.formats.base_model import BaseValues, Skeleton
from lorikeet.adapters.formats.configuration import MAX_RANK
from lorikeet.adapters.formats.kinds import Kind, kind_of
from lorikeet.adapters.formats.weights import Weights, check_floating, is_finite, not_finite
from lorikeet.adapters.refs import Merge
from lorikeet.proto.pooling import EMBED

NAME = "default"
"""The adapter's name in PEFT's network: PEFT's own default, which some files contain in the names of their tensors."""
_PREFIX = "base_model.model."
_LARGEST = 1 << 20
MAX_VIRTUAL = 4096
"""Virtual tokens of an adapter."""
_WITH_NAME = re.compile(rf"\.{NAME}(?=\.\w+$|$)")
_MISMATCH = re.compile(r"size mismatch for (\S+?): .*?torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """An adapter's change to one module of the base. Tensors are those of the file, or made of them."""

    module: str
    kind: str
    """linear, embedding, experts, router, norm, virtual (tokens before the prompt); or other, which must equal the
    base's.
    """
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
    # replaces the base's weight, in its shape, or the rows of `row_ids`
    weight: torch.Tensor | None = None
    weight_scaling: float = 1.0
    """What the new weight is multiplied by."""
    weight_offset: float = 0.0
    """What a norm adds to its weight."""
    # [out]: factors of the module's output, its bias included
    scale: torch.Tensor | None = None
    # [tokens, H]: embeddings of virtual tokens before the prompt
    virtual: torch.Tensor | None = None
    # [layers, 2, tokens, heads, dim]: keys and values of virtual tokens, in place of those of their embeddings
    prefix: torch.Tensor | None = None
    row_ids: tuple[int, ...] = ()
    """The rows that `weight` replaces; empty for all."""
    num_rows: int = 0
    """Of the base's weight, where `weight` replaces some."""


TENSORS = ("a", "b", "magnitude", "b_bias", "new_bias", "weight", "scale", "virtual", "prefix")
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
        wrapped = _inject(network, configuration)
        _load(wrapped, tensors)
        changes = [*_layers(wrapped, names), *_replaced(network, names, skeleton.parameter_ids(), wrapped)]
    return _by_module(changes)


def _by_module(changes: Sequence[ModuleChange]) -> list[ModuleChange]:
    """One change for each module."""
    joined: dict[str, ModuleChange] = {}
    for change in changes:
        earlier = joined.get(change.module)
        joined[change.module] = change if earlier is None else _joined(earlier, change)
    return list(joined.values())


def read_folded(
    skeleton: Skeleton, settings: dict[str, Any], kind: Kind, peft_type: str, weights: Weights, base: BaseValues
) -> list[ModuleChange]:
    """Read an adapter of a type that is not LoRA. Without values of the weights, changes have shapes only."""
    has_base = kind.reads_base and weights.has_values
    if has_base:
        base.locate()  # which borrows the network
    with skeleton.borrowed() as network, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {id(module): name for name, module in network.named_modules()}
        settings = dict(settings)
        tensors, own = _without_own(network, weights.tensors, settings.pop("modules_to_save", ()))
        _check_names(tensors)
        if weights.has_values:
            _check_finite(tensors)
        folding.materialise(network, base if has_base else None, tensors)
        wrapped = _injected(lambda: folding.inject(network, peft_type, settings))
        _load(wrapped, tensors, is_meta=False)
        if weights.has_values:
            folded = folding.fold(wrapped, names, base if has_base else None)
            added = [_of_folded(change) for change in folded]
        else:
            layers = (layer.get_base_layer() for layer in wrapped.modules() if isinstance(layer, BaseTunerLayer))
            added = [_unread(names[id(layer)], layer) for layer in layers]
        saved = list(_saved_and_tokens(wrapped, names))
        parameters = [
            _replacement(network.get_submodule(name), name, key, tensor) for (name, key), tensor in own.items()
        ]
    return _by_module([*added, *saved, *parameters])


def read_norms(skeleton: Skeleton, settings: dict[str, Any], tensors: Tensors) -> list[ModuleChange]:
    """Read new weights of norms, and of other modules. Raises AdapterInvalid or NotServed."""
    check_floating(tensors)
    with skeleton.borrowed() as network, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {id(module): name for name, module in network.named_modules()}
        _check_names(tensors)
        wrapped = _injected(lambda: folding.inject(network, "LN_TUNING", settings))
        _load(wrapped, tensors)
        changes: list[ModuleChange] = []
        for layer in wrapped.modules():
            if isinstance(layer, LNTuningLayer):
                changes += _new_module(names[id(layer.get_base_layer())], layer.ln_tuning_layers[NAME])
        return _by_module([*changes, *_saved_and_tokens(wrapped, names)])


_EMBEDDINGS = "prompt_embeddings"


def _of_one_task(settings: dict[str, Any], tensors: Tensors) -> Tensors:
    """The embeddings of multitask prompt tuning with one task (Wang et al. 2023); those of other types as they are.

    Raises AdapterInvalid or NotServed.
    """
    if "num_tasks" not in settings:
        return tensors
    if settings["num_tasks"] != 1:
        raise NotServed(
            "several tasks in one adapter (`num_tasks`) are not served, as a request cannot name its task: make one "
            "for each, with PEFT's `prompt_tuning_init` EXACT_SOURCE_TASK and `num_tasks` 1"
        )
    names = _EMBEDDINGS, "prefix_task_cols", "prefix_task_rows"
    if set(tensors) != set(names):
        raise AdapterInvalid(f"it must have three tensors, {', '.join(f'`{name}`' for name in names)}")
    check_floating(tensors)
    values, columns, rows = (tensors[name].float() for name in names)
    num_ranks = columns.shape[-1] if columns.dim() else 0
    if columns.shape != (1, *values.shape[:1], num_ranks) or rows.shape != (1, num_ranks, *values.shape[1:]):
        raise AdapterInvalid(f"the shapes of {', '.join(f'`{name}`' for name in names)} do not fit each other")
    return {_EMBEDDINGS: values * (columns[0] @ rows[0])}


def read_virtual(skeleton: Skeleton, settings: dict[str, Any], tensors: Tensors, is_prefix: bool) -> ModuleChange:
    """Read embeddings that PEFT puts before those of the prompt, or keys and values. Raises AdapterInvalid or
    NotServed.
    """
    if skeleton.task is not None:
        raise NotServed("virtual tokens are served with generating models only")
    if settings.get("num_transformer_submodules") not in (None, 1):
        raise NotServed("virtual tokens for an encoder and a decoder are not served")
    if settings.get("modules_to_save"):
        raise NotServed("`modules_to_save` together with virtual tokens is not served")
    tensors = _of_one_task(settings, tensors)
    if set(tensors) != {_EMBEDDINGS}:
        raise AdapterInvalid(f"it must have one tensor, `{_EMBEDDINGS}`")
    check_floating(tensors)
    with skeleton.borrowed() as network:
        names = {id(module): name for name, module in network.named_modules()}
        embedding = network.get_input_embeddings()
        name, num_out = names[id(embedding)], embedding.weight.shape[1]
    count, values = settings.get("num_virtual_tokens"), tensors[_EMBEDDINGS]
    if type(count) is not int or not 1 <= count <= MAX_VIRTUAL:
        raise AdapterInvalid(f"`num_virtual_tokens` is {count}; it must be from 1 to {MAX_VIRTUAL}")
    if not is_prefix:
        _check_values(values, (count, num_out))
        return ModuleChange(name, "virtual", virtual=values)
    config = skeleton.config
    if config.model_type in TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING:
        raise NotServed(f"keys and values before the prompt are not served with {config.model_type}")
    num_layers, num_heads, width = (
        _number(settings, key) for key in ("num_layers", "num_attention_heads", "token_dim")
    )
    if num_layers != config.num_hidden_layers or width % num_heads:
        raise AdapterInvalid(
            f"it was made for {num_layers} layers with {num_heads} heads; the base has {config.num_hidden_layers}"
        )
    _check_values(values, (count, num_layers * 2 * width))
    # PEFT's order of values: layer, key or value, head
    prefix = values.view(count, num_layers, 2, num_heads, width // num_heads).permute(1, 2, 0, 3, 4)
    return ModuleChange(name, "virtual", virtual=torch.zeros(count, num_out), prefix=prefix)


def _check_values(values: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(values.shape) != shape:
        raise AdapterInvalid(f"`{_EMBEDDINGS}` has the shape {list(values.shape)}, but must have {list(shape)}")


def _number(settings: dict[str, Any], key: str) -> int:
    """Raises AdapterInvalid."""
    value = settings.get(key)
    if type(value) is not int or not 1 <= value <= _LARGEST:
        raise AdapterInvalid(f"`{key}` is {str(value)[:40]}; it must be a whole number from 1 to {_LARGEST}")
    return value


def _check_finite(tensors: Tensors) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise AdapterInvalid(not_finite(_plain(key), False, tensor.dtype))


def _without_own(
    network: Any, tensors: Tensors, saved: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[tuple[str, str], torch.Tensor]]:
    """The tensors without the base's own parameters, and those by module and name. `saved`: `modules_to_save`.

    Raises AdapterInvalid if one of those modules is not among them.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))
    rest, own = {}, {}
    keys: dict[str, str] = {}
    for key, tensor in tensors.items():
        name = _WITH_NAME.sub(
            "", key.removeprefix(_PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        )
        if name in parameters:
            module, _, parameter = name.rpartition(".")
            _note(keys, name, key)
            own[module, parameter] = tensor
        else:
            rest[key] = tensor
    for name in saved:
        if not any(module == name or module.endswith(f".{name}") for module, _ in own):
            raise AdapterInvalid(f"it lacks the tensors of {name[:200]}, which `modules_to_save` names")
    return rest, own


def _of_folded(folded: folding.Folded) -> ModuleChange:
    rank = 0 if folded.a is None else folded.a.shape[0]
    kind = "embedding" if folded.is_embedding else "linear"
    return ModuleChange(folded.module, kind, rank, a=folded.a, b=folded.b, b_bias=folded.bias, scale=folded.scale)


def _unread(name: str, module: nn.Module) -> ModuleChange:
    """A change of unknown rank, of zeros that take no memory."""
    num_out, num_in = folding.shape(module)
    kind = "embedding" if isinstance(module, nn.Embedding) else "linear"
    return ModuleChange(name, kind, 1, a=torch.zeros(()).expand(1, num_in), b=torch.zeros(()).expand(num_out, 1))


def _inject(network: Any, configuration: dict[str, Any]) -> PeftModel:
    values = {**configuration, "task_type": None, "inference_mode": True, "lora_dropout": 0.0}
    values["init_lora_weights"] = False  # the file has the values, and none can be drawn on the meta device
    return _injected(
        lambda: PeftModel(network, LoraConfig(**values), NAME, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    )


def _injected(inject: Callable[[], PeftModel]) -> PeftModel:
    """Raises AdapterInvalid or NotServed with PEFT's reason."""
    try:
        return inject()
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
        _note(parameters, _WITH_NAME.sub("", key).removesuffix(".weight"), key)


def _note(keys: dict[str, str], parameter: str, key: str) -> None:
    """Add the name that the file has for a parameter. Raises AdapterInvalid if there is another one."""
    first = keys.setdefault(parameter, key)
    if first != key:
        raise AdapterInvalid(f"its tensors {first[:200]} and {key[:200]} are values of one parameter")


def _load(wrapped: PeftModel, tensors: Tensors, is_meta: bool = True) -> None:
    """`is_meta`: whether the base has no values, so that the adapter's modules have none yet either."""
    for module in wrapped.modules():
        if is_meta and isinstance(module, BaseTunerLayer):
            # PEFT would move tensors to the base's device, which is meta
            module._move_adapter_to_device_of_base_layer = lambda *_, **__: None
    try:
        result = set_peft_model_state_dict(wrapped, dict(tensors), adapter_name=NAME, low_cpu_mem_usage=is_meta)
    except KeyError as error:
        raise AdapterInvalid(f"it lacks the tensor {_plain(str(error.args[0]))}") from None
    except RuntimeError as error:
        raise AdapterInvalid(_mismatch(str(error))) from None
    except Exception as error:
        raise AdapterInvalid(f"its tensors do not fit the base: {first_sentence(error)}") from None
    if result.unexpected_keys:
        problem = f"its tensor {_plain(min(result.unexpected_keys))} matches no module of the base that"
        raise AdapterInvalid(f"{problem} adapter_config.json names ({len(result.unexpected_keys)} such tensors)")
    missing = [key for key in result.missing_keys if f".{NAME}" in key]
    if missing := folding.not_loaded(wrapped, missing, has_seeds=not is_meta):
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
        if isinstance(module, LoraLayer) and NAME in module.scaling:
            yield _layer(module, names)
    yield from _saved_and_tokens(wrapped, names)


def _saved_and_tokens(wrapped: PeftModel, names: dict[int, str]) -> Iterator[ModuleChange]:
    """New modules (`modules_to_save`), and new rows of embeddings and of output heads that share them."""
    for module in wrapped.modules():
        if isinstance(module, ModulesToSaveWrapper):
            yield from _saved(module, names)
        elif isinstance(module, TrainableTokensLayer):
            yield _tokens(module, names)


def _tokens(layer: Any, names: dict[int, str]) -> ModuleChange:
    base, ids = layer.get_base_layer(), tuple(layer.token_indices[NAME])
    name = names[id(base)]
    num_rows = int(base.weight.shape[0])
    if not ids or len(set(ids)) < len(ids) or max(ids) >= num_rows:
        raise AdapterInvalid(f"its trained tokens of {name} are not different ids below {num_rows}")
    change = _new_weight(name, base, layer.trainable_tokens_delta[NAME])
    return replace(change, row_ids=ids, num_rows=num_rows)


def _new_weight(name: str, module: Any, weight: torch.Tensor) -> ModuleChange:
    kind = "linear" if isinstance(module, nn.Linear) else "embedding" if isinstance(module, nn.Embedding) else "other"
    if kind == "other" and (offset := norms.offset_of(module)) is not None:
        return ModuleChange(name, "norm", weight=weight, weight_offset=offset)
    return ModuleChange(name, kind, weight=weight, weight_scaling=_embed_scale(module))


def _embed_scale(module: Any) -> float:
    """What an embedding's rows are multiplied by."""
    return float(getattr(module, "scalar_embed_scale", 1.0))


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
        scaling = change.scaling * _embed_scale(base)
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
    yield from _new_module(names[id(wrapper.original_module)], wrapper.modules_to_save[NAME])


def _new_module(outer: str, saved: Any) -> Iterator[ModuleChange]:
    """What takes the place of a module of the base."""
    for inner, module in saved.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        name = f"{outer}.{inner}" if inner else outer
        if set(parameters) - {"weight", "bias"}:
            raise NotServed(f"`modules_to_save` with {name}, a {type(module).__name__}, is not served")
        if parameters:
            change = ModuleChange(name, "other")
            if "weight" in parameters:
                change = _new_weight(name, module, parameters["weight"])
            yield replace(change, new_bias=parameters.get("bias"))


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
        return _new_weight(name, module, parameter)
    if key == "bias":
        return ModuleChange(name, "linear" if isinstance(module, nn.Linear | Conv1D) else "other", new_bias=parameter)
    raise NotServed(f"replacing {name}.{key} is not served")


def _joined(first: ModuleChange, second: ModuleChange) -> ModuleChange:
    """Two changes of one module: the factors of the first with bias or weight of the second."""
    bias = second.new_bias if first.new_bias is None else first.new_bias
    scale = first.scale if second.scale is None else second.scale if first.scale is None else first.scale * second.scale
    of_weight = _with_rows(first, second)
    return replace(
        first,
        new_bias=bias,
        scale=scale,
        weight=of_weight.weight,
        weight_scaling=of_weight.weight_scaling,
        weight_offset=of_weight.weight_offset,
        row_ids=of_weight.row_ids,
        num_rows=of_weight.num_rows,
    )


def _with_rows(first: ModuleChange, second: ModuleChange) -> ModuleChange:
    """The change with the new weight of both: a whole one, in which rows may be replaced. Raises NotServed."""
    if first.weight is None or second.weight is None:
        return first if second.weight is None else second
    whole, some = (second, first) if first.row_ids else (first, second)
    if whole.row_ids or not some.row_ids:
        raise NotServed(f"two new weights of {first.module} are not served")
    weight = torch.as_tensor(whole.weight).detach().clone()
    weight[list(some.row_ids)] = torch.as_tensor(some.weight).detach().to(weight.dtype)
    return replace(whole, weight=weight)


def first_sentence(error: BaseException) -> str:
    """The first sentence of a library's error, to end one of our sentences."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[.!?])\s", text)[0].rstrip(".")[:240]


_MAX_PLANS = 256


@dataclass(frozen=True, slots=True)
class _PlannedChange:
    """One module: the result without tensors, and the file's tensor for each field."""

    change: ModuleChange
    keys: dict[str, str]


class PlannedReader:
    """Reads adapters of one base, and caches how PEFT read one for others with equal settings and shapes.

    Many adapters of a base are trained with the same settings, so PEFT's result differs in the numbers only. A cached
    plan lists which tensor of the file goes where; there is one only if PEFT changed none of the tensors.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self._base = BaseValues(skeleton)
        self._plans: OrderedDict[bytes, list[_PlannedChange]] = OrderedDict()

    def warm(self) -> None:
        """Read a made-up adapter, so that all imports and caches of PEFT's first use are done."""
        with self.skeleton.borrowed() as network:
            linears = (
                (name, module) for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)
            )
            name, linear = next(linears, (None, None))
        if name is None or linear is None:
            return
        num_out, num_in = linear.weight.shape
        key = f"base_model.model.{name}"
        tensors = {f"{key}.lora_A.weight": torch.zeros(1, num_in), f"{key}.lora_B.weight": torch.zeros(num_out, 1)}
        read(self.skeleton, {"r": 1, "target_modules": [name]}, tensors)

    def read(self, values: dict[str, Any], weights: Weights) -> list[ModuleChange]:
        """The adapter's changes per module. `values` is its configuration from `configuration.parse`."""
        settings = configuration.served(values)
        configuration.check_task(values, self.skeleton.task)
        if self.skeleton.task == EMBED and values.get("task_type") == configuration.CAUSAL_LM:
            weights = replace(weights, tensors=_without_head(weights.tensors, self.skeleton.model_prefix))
        if vocabulary.num_added(self.skeleton, weights.tensors) or self.skeleton.num_extra:
            weights = replace(weights, tensors=vocabulary.resized(self.skeleton, weights.tensors))
        kind = kind_of(values)
        if kind.how in ("virtual", "prefix"):
            return [read_virtual(self.skeleton, settings, weights.tensors, kind.how == "prefix")]
        if kind.how == "norms":
            return read_norms(self.skeleton, settings, weights.tensors)
        if kind.how != "lora":
            peft_type = str(values["peft_type"]).upper()
            return read_folded(self.skeleton, settings, kind, peft_type, weights, self._base)
        check_floating(weights.tensors)
        form = _form(settings, weights.tensors)
        if (plan := self._plans.get(form)) is not None:
            self._plans.move_to_end(form)
            return [_filled(step, weights.tensors) for step in plan]
        changes = read(self.skeleton, settings, weights.tensors)
        if (plan := _plan(changes, weights.tensors) if weights.share_no_memory else None) is not None:
            self._plans[form] = plan
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return changes


def _without_head(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """Named as in the base without its output head. An adapter on that head has no meaning, and is found unexpected."""
    start = "base_model.model."
    return {
        f"{start}{key.removeprefix(start).removeprefix(prefix)}" if key.startswith(start) else key: tensor
        for key, tensor in tensors.items()
    }


def _filled(step: _PlannedChange, tensors: Tensors) -> ModuleChange:
    values: dict[str, Any] = {field: tensors[key] for field, key in step.keys.items()}
    return replace(step.change, **values)


def _form(settings: dict[str, Any], tensors: Tensors) -> bytes:
    """Everything that PEFT's result depends on: the settings, and names and shapes of the tensors."""
    shapes = sorted([key, *tensor.shape] for key, tensor in tensors.items())
    return hashlib.sha256(json.dumps([settings, shapes], sort_keys=True).encode()).digest()


def _plan(changes: Sequence[ModuleChange], tensors: Tensors) -> list[_PlannedChange] | None:
    """None if a tensor of the result is not a tensor of the file, unchanged."""
    keys = {tensor.data_ptr(): key for key, tensor in tensors.items()}
    steps = []
    for change in changes:
        chosen: dict[str, str] = {}
        for field in TENSORS:
            if (tensor := getattr(change, field)) is None:
                continue
            key = keys.get(tensor.data_ptr())
            if key is None or tensors[key].shape != tensor.shape or tensors[key].stride() != tensor.stride():
                return None
            chosen[field] = key
        empty: dict[str, Any] = dict.fromkeys(chosen)
        steps.append(_PlannedChange(replace(change, **empty), chosen))
    return steps


_MERGED = ("linear", "embedding")


@dataclass(frozen=True)
class _WeightedChange:
    """One adapter's change to one module."""

    change: ModuleChange
    weight: float
    """Weight of the part's adapter in the merge."""

    @property
    def scale(self) -> float:
        return self.weight * self.change.scaling


def merge(adapters: Sequence[Sequence[ModuleChange]], merging: Merge, digest: str) -> list[ModuleChange]:
    """Merge adapters factor by factor: one list each, in the order of `merging.pins`.

    DARE's masks are drawn from the merge's digest, so that the same merge is the same adapter everywhere.
    Raises AdapterInvalid or NotServed with the reason.
    """
    modules: dict[str, list[_WeightedChange]] = {}
    for number, adapter in enumerate(adapters):
        for change in adapter:
            _check(change, str(merging.pins[number].id))
            modules.setdefault(change.module, []).append(_WeightedChange(change, merging.weights[number]))
    if merging.strategy != "cat":
        _check_ranks(adapters, merging)
    return [_merged(module, parts, merging, digest) for module, parts in sorted(modules.items())]


def _check(change: ModuleChange, name: str) -> None:
    if change.kind not in _MERGED or change.weight is not None:
        raise NotServed(
            f"merging adapters that change other than linear layers ({change.module} of {name}) is not served"
        )
    if change.scale is not None:
        raise NotServed(f"merging adapters that scale outputs ({change.module} of {name}) is not served")
    if change.magnitude is not None:
        raise NotServed(f"merging DoRA adapters ({name}) is not served")
    if change.b_bias is not None or change.new_bias is not None:
        raise NotServed(f"merging adapters with biases ({change.module} of {name}) is not served")


def _check_ranks(adapters: Sequence[Sequence[ModuleChange]], merging: Merge) -> None:
    ranks = [sorted({change.rank for change in adapter}) for adapter in adapters]
    if len({rank for module_ranks in ranks for rank in module_ranks}) > 1:
        pairs = zip(merging.pins, ranks, strict=True)
        named = ", ".join(f"{pin.id} has {' and '.join(map(str, module_ranks))}" for pin, module_ranks in pairs)
        raise AdapterInvalid(f"`{merging.strategy}` merges only adapters of equal rank: {named}; use `cat`")


def _merged(module: str, parts: list[_WeightedChange], merging: Merge, digest: str) -> ModuleChange:
    kinds = {part.change.kind for part in parts}
    if len(kinds) > 1:
        raise AdapterInvalid(f"the adapters contain different kinds of changes to {module}")
    every_a, every_b = _factors(parts)
    if merging.strategy == "cat":
        a = torch.cat([factor * part.scale for factor, part in zip(every_a, parts, strict=True)])
        b = torch.cat(every_b, dim=1)
    else:
        # the sign goes to one factor only, or it would cancel out
        roots = torch.tensor([math.sqrt(abs(part.scale)) for part in parts])
        signs = torch.tensor([1.0 if part.scale >= 0 else -1.0 for part in parts])
        a = _combined(every_a, roots * signs, merging, f"{digest} {module} A")
        b = _combined(every_b, roots, merging, f"{digest} {module} B")
    if a.shape[0] > MAX_RANK:
        raise AdapterInvalid(f"the merged adapter has rank {a.shape[0]} on {module}; the limit is {MAX_RANK}")
    return ModuleChange(module, kinds.pop(), rank=a.shape[0], a=a, b=b)


def _combined(tensors: list[torch.Tensor], weights: torch.Tensor, merging: Merge, seed: str) -> torch.Tensor:
    if merging.strategy == "linear":
        return task_arithmetic(tensors, weights)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # about a density of 1, which prunes nothing
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "little"))
        if merging.strategy == "dare_linear":
            return dare_linear(tensors, weights, merging.density)
        merged = ties if merging.strategy == "ties" else dare_ties
        return merged(tensors, weights, merging.density, merging.majority_sign_method)


def _factors(parts: list[_WeightedChange]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every A and every B in float32."""
    optional = [(part.change.a, part.change.b) for part in parts]
    pairs = [(a.float(), b.float()) for a, b in optional if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]
