"""Masks: tokens that a request excludes. Their scores become -inf before anything else is done to the logits.

Some depend on the position and some on the output before it, which only the device knows when a step is launched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lorikeet.shard.batch.transfer import to_device

_RING = 128
"""At least the tokens before the last one of a bad word (MAX_BAD_WORD_TOKENS), and a draft (MAX_DRAFT_TOKENS)."""


class History:
    """The newest output tokens of each row of device state, by position.

    A rejected draft needs no correction: nothing reads its position before the emitted token is written there.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        # [max_rows, _RING] token at each position, modulo _RING
        self._table = torch.zeros(max_rows, _RING, dtype=torch.long, device=device)
        self._device = device

    def begin(self, row: int, token_ids: Sequence[int]) -> None:
        """A request with these known tokens has the row."""
        ring = [0] * _RING
        for position in range(max(0, len(token_ids) - _RING), len(token_ids)):
            ring[position % _RING] = token_ids[position]
        self._table[row].copy_(to_device(torch.tensor(ring, dtype=torch.long), self._device))

    def write(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """rows, positions, token_ids: [n]."""
        self._table.index_put_((rows, positions & (_RING - 1)), token_ids)

    def before(self, rows: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        """rows, positions: [n]. Returns [n, count] the tokens before each position, newest first."""
        back = positions[:, None] - torch.arange(1, count + 1, device=positions.device)
        return self._table[rows[:, None], back & (_RING - 1)]


@dataclass(frozen=True)
class Allowed:
    """The only tokens that n rows of a chunk may sample."""

    # [n] rows of the chunk
    rows: torch.Tensor
    # [n, V] bool
    kept: torch.Tensor

    def apply(self, scores: torch.Tensor) -> None:
        """scores: [S, V], changed in place."""
        masked = scores.index_select(0, self.rows).masked_fill_(~self.kept, float("-inf"))
        scores.index_copy_(0, self.rows, masked)


@dataclass(frozen=True)
class BadWords:
    """W token sequences that some rows of a chunk never complete."""

    # [W] rows of the chunk
    rows: torch.Tensor
    # [W] rows of device state
    device_rows: torch.Tensor
    # [W, L] all tokens but the last, newest first; -1 beyond the first token of the sequence
    before: torch.Tensor
    # [W] the last token
    last_ids: torch.Tensor
    # [W] the first position of the last token: a sequence that begins in the prompt does not count
    earliest: torch.Tensor

    def apply(self, scores: torch.Tensor, positions: torch.Tensor, history: History) -> None:
        """scores: [S, V], changed in place; positions: [S]."""
        at = positions.index_select(0, self.rows)
        recent = history.before(self.device_rows, at, self.before.shape[1])
        is_next = ((recent == self.before) | (self.before < 0)).all(dim=1) & (at >= self.earliest)
        _exclude(scores, self.rows, self.last_ids, is_next)


@dataclass(frozen=True)
class MinTokens:
    """M stop tokens of some rows of a chunk, excluded up to a position."""

    # [M] rows of the chunk
    rows: torch.Tensor
    # [M]
    stop_ids: torch.Tensor
    # [M] the first position at which the token may be sampled
    ends: torch.Tensor

    def apply(self, scores: torch.Tensor, positions: torch.Tensor) -> None:
        """scores: [S, V], changed in place; positions: [S]."""
        _exclude(scores, self.rows, self.stop_ids, positions.index_select(0, self.rows) < self.ends)


@dataclass(frozen=True)
class Masks:
    """All masks of a chunk."""

    allowed: Allowed | None
    bad_words: BadWords | None
    min_tokens: MinTokens | None

    def apply(self, scores: torch.Tensor, positions: torch.Tensor, history: History) -> None:
        """scores: [S, V], changed in place; positions: [S] of the tokens that are sampled."""
        if self.allowed is not None:
            self.allowed.apply(scores)
        if self.bad_words is not None:
            self.bad_words.apply(scores, positions, history)
        if self.min_tokens is not None:
            self.min_tokens.apply(scores, positions)


def _exclude(scores: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, is_excluded: torch.Tensor) -> None:
    """scores: [S, V], changed in place; rows, ids, is_excluded: [n], where a pair may occur several times."""
    limits = torch.where(is_excluded, float("-inf"), float("inf"))
    scores.view(-1).scatter_reduce_(0, rows * scores.shape[1] + ids, limits, "amin")
