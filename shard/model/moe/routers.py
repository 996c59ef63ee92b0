"""The weights that choose among experts: modules of transformers' own multiply by them, row by row alike only with our
product in place of torch's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lorikeet.shard.model.kernels.packing import multiply


class RouterWeight(torch.Tensor):
    """[experts, H]: whoever passes it, or a cast of it, to torch's `linear` gets `multiply`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and not kwargs and isinstance(args[1], cls):
            plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, cls) else arg for arg in args]
            return multiply(*plain)
        return super().__torch_function__(func, types, tuple(args), kwargs or {})


def replace_router_weights(network: nn.Module) -> None:
    """In every module that multiplies by a matrix of its own without being a layer of torch's."""
    for module in network.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(module, nn.Linear | Conv1D | nn.Embedding):
            continue
        del module.weight
        module.weight = weight.detach().clone().as_subclass(RouterWeight)
