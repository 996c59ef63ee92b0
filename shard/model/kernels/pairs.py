"""The (token, expert) pairs of a block of experts in one step, sorted on the device that they are on.

Nothing here reads a value on the host, and every shape follows from the numbers of tokens, experts and slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class SortedPairs:
    """Pairs side by side that have one expert, and of one expert those of one adapter."""

    # [P] which pair of the router's order, token * experts per token + place, is here
    order: torch.Tensor
    # [P] int32, ascending: expert * (num_slots + 1) + slot + 1, slot -1 for none
    keys: torch.Tensor
    # [experts] int32: where the pairs of each expert end
    ends: torch.Tensor
    num_experts: int
    num_slots: int

    @property
    def experts(self) -> torch.Tensor:
        """[P] int32."""
        return self.keys // (self.num_slots + 1)

    @property
    def slots(self) -> torch.Tensor:
        """[P] int32, -1 for none."""
        return self.keys % (self.num_slots + 1) - 1

    def unsort(self, results: torch.Tensor) -> torch.Tensor:
        """results: [P, H] as the pairs lie here. Returns the same in the router's order."""
        return torch.empty_like(results).index_copy_(0, self.order, results)


class PairTasks(NamedTuple):
    """Sorted pairs cut into pieces, for kernels."""

    # [tasks, 3] int32 value, first pair, number of pairs; some of no pairs
    tasks: torch.Tensor
    # [P] int32 0 … P - 1: where each pair lies
    pair_ids: torch.Tensor


def sort_pairs(
    expert_ids: torch.Tensor, num_experts: int, slots: torch.Tensor | None = None, num_slots: int = 0
) -> SortedPairs:
    """expert_ids: [T, experts per token]; slots: [T] int32 the adapter's slot of each token, -1 for none, below
    `num_slots`; None where the step has no adapters.
    """
    keys = expert_ids.to(torch.int32)
    if slots is not None:
        keys = keys * (num_slots + 1) + (slots[:, None] + 1)
    keys, order = keys.flatten().sort(stable=True)
    beyond = torch.arange(1, num_experts + 1, dtype=torch.int32, device=keys.device)
    ends = torch.searchsorted(keys, beyond * (num_slots + 1), out_int32=True)
    return SortedPairs(order, keys, ends, num_experts, num_slots)


def tasks_of(keys: torch.Tensor, values: torch.Tensor, num_rows: int, num_tasks: int) -> torch.Tensor:
    """What pairs_triton.py gives, in operations of torch's: its specification.

    keys: [P] int32 ascending; values: [P] int32, alike where keys are, negative for what is left out. Returns
    [num_tasks, 3] int32: value, first pair, number of pairs, of neighbours of one key, `num_rows` at most; behind those
    that there are, zeros.
    """
    places = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device)
    firsts = torch.searchsorted(keys, keys, out_int32=True)
    lasts = torch.searchsorted(keys, keys, right=True, out_int32=True)
    announce_step = ((places - firsts) % num_rows == 0) & (values >= 0)
    numbers = torch.where(announce_step, announce_step.cumsum(0) - 1, num_tasks)
    found = torch.stack([values, places, (lasts - places).clamp_max(num_rows)], dim=1)
    # one row more, for the pairs that begin no task
    tasks = found.new_zeros(num_tasks + 1, 3)
    tasks[numbers] = found
    return tasks[:num_tasks]
