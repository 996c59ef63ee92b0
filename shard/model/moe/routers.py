"""Routers of experts: modules of transformers that multiply by their weight themselves, with adapters on it."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lorikeet.shard.model.kernels.packing import multiply
from lorikeet.shard.model.lora.targets import LoraTarget, adapt_output

_MULTIPLIES = re.compile(r"\blinear\(.{0,200}?\bself\.weight\b", re.DOTALL)


class RouterWeight(torch.Tensor):
    """[experts, H] the weight of a router: torch's `linear` with it, or with a cast of it, adds the rows' adapters."""

    lorikeet_adapter: LoraTarget | None = None
    lorikeet_dtype = torch.float32
    """In which adapters are computed."""
    lorikeet_multiplies: Callable[..., torch.Tensor] = functional.linear

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        own = next((arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls)), None)
        if func is functional.linear and own is not None:
            return own._linear(*_plain(*args, **(kwargs or {})))
        result: Any = super().__torch_function__(func, types, tuple(args), kwargs or {})
        if own is not None and isinstance(result, cls):
            result.__dict__.update(own.__dict__)
        return result

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., H]. Returns [..., experts]."""
        y = self.lorikeet_multiplies(x, weight, bias)
        target = self.lorikeet_adapter
        if target is None or not len(target.rows):
            return y
        if y.dtype == self.lorikeet_dtype:
            y = y.contiguous()
            adapt_output(target, x.contiguous(), y)
            return y
        added = torch.zeros_like(y, dtype=self.lorikeet_dtype)
        adapt_output(target, x.to(self.lorikeet_dtype).contiguous(), added)
        return y + added


def _plain(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The arguments of `linear`, as plain tensors."""
    return input, weight.as_subclass(torch.Tensor), bias


def is_router(module: nn.Module) -> bool:
    """Whether a module that is no layer of torch's multiplies by its own matrix through torch's `linear`."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or isinstance(module, nn.Linear | Conv1D | nn.Embedding):
        return False
    try:
        return _MULTIPLIES.search(inspect.getsource(type(module).forward)) is not None
    except (OSError, TypeError):
        return False


def replace_router_weights(network: nn.Module, dtype: torch.dtype, is_packed: bool) -> None:
    """In every module that multiplies by a matrix and is no layer of torch's; `dtype` is that of adapters.

    `is_packed`: by products whose rows have the same bits in any batch, which torch's do not.
    """
    for module in network.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Linear | Conv1D | nn.Embedding):
            continue
        target: LoraTarget | None = getattr(module, "lorikeet_adapter", None)
        if target is None and not is_packed:
            continue
        del module.weight
        replaced = (weight.detach().clone() if is_packed else weight.detach()).as_subclass(RouterWeight)
        replaced.lorikeet_adapter, replaced.lorikeet_dtype = target, dtype
        replaced.lorikeet_multiplies = multiply if is_packed else functional.linear
        module.weight = replaced
