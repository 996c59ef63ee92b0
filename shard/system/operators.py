"""Operators of PyTorch for kernels that it does not have: known to tracing and to tensors without values.

Registered by `Library.define`: a call of `torch.library.custom_op` takes several times as long, and a step that is not
captured has hundreds of them.
"""

from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("lorikeet", "FRAGMENT")


class Operator(Generic[P, R]):
    """One operator, called as the function that it was made of."""

    def __init__(self, name: str, function: Callable[P, R], mutates_args: Sequence[str]) -> None:
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        _LIBRARY.define(f"{name}{schema}")
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        self.name, self.function = name, function
        self.overload: Callable[P, R] = getattr(torch.ops.lorikeet, name).default

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        return self.overload(*args, **named)

    def register_fake(self, fake: Callable[..., R]) -> Callable[..., R]:
        """`fake` makes the results of tensors without values."""
        torch.library.register_fake(f"lorikeet::{self.name}", fake, lib=_LIBRARY)
        return fake


def operator(name: str, mutates_args: Sequence[str]) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make an operator of a function on tensors, whose arguments in `mutates_args` it changes in place."""
    return lambda function: Operator(name, function, mutates_args)
