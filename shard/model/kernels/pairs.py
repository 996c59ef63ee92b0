"""The (token, expert) pairs of a block of experts in one step, sorted on their device.

Only `spans` reads values on the host, and every shape depends on the numbers of tokens, experts and slots alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class SortedPairs:
    """Pairs sorted by expert, those of one expert by adapter."""

    # [P] index of each pair in the router's order: token * experts per token + place
    order: torch.Tensor
    # [P] int32, ascending: expert * (num_slots + 1) + slot + 1, slot -1 for none
    keys: torch.Tensor
    # [experts] int32: end of the pairs of each expert
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

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Each expert that has pairs, and where they lie. Reads values on the host."""
        first = 0
        for expert, end in enumerate(self.ends.tolist()):
            if end > first:
                yield expert, slice(first, end)
            first = end

    def unsort(self, results: torch.Tensor) -> torch.Tensor:
        """results: [P, H] in this order. Returns them in the router's order."""
        return torch.empty_like(results).index_copy_(0, self.order, results)


class PairTasks(NamedTuple):
    """Sorted pairs in tasks, for kernels."""

    # [tasks, 3] int32 value, first pair, number of pairs, which may be 0
    tasks: torch.Tensor
    # [P] int32 0 … P - 1
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
    """The specification of pairs_triton.py, in operations of torch.

    keys: [P] int32 ascending; values: [P] int32, equal for equal keys, negative for pairs to skip. Returns
    [num_tasks, 3] int32: value, first pair, number of pairs, at most `num_rows` neighbours of one key; then
    zeros.
    """
    places = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device)
    firsts = torch.searchsorted(keys, keys, out_int32=True)
    lasts = torch.searchsorted(keys, keys, right=True, out_int32=True)
    starts_task = ((places - firsts) % num_rows == 0) & (values >= 0)
    numbers = torch.where(starts_task, starts_task.cumsum(0) - 1, num_tasks)
    pairs = torch.stack([values, places, (lasts - places).clamp_max(num_rows)], dim=1)
    # one row more, for the pairs that start no task
    tasks = pairs.new_zeros(num_tasks + 1, 3)
    tasks[numbers] = pairs
    return tasks[:num_tasks]
