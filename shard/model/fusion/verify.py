"""Whether a twin computes what the plain module does: both are given a few random rows before the twin is put in place.

What runs in this way is decided by nobody's name. Knows modules as functions; knows no kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

NUM_ROWS = 8
NUM_TOKENS = 5
TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-16}
"""Of the largest value: what roundings to the number format in another order may leave."""

Twin = TypeVar("Twin", bound=nn.Module)
PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, [1, T, R]: R is the width of a head, or the part of it that turns."""


class Recorder:
    """Stands in for an attention site: keeps what it is given, returns something that depends on no implementation."""

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


def rows(width: int, like: torch.Tensor, mean: float = 0.0) -> torch.Tensor:
    """[NUM_ROWS, width] of the number format and on the device of `like`, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(NUM_ROWS, width, generator=generator) + mean).to(like.device, like.dtype)


def tokens(width: int, rotary_width: int, like: torch.Tensor) -> tuple[torch.Tensor, PositionEmbeddings]:
    """What a block of a decoder is given: [1, NUM_TOKENS, width] and angles of that many positions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_TOKENS, width, generator=generator)
    angles = torch.randn(1, NUM_TOKENS, rotary_width // 2, generator=generator).repeat(1, 1, 2)
    first, cos, sin = (values.to(like.device, like.dtype) for values in (x, angles.cos(), angles.sin()))
    return first, (cos, sin)


@torch.inference_mode()
def difference(plain: nn.Module, twin: nn.Module, x: torch.Tensor) -> float:
    """The largest between what both make of x, as a part of the largest value."""
    try:
        wanted = plain(x)
    except (RuntimeError, TypeError):  # it wants other arguments: another kind of module
        return float("inf")
    got = twin(x)
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return float("inf")
    return float((wanted.float() - got.float()).abs().max() / wanted.float().abs().max())


def close(wanted: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether both are the same but for roundings."""
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return False
    apart = (wanted.float() - got.float()).abs().max()
    return bool(apart <= TOLERANCES[wanted.dtype] * wanted.float().abs().max())


def matches_reference(
    block: Any, make: Callable[[Recorder], Twin | None], x: torch.Tensor, position_embeddings: PositionEmbeddings
) -> Twin | None:
    """The twin of an attention block that `make` gives, who sees what the block hands its attention; None where there
    is none, or where it hands over something else, or makes something else of what comes back.
    """
    plain, fused = Recorder(), Recorder()
    with torch.inference_mode():
        try:
            wanted = attend(block, plain, x, position_embeddings)
        except (RuntimeError, TypeError):  # it wants other arguments or other angles: another kind of block
            return None
        twin = make(plain)
        if twin is None:
            return None
        got = attend(twin, fused, x, position_embeddings)
    pairs = [(wanted, got), *zip(plain.seen, fused.seen, strict=True)]
    return twin if all(close(one, other) for one, other in pairs) else None


def attend(block: Any, recorder: Recorder, x: torch.Tensor, position_embeddings: PositionEmbeddings) -> torch.Tensor:
    """What an attention block makes of x [1, T, H] with the recorder as its attention. Raises TypeError or RuntimeError
    where it wants other arguments, other angles, or returns something else than an output and weights.
    """
    with recording(block, recorder):
        returned = block(hidden_states=x, position_embeddings=position_embeddings, attention_mask=None)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError("no pair of an output and attention weights")
    output: torch.Tensor = returned[0]
    return output


@contextmanager
def recording(block: Any, recorder: Recorder) -> Iterator[None]:
    """While it lasts, `recorder` is the attention of `block`."""
    site = block.lorikeet_target
    del block.lorikeet_target
    block.lorikeet_target = recorder
    try:
        yield
    finally:
        del block.lorikeet_target
        block.lorikeet_target = site
