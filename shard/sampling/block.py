"""The positions of a step at which drafts are verified: several of each row, and how far each row gets.

Knows rows, drafts and sampled tokens; touches no logits.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch

from lorikeet.shard.sampling.plan import Row


class Block:
    """R rows with S positions in all: row r has one more than drafts, next to each other."""

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
        self.any_plain = any(row.plain for row in rows)
        self.depending_on_history = [
            (row, ids) for row, ids in zip(rows, drafts, strict=True) if row.depends_on_history and ids
        ]

    def dependency_levels(self) -> Iterator[list[tuple[int, Row]]]:
        """Positions that can be sampled together, each before its row: one wave per depth where laws look back, since
        they have to know the draft before; all others are in the first wave.
        """
        dependency_levels: list[list[tuple[int, Row]]] = [[]]
        for row, ids, first in zip(self.rows, self.drafts, self.firsts, strict=True):
            for depth in range(1 + len(ids)):
                wave = depth if row.depends_on_history else 0
                dependency_levels.extend([] for _ in range(wave + 1 - len(dependency_levels)))
                dependency_levels[wave].append((first + depth, row))
        yield from dependency_levels

    def last_emitted(
        self, token_ids: torch.Tensor, bad: torch.Tensor, tensor: Callable[[Sequence[int]], torch.Tensor]
    ) -> torch.Tensor:
        """token_ids: [S] the target's own; bad: [S]. Returns [R]: the index of the last token that is emitted."""
        firsts = tensor(self.firsts)
        last = firsts.clone()
        is_open = torch.ones_like(last, dtype=torch.bool)
        for depth in range(max(map(len, self.drafts))):
            # [R] the draft behind this depth; -1, which no token equals, where there is none
            drafted = tensor([ids[depth] if depth < len(ids) else -1 for ids in self.drafts])
            here = (firsts + depth).clamp(max=len(token_ids) - 1)
            ahead = (here + 1).clamp(max=len(token_ids) - 1)
            is_open &= (token_ids.index_select(0, here) == drafted) & ~bad.index_select(0, ahead)
            last += is_open
        return last
