"""The rejection rule: a draft token sampled from q is accepted with probability min(1, p / q), else the target samples
from the excess of p over q. Leviathan et al. 2023 (Algorithm 1), Chen et al. 2023. The emitted token follows p exactly.
"""

from collections.abc import Set
from dataclasses import dataclass

import torch

from lorikeet.shard.sampling.filters import arg_max
from lorikeet.shard.sampling.noise import Purpose, log_exponentials, row_keys, uniforms


@dataclass(frozen=True)
class DraftDistributions:
    """The distributions that the drafts of some rows were sampled from, after all transforms of their requests."""

    of: Set[int]
    """These rows."""
    # [Q, V] float32 probabilities; the first row is zero: nothing was drafted
    table: torch.Tensor
    # [S] row of the table of each position of a step
    at: torch.Tensor
    # [S] the draft at each position, 0 where there is none
    drafted: torch.Tensor

    def select(self, batch_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """batch_rows: [S'] positions of a step. Returns their [S', V] distributions and [S'] drafts."""
        return self.table.index_select(0, self.at.index_select(0, batch_rows)), self.drafted.index_select(0, batch_rows)


def rejection_sample(
    scores: torch.Tensor,
    draft_probs: torch.Tensor,
    drafted: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    words: torch.Tensor,
) -> torch.Tensor:
    """scores: [S, V] of the target, transformed; draft_probs: [S, V], zero where nothing was drafted; drafted, seeds,
    positions: [S]; words: [V]. Returns [S] the emitted tokens: the draft where it is accepted.
    """
    target_probs = torch.softmax(scores, dim=-1)
    ids = drafted[:, None]
    p, q = target_probs.gather(1, ids)[:, 0], draft_probs.gather(1, ids)[:, 0]
    accepted = uniforms(row_keys(seeds, positions, Purpose.ACCEPT)) * q < p
    accepted &= q > 0  # nothing was drafted where q is zero
    residual = (target_probs - draft_probs).clamp_(min=0)
    # Equal distributions leave no residual: only rounding rejects a draft there, and then p is right.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs)
    noise = log_exponentials(words, row_keys(seeds, positions, Purpose.RESIDUAL))
    return torch.where(accepted, drafted, arg_max(residual.log_() - noise))
