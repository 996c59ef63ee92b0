"""The positions of a step at which drafts are verified: several per row, and how far each row gets."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from lorikeet.shard.sampling.plan import Row


class Block:
    """R rows with S positions in all: each row has adjacent positions, one more than drafts."""

    def __init__(self, rows: Sequence[Row], positions: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        self.rows = rows
        self.drafts = drafts
        widths = [1 + len(ids) for ids in drafts]
        self.firsts = [end - width for end, width in zip(accumulate(widths), widths, strict=True)]
        """Index of each row's first position in the block."""
        self.num_tokens = sum(widths)
        self.positions = [
            first + depth for first, width in zip(positions, widths, strict=True) for depth in range(width)
        ]
        """[S] of the sampled tokens in their requests."""
        self.num_alternatives = [
            row.logprobs.alternatives for row, width in zip(rows, widths, strict=True) for _ in range(width)
        ]
        self.depending_on_history = [
            (row, ids) for row, ids in zip(rows, drafts, strict=True) if row.depends_on_history and ids
        ]

    def dependency_levels(self) -> Iterator[list[tuple[int, Row]]]:
        """Positions that can be sampled together, each with its row: one level per depth where distributions depend on
        the draft before; all others are in the first level.
        """
        levels: list[list[tuple[int, Row]]] = [[]]
        for row, ids, first in zip(self.rows, self.drafts, self.firsts, strict=True):
            for depth in range(1 + len(ids)):
                level = depth if row.depends_on_history else 0
                levels.extend([] for _ in range(level + 1 - len(levels)))
                levels[level].append((first + depth, row))
        yield from levels

    def recorded_drafts(self, depth: int) -> list[tuple[int, int, int]]:
        """Drafts of rows that read the history: device row, position and token of the draft at this depth."""
        return [
            (row.row, self.positions[first + depth], ids[depth])
            for row, ids, first in zip(self.rows, self.drafts, self.firsts, strict=True)
            if row.reads_history and len(ids) > depth
        ]

    def padded_drafts(self) -> list[list[int]]:
        """[R][D] each row's drafts; -1, which no token equals, where it has fewer."""
        width = max(map(len, self.drafts))
        return [[*ids, *[-1] * (width - len(ids))] for ids in self.drafts]


def num_accepted(
    token_ids: torch.Tensor, bad: torch.Tensor, firsts: torch.Tensor, drafted: torch.Tensor
) -> torch.Tensor:
    """token_ids: [S] the target's own; bad: [S]; firsts: [R] each row's first index in S; drafted: [R, D], -1 for no
    draft. Returns [R]: the drafts of each row that are emitted.
    """
    here = firsts[:, None] + torch.arange(drafted.shape[1], device=firsts.device)
    ahead = (here + 1).clamp(max=len(token_ids) - 1)
    here = here.clamp(max=len(token_ids) - 1)
    is_accepted = (token_ids[here] == drafted) & ~bad[ahead]
    return is_accepted.cumprod(dim=1).sum(dim=1)
