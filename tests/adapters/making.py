"""Adapters made by PEFT on tiny models, and a base that computes by a served layout: two ways to the same logits.

The second shares no code with the shard: it is the definition of the layout, in hooks.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from lorikeet.adapters.formats import configuration, layout
from lorikeet.adapters.formats import weights as weight_files
from lorikeet.adapters.formats.base_model import BaseValues, Skeleton
from lorikeet.adapters.formats.changes import PlannedReader
from lorikeet.proto.digest import base_hash, weights_hash

LIMIT = 1 << 30
ALL_KINDS = frozenset({"linear", "embedding", "experts", "router", "norm", "virtual"})
TOKENS = torch.arange(2, 42).reshape(2, 20) * 7 % 300


def load_base(folder: Path) -> Any:
    """The base in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def make_adapter(base: Path, folder: Path, config: peft.LoraConfig, seed: int = 3) -> Path:
    """Have PEFT save an adapter with random weights that change the logits. Returns its folder."""
    torch.manual_seed(seed)
    config.init_lora_weights = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        model = peft.get_peft_model(load_base(base), config)
        randomise(model, config)
        model.save_pretrained(folder)
    return folder


def randomise(model: Any, config: peft.LoraConfig) -> None:
    """Values of the size that training gives, other biases where the adapter trains them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "lora_embedding_A" in name or ("lora_" in name and name.endswith("bias")):
                parameter.normal_(std=0.5)
            elif "lora_B" in name or "lora_embedding_B" in name:
                parameter.normal_(std=0.5 * parameter.shape[-1] ** -0.5)
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter.requires_grad and "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for module in model.modules():
            bias = getattr(module, "bias", None)
            if config.bias == "all" and isinstance(module, nn.Linear | Conv1D) and bias is not None:
                bias.add_(0.2 * torch.randn_like(bias))
            if config.bias == "lora_only" and isinstance(module, LoraLayer):
                own = getattr(module.get_base_layer(), "bias", None)
                if own is not None:
                    own.add_(0.2 * torch.randn_like(own))


def logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """[2, 20, V]."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


def of_peft(base: Path, folder: Path) -> torch.Tensor:
    """What PEFT computes with the adapter in `folder`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        return logits(peft.PeftModel.from_pretrained(load_base(base), folder).eval())


def make_reader(base: Path) -> tuple[PlannedReader, layout.Base]:
    """What lays adapters out for a base, in float32."""
    skeleton = Skeleton(base)
    limit = configuration.MOST_RANK["cpu"]
    facts = layout.Base(base_hash(base), weights_hash(base), torch.float32, ALL_KINDS, BaseValues(skeleton), limit)
    return PlannedReader(skeleton), facts


def lay_out(reader: PlannedReader, facts: layout.Base, folder: Path) -> layout.ServedLayout:
    """The served layout of the adapter in `folder`."""
    values = configuration.parse(weight_files.read_small(folder / "adapter_config.json"))
    with weight_files.opened(folder, LIMIT) as opened:
        return detached(layout.lay_out(layout.decide(reader.read(values, opened), facts), facts))


def detached(served: layout.ServedLayout) -> layout.ServedLayout:
    """The same without the mapped file."""
    return layout.ServedLayout({name: tensor.clone() for name, tensor in served.tensors.items()}, served.modules)


def read_served(path: Path) -> layout.ServedLayout:
    """The served layout in a file."""
    with safe_open(path, framework="pt") as file:
        modules: dict[str, dict[str, Any]] = json.loads(file.metadata()["modules"])
        return layout.ServedLayout({name: file.get_tensor(name) for name in file.keys()}, modules)  # noqa: SIM118


def of_layout(base: Path, served: layout.ServedLayout) -> torch.Tensor:
    """What the base computes with a served layout."""
    model = load_base(base)
    with applied(model, served):
        return logits(model)


@contextmanager
def applied(model: Any, served: layout.ServedLayout) -> Iterator[None]:
    """Inside, `model` computes with the adapter."""
    hooks = []
    named = dict(model.named_modules())
    for module, facts in served.modules.items():
        parts = {part: served.tensors[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in served.tensors}
        if facts["kind"] == "experts":
            parameter = model.get_parameter(module)
            delta = parts["B"] @ parts["A"]
            with torch.no_grad():
                parameter += delta if parameter.shape == delta.shape else delta.transpose(1, 2)
            continue
        target = named[module]
        if facts["kind"] == "router":
            with torch.no_grad():
                target.weight += parts["B"] @ parts["A"]
            continue
        hooks.append(target.register_forward_hook(_hook(target, parts)))
    yield
    for hook in hooks:
        hook.remove()


PARTS = ("A", "B", "magnitude", "scale", "bias")


def _hook(target: nn.Module, parts: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
    if isinstance(target, nn.Embedding):
        return lambda module, inputs, output: _embedded(inputs[0], output, parts)
    if not isinstance(target, nn.Linear | Conv1D):
        return lambda module, inputs, output: _normed(module, output, parts)
    weight = target.weight.detach()
    return lambda module, inputs, output: _linear(
        weight if isinstance(target, nn.Linear) else weight.t(), target.bias, inputs[0], parts
    )


def _embedded(ids: torch.Tensor, output: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return output + parts["A"].t()[ids] @ parts["B"].t() if "A" in parts else output


def _normed(module: Any, output: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    bias = getattr(module, "bias", None)
    bias = torch.zeros(()) if bias is None else bias
    return parts["scale"] * (output - bias) + bias + parts.get("bias", torch.zeros(()))


def _linear(
    weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, parts: dict[str, torch.Tensor]
) -> torch.Tensor:
    if "A" in parts:
        weight = weight + parts["B"] @ parts["A"]
    if "magnitude" in parts:
        weight = weight * (parts["magnitude"] / weight.norm(dim=1))[:, None]
    y = x @ weight.t() * parts.get("scale", torch.ones(()))
    for part in (bias, parts.get("bias")):
        y = y if part is None else y + part
    return y
