"""Tokens of a step that only the device knows: those that the step before it sampled.

With commit lag 1 a step is launched before the host has them. The sampler keeps them in device memory, by row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lorikeet.shard.system import gpu


class NewestTokens(NamedTuple):
    """Tokens of a step that are the newest ones of rows of device state."""

    indices: Sequence[int]
    """[n] indices into T."""
    rows: Sequence[int]
    """[n] their rows of device state."""
    # [max_rows] int64 newest token of each row
    last_tokens: torch.Tensor


def put_newest(input_ids: torch.Tensor, token_rows: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """Put the newest token of its row into each of `input_ids` that has one, by operators of PyTorch.

    input_ids: [T] int64, in place; token_rows: [T] int32, -1 for none; last_tokens: [max_rows] int64.
    """
    newest = last_tokens.index_select(0, token_rows.clamp(min=0))
    input_ids.copy_(torch.where(token_rows < 0, input_ids, newest))


def put_newest_in_graph(input_ids: torch.Tensor, token_rows: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """`put_newest` in one launch where there is Triton, for captured steps. Their kernels are compiled at start."""
    if not gpu.has_triton(input_ids.device):
        put_newest(input_ids, token_rows, last_tokens)
        return
    from lorikeet.shard.batch.newest_triton import put_newest_tokens

    put_newest_tokens(input_ids, token_rows, last_tokens)
