"""Reads adapters of one base, and caches how PEFT read one for others with equal settings and shapes.

Many adapters of a base are trained with the same settings, so PEFT's result differs in the numbers only. A cached plan
lists which tensor of the file goes where; there is one only if PEFT changed none of the tensors.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lorikeet.adapters.formats import configuration
from lorikeet.adapters.formats.peft_reading import TENSORS, ModuleChange, Tensors, read
from lorikeet.adapters.formats.skeleton import Skeleton
from lorikeet.adapters.formats.weights import Weights
from lorikeet.proto.pooling import EMBED

_MAX_PLANS = 256


@dataclass(frozen=True, slots=True)
class _PlannedChange:
    """One module: the result without tensors, and the file's tensor for each field."""

    change: ModuleChange
    keys: dict[str, str]


class PlannedReader:
    """`peft_reading.read` for one base, with cached plans."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
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
