"""Types of adapters other than LoRA as factors: PEFT loads them, and its own code says what each module computes.

Where a module computes `W x + D x + c`, products with a few vectors give D's factors and c, in float64, whatever the
type's parameters are. A module that is not linear in x is found by comparing both on other vectors, and refused.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.ia3.layer import IA3Layer
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorikeet.adapters.errors import AdapterInvalid, NotServed, first_line
from lorikeet.adapters.formats.base_model import BaseValues
from lorikeet.adapters.formats.kinds import CONVERT

NAME = "default"
_FIRST_RANK = 16
_NUM_CHECKED = 8
_NOTHING = 1e-10
"""Largest norm, relative to the module's own, of a product that is only rounding in float64."""
_KEPT = 1e-6
"""Least singular value that is kept, relative to the largest: below are float32's roundings of the type's own code."""
_LINEAR = 1e-5
"""Largest relative difference from what the factors compute."""

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Folded:
    """What an adapter adds to one module."""

    module: str
    is_embedding: bool
    # [rank, in] and [out, rank] float32; None if it adds no product
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    # [out] float32, added to the output; None if nothing is
    bias: torch.Tensor | None = None
    # [out] float32: factors of the output
    scale: torch.Tensor | None = None


def materialise(network: nn.Module, values: BaseValues | None, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give the network, which is without weights, those of the base that the adapter's tensors name; others, and all
    without `values`, are zeros that take no memory. Raises NotServed if the checkpoint stores them in another form.
    """
    named = {part for key in tensors for part in _prefixes(key)}
    for name, module in network.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if values is not None and name in named:
                data = values[f"{name}.{key}"].to(torch.float32, copy=True)  # a view would hold the whole file
            else:
                data = torch.zeros(()).expand(parameter.shape)
            module._parameters[key] = nn.Parameter(data, requires_grad=False)


def _prefixes(key: str) -> Iterator[str]:
    parts = key.removeprefix("base_model.model.").split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def inject(network: nn.Module, peft_type: str, settings: dict[str, Any]) -> PeftModel:
    """The network with the adapter's modules. Raises what PEFT raises."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft_type](**{**settings, "task_type": None, "inference_mode": True})
    return PeftModel(network, config, NAME, autocast_adapter_dtype=False).eval()


def shape(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer or an embedding."""
    first, second = module.weight.shape
    return (second, first) if isinstance(module, Conv1D | nn.Embedding) else (first, second)


def not_loaded(wrapped: PeftModel, keys: list[str], has_seeds: bool = True) -> list[str]:
    """The keys whose parameters no file had under another name either: several names may share one.

    `has_seeds`: whether PEFT makes some again from the seed in the configuration, which are buffers, and has others
    that it does not save.
    """
    unread = set(keys)
    saved = {name for layer in wrapped.modules() for name in getattr(layer, "adapter_layer_names", ())}
    parameters = dict(wrapped.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in unread}
    lacking = {key for key in keys if key not in parameters or id(parameters[key]) not in loaded}
    of_adapter = {key for key in lacking if key in parameters and saved.intersection(key.split("."))}
    return sorted(of_adapter if has_seeds else lacking)


def fold(wrapped: PeftModel, names: Mapping[int, str], values: BaseValues | None) -> Iterator[Folded]:
    """What each module of a loaded adapter adds. `names`: of the base's modules, by identity; `values`: of the base, if
    `materialise` had them. Raises AdapterInvalid or NotServed.
    """
    modules = {name: module for module in wrapped.modules() if (name := names.get(id(module))) is not None}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layer in list(wrapped.modules()):
            if isinstance(layer, TrainableTokensLayer) or not isinstance(layer, BaseTunerLayer):
                continue
            base: Any = layer.get_base_layer()
            name = names[id(base)]
            if not isinstance(base, nn.Linear | Conv1D | nn.Embedding):
                raise NotServed(f"an adapter on {name}, a {type(base).__name__}, is not served")
            if isinstance(layer, IA3Layer):
                yield _scaled(layer, base, name, modules)
            else:
                yield _folded(layer, base, name, values)


def _folded(layer: Any, base: Any, name: str, values: BaseValues | None) -> Folded:
    if values is not None and not any(base.weight.stride()):
        raise AdapterInvalid(f"it lacks the tensors of {name}, which adapter_config.json names")
    own = (base.weight if values is None else values[f"{name}.weight"]).double()
    layer.double()
    try:
        if isinstance(base, nn.Embedding):
            rows = layer(torch.arange(base.num_embeddings)) - own * float(getattr(base, "scalar_embed_scale", 1.0))
            num_in, num_out = rows.shape
            return Folded(name, True, *factor(lambda x: x @ rows, num_in, num_out, float(own.norm())))
        own = own.t() if isinstance(base, nn.Linear) else own
        bias = layer(torch.zeros(1, own.shape[0], dtype=torch.float64))[0]
        num_in, num_out = own.shape
        factors = factor(lambda x: layer(x) - bias - x @ own, num_in, num_out, float(own.norm()))
    except ArithmeticError as error:
        raise NotServed(f"its change to {name} {error}: {CONVERT}") from None
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise NotServed(f"PEFT does not compute {name} alone: {first_line(error)[:200]}") from None
    added = bias if base.bias is None else bias - base.bias
    return Folded(name, False, *factors, bias=added.float() if bool(added.any()) else None)


def factor(product: Product, num_in: int, num_out: int, norm: float) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Factors A: [rank, in] and B: [out, rank] of a linear map, which is given by its product with rows, [rows, in] →
    [rows, out] float64: its range from products with random rows (Halko et al. 2011), its rows from their gradients. A
    map of nearly full rank is its own factor, next to the identity.

    None for a map that is zero next to weights of that norm. Raises ArithmeticError with the end of a sentence.
    """
    generator = torch.Generator().manual_seed(0)
    checked = torch.randn(_NUM_CHECKED, num_in, dtype=torch.float64, generator=generator)
    expected = product(checked)
    if float(expected.norm()) <= _NOTHING * max(norm, 1.0):
        return None, None
    most, count = min(num_in, num_out), _FIRST_RANK
    while count < most:
        rows = torch.randn(2 * count, num_in, dtype=torch.float64, generator=generator)
        _, sizes, directions = torch.linalg.svd(product(rows), full_matrices=False)
        b = directions[: int((sizes > sizes[0] * _KEPT).sum())].t().contiguous()
        with torch.enable_grad():
            x = torch.zeros(b.shape[1], num_in, dtype=torch.float64, requires_grad=True)
            (a,) = torch.autograd.grad(product(x), x, b.t().contiguous())
        if float((expected - checked @ a.t() @ b.t()).norm() / expected.norm()) <= _LINEAR:
            return a.float(), b.float()
        count *= 4
    whole = product(torch.eye(num_in, dtype=torch.float64)).t()
    if float((expected - checked @ whole.t()).norm() / expected.norm()) > _LINEAR:
        raise ArithmeticError("is not linear in its input")
    unit = torch.eye(most)
    return (unit, whole.float()) if num_in <= num_out else (whole.float(), unit)


_GATED = {
    frozenset(("gate_proj", "up_proj", "down_proj")): "up_proj",
    frozenset(("gate_up_proj", "down_proj")): "gate_up_proj",
}
"""Linear layers of a feed-forward that multiplies a gate by the outputs of another layer, before `down_proj`."""


def _scaled(layer: Any, base: Any, name: str, modules: Mapping[str, nn.Module]) -> Folded:
    """IA³ (Liu et al. 2022): factors of the outputs, the bias included. Those of the inputs of a gated feed-forward's
    last layer are factors of the outputs that the gate is multiplied by.
    """
    scale = layer.ia3_l[NAME].detach().float().reshape(-1)
    if not layer.is_feedforward and not isinstance(base, nn.Embedding):
        return Folded(name, False, scale=scale)
    block, _, last = name.rpartition(".")
    parts = dict(modules[block].named_children()) if block in modules else {}
    linear = {child for child, module in parts.items() if next(module.parameters(), None) is not None}
    source = _GATED.get(frozenset(linear))
    if source is None or last != "down_proj":
        raise NotServed(f"IA³ on the inputs of {name} is not served")
    width = scale.numel()
    if source == "gate_up_proj":  # the gate comes first
        scale = torch.cat([torch.ones(width), scale])
    return Folded(f"{block}.{source}", False, scale=scale)
