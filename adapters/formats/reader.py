"""Reads adapters of one base, and remembers how PEFT read one, for the next of the same form.

Many adapters of a base are trained with the same settings: then PEFT would say the same again of other numbers. What
is remembered is which tensor of the file went where, and only where PEFT changed none of them.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lorikeet.adapters.formats import configuration
from lorikeet.adapters.formats.reading import TENSORS, Found, Tensors, read
from lorikeet.adapters.formats.skeleton import Skeleton
from lorikeet.adapters.formats.weights import Weights

_MOST_PLANS = 256


@dataclass(frozen=True, slots=True)
class _Step:
    """One module: what is known without the tensors, and which of the file's tensors each field is."""

    found: Found
    keys: dict[str, str]


class Reader:
    """`read` for one base after another adapter."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self._plans: OrderedDict[bytes, list[_Step]] = OrderedDict()

    def warm(self) -> None:
        """Read a made-up adapter: what PEFT loads and looks up at first use is then there for all that follow."""
        with self.skeleton.lent() as network:
            linears = ((name, each) for name, each in network.named_modules() if isinstance(each, torch.nn.Linear))
            name, linear = next(linears, (None, None))
        if name is None or linear is None:
            return
        num_out, num_in = linear.weight.shape
        key = f"base_model.model.{name}"
        tensors = {f"{key}.lora_A.weight": torch.zeros(1, num_in), f"{key}.lora_B.weight": torch.zeros(num_out, 1)}
        read(self.skeleton, {"r": 1, "target_modules": [name]}, tensors)

    def read(self, values: dict[str, Any], weights: Weights) -> list[Found]:
        """What the adapter does to each module. `values` is its configuration, as `configuration.parse` gave it."""
        settings = configuration.served(values)
        form = _form(settings, weights.tensors)
        plan = self._plans.get(form)
        if plan is not None:
            self._plans.move_to_end(form)
            return [_filled(step, weights.tensors) for step in plan]
        found = read(self.skeleton, settings, weights.tensors)
        plan = _plan(found, weights.tensors) if weights.are_apart else None
        if plan is not None:
            self._plans[form] = plan
            if len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        return found


def _filled(step: _Step, tensors: Tensors) -> Found:
    values: dict[str, Any] = {field: tensors[key] for field, key in step.keys.items()}
    return replace(step.found, **values)


def _form(settings: dict[str, Any], tensors: Tensors) -> bytes:
    """What PEFT goes by: the settings, and names and shapes of the tensors."""
    shapes = sorted([key, *tensor.shape] for key, tensor in tensors.items())
    return hashlib.sha256(json.dumps([settings, shapes], sort_keys=True).encode()).digest()


def _plan(found: Sequence[Found], tensors: Tensors) -> list[_Step] | None:
    """None where a tensor of the result is not one of the file's, as it lies there."""
    keys = {tensor.data_ptr(): key for key, tensor in tensors.items()}
    steps = []
    for each in found:
        chosen: dict[str, str] = {}
        for field in TENSORS:
            tensor = getattr(each, field)
            if tensor is None:
                continue
            key = keys.get(tensor.data_ptr())
            if key is None or tensors[key].shape != tensor.shape or tensors[key].stride() != tensor.stride():
                return None
            chosen[field] = key
        empty: dict[str, Any] = dict.fromkeys(chosen)
        steps.append(_Step(replace(each, **empty), chosen))
    return steps
