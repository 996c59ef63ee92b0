"""Whether a fused module computes what the plain one does: both compute a few random rows before it is used."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

NUM_ROWS = 8
NUM_TOKENS = 5
TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-16}
"""Tolerance as a share of the largest value: the most that another order of roundings to the format may change."""

Fused = TypeVar("Fused", bound=nn.Module)
PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, [1, T, R]: R is the width of a head, or the part of it that is rotated."""


class Recorder:
    """Replaces a block's attention: records the arguments, returns values that depend on no implementation."""

    def __init__(self) -> None:
        self.seen: tuple[torch.Tensor, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """query: [1, heads, T, D], key and value: [1, kv_heads, T, D]. Returns [1, T, heads, D]."""
        self.seen, self.options = (query, key, value), options
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randn(1, query.shape[2], query.shape[1], value.shape[3], generator=generator)
        return drawn.to(query.device, query.dtype)

    def destination(self) -> None:
        """K and V are not stored."""


def rows(width: int, like: torch.Tensor, mean: float = 0.0) -> torch.Tensor:
    """[NUM_ROWS, width] of the number format and on the device of `like`, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(NUM_ROWS, width, generator=generator) + mean).to(like.device, like.dtype)


def tokens(width: int, rotary_width: int, like: torch.Tensor) -> tuple[torch.Tensor, PositionEmbeddings]:
    """The input of a decoder block: [1, NUM_TOKENS, width] and angles of as many positions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_TOKENS, width, generator=generator)
    angles = torch.randn(1, NUM_TOKENS, rotary_width // 2, generator=generator).repeat(1, 1, 2)
    first, cos, sin = (values.to(like.device, like.dtype) for values in (x, angles.cos(), angles.sin()))
    return first, (cos, sin)


@torch.inference_mode()
def difference(plain: nn.Module, fused: nn.Module, x: torch.Tensor) -> float:
    """The largest difference of both outputs for x, as a part of the largest value."""
    try:
        wanted = plain(x)
    except (RuntimeError, TypeError):  # other arguments: another kind of module
        return float("inf")
    return _distance(wanted, fused(x))


def close(wanted: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether both are the same but for roundings."""
    return _distance(wanted, got) <= TOLERANCES[wanted.dtype]


def _distance(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return float("inf")
    return float((wanted.float() - got.float()).abs().max() / wanted.float().abs().max())


@torch.inference_mode()
def matches_reference(
    block: Any, make: Callable[[Recorder], Fused | None], x: torch.Tensor, position_embeddings: PositionEmbeddings
) -> Fused | None:
    """The fused attention block that `make` returns for the arguments that `block` passes to its attention; None where
    it returns none, or where the fused block passes other arguments or computes another output.
    """
    plain, fused = Recorder(), Recorder()
    try:
        wanted = attend(block, plain, x, position_embeddings)
    except (RuntimeError, TypeError):  # other arguments or other angles: another kind of block
        return None
    made = make(plain)
    if made is None:
        return None
    got = attend(made, fused, x, position_embeddings)
    pairs = [(wanted, got), *zip(plain.seen, fused.seen, strict=True)]
    return made if all(close(one, other) for one, other in pairs) else None


def attend(block: Any, recorder: Recorder, x: torch.Tensor, position_embeddings: PositionEmbeddings) -> torch.Tensor:
    """The output of an attention block for x [1, T, H], with the recorder as its attention. Raises TypeError or
    RuntimeError where it takes other arguments or angles, or does not return an output and weights.
    """
    binding = block.lorikeet_binding
    del block.lorikeet_binding
    block.lorikeet_binding = recorder
    try:
        returned = block(hidden_states=x, position_embeddings=position_embeddings, attention_mask=None)
    finally:
        del block.lorikeet_binding
        block.lorikeet_binding = binding
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError("no pair of an output and attention weights")
    output: torch.Tensor = returned[0]
    return output
