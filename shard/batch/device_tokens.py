"""Tokens of a step that only the device knows: those that the step before it sampled, and drafts.

With commit lag 1 a step is launched before the host has them. They are in device memory, in one tensor.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.system import gpu


class DeviceTokens(NamedTuple):
    """Tokens of a step that are in a tensor of the device."""

    indices: Sequence[int] | npt.NDArray[np.int64]
    """[n] indices into T."""
    places: Sequence[int] | npt.NDArray[np.int64]
    """[n] indices into `tokens`."""
    # [N] int64 tokens; where there is no draft, a negative number stands for any token
    tokens: torch.Tensor


class GraphSampling(Protocol):
    """Samples the tokens of a captured step, as part of it. `shard/sampling/device.py` implements it, which imports
    this folder.
    """

    def launch(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, kept_logits: torch.Tensor
    ) -> None:
        """Sample a token for each of the first S rows that has a row of device state; copy the logits of all others.

        logits: [S + E, V]; rows: [S + E] int64 rows of device state, -1 for none; positions: [S] int64 of the tokens;
        kept_logits: [S + E, V] float32.
        """

    def token_ids(self, num_rows: int) -> torch.Tensor:
        """[S] int64 the tokens that the newest captured step has sampled, of a step with S = `num_rows`."""


def put(input_ids: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> None:
    """Put tokens of the device among those of a step, in one launch where there is Triton.

    input_ids: [T] int64, in place; places: [T] int32 indices into `tokens`, -1 for none; tokens: [N] int64.
    """
    if not gpu.has_triton(input_ids.device):
        put_by_operators(input_ids, places, tokens)
        return
    from lorikeet.shard.batch.device_tokens_triton import put_device_tokens

    put_device_tokens(input_ids, places, tokens)


def put_by_operators(input_ids: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> None:
    """The specification of `put`, by operators of PyTorch."""
    token_ids = tokens.index_select(0, places.clamp(min=0)).clamp(min=0)
    input_ids.copy_(torch.where(places < 0, input_ids, token_ids))
