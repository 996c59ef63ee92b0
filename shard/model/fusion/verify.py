"""Whether a fused module computes what the plain one does: both compute random rows before it is used, and agree in
every element.

Norms compute with weights drawn for the check: a network's own may be alike, or so large that forms hardly differ.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call

from lorikeet.shard.system import comparison

NUM_ROWS = 32
"""So many that the root mean square of every channel is near its expectation."""
OCTAVES = (-6.0, 8.0)
"""Sizes of drawn weights, as powers of two: four orders of magnitude, without overflow of float16."""

Fused = TypeVar("Fused", bound=nn.Module)
PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, [1, T, R]: R is the width of a head, or the part of it that is rotated."""


class AttentionRecorder:
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


def rows_of_all_sizes(width: int, like: torch.Tensor) -> torch.Tensor:
    """Random rows of sizes from 2^-12, which a norm's epsilon changes, to 2^6, with means. The first row has an element
    that exceeds all others a thousand times.
    """
    sizes = torch.logspace(-12, 6, NUM_ROWS, base=2)[:, None]
    x = rows(width, torch.empty(0), mean=1.0) * sizes
    x[0, width // 2] = 1000 * sizes[0]
    return x.to(like.device, like.dtype)


def norm_weight(like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A weight of the shape, the number format and on the device of `like`, of either sign and of all sizes in
    OCTAVES: another offset changes small elements, another rounding any.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.empty(like.shape).uniform_(*OCTAVES, generator=generator).exp2()
    signs = torch.randint(0, 2, like.shape, generator=generator) * 2.0 - 1
    return (sizes * signs).to(like.device, like.dtype)


def tokens(width: int, rotary_width: int, like: torch.Tensor) -> tuple[torch.Tensor, PositionEmbeddings]:
    """The input of a decoder block: [1, NUM_ROWS, width] and angles of as many positions."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(1, NUM_ROWS, rotary_width // 2, generator=generator).repeat(1, 1, 2)
    cos, sin = (values.to(like.device, like.dtype) for values in (angles.cos(), angles.sin()))
    return rows(width, like)[None], (cos, sin)


@torch.inference_mode()
def norm_differences(plain: nn.Module, fused: nn.Module, weight: torch.Tensor) -> torch.Tensor | None:
    """Differences of both norms as shares of each element, [NUM_ROWS, H], computed with `weight` in `plain`, which
    `fused` must have. None where `plain` is another kind of module.
    """
    x = rows_of_all_sizes(weight.shape[0], weight)
    try:
        expected = functional_call(plain, {"weight": weight}, (x,))
    except (RuntimeError, TypeError):  # other arguments: another kind of module
        return None
    actual = fused(x)
    return comparison.relative(expected, actual) if _are_alike(expected, actual) else None


@torch.inference_mode()
def computes_the_same(plain: nn.Module, fused: nn.Module, *inputs: torch.Tensor) -> bool:
    """Whether both modules compute the same from the inputs but for roundings; False where `plain` takes others."""
    try:
        expected = plain(*inputs)
    except (RuntimeError, TypeError):  # other arguments: another kind of module
        return False
    return close(expected, fused(*inputs))


def close(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether both are the same but for roundings, in every element; channels are the last axis."""
    return _are_alike(expected, actual) and comparison.is_near(comparison.per_channel(expected, actual), expected.dtype)


def _are_alike(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    return expected.shape == actual.shape and expected.dtype == actual.dtype


@torch.inference_mode()
def matches_reference(
    block: Any,
    make: Callable[[AttentionRecorder], Fused | None],
    x: torch.Tensor,
    position_embeddings: PositionEmbeddings,
) -> Fused | None:
    """The fused attention block that `make` returns for the arguments that `block` passes to its attention; None where
    it returns none, or where the fused block passes other arguments or computes another output.
    """
    plain, fused = AttentionRecorder(), AttentionRecorder()
    try:
        expected = attend(block, plain, x, position_embeddings)
    except (RuntimeError, TypeError):  # other arguments or other angles: another kind of block
        return None
    made = make(plain)
    if made is None:
        return None
    got = attend(made, fused, x, position_embeddings)
    pairs = [(expected, got), *zip(plain.seen, fused.seen, strict=True)]
    return made if all(close(one, other) for one, other in pairs) else None


def attend(
    block: Any, recorder: AttentionRecorder, x: torch.Tensor, position_embeddings: PositionEmbeddings
) -> torch.Tensor:
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
