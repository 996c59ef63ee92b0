"""DraftTokens of a step grouped by adapter and head, in device memory at a fixed address: what kernels for heads read.

A task is up to TASK_ROWS guesses of one head of one slot. Filled from the host without waiting for the device, as
RowGroups is; behind the tasks that there are lie empty ones. Knows nothing of what a head computes.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.batch.row_groups import ALIGNMENT, group, send


class HeadGroups:
    """The tasks of one step at a time."""

    def __init__(self, max_drafts: int, device: torch.device) -> None:
        """No step has more guesses."""
        self.max_drafts = max_drafts
        self._memory = torch.zeros(6 * max_drafts + 3 * ALIGNMENT, dtype=torch.int32, device=device)
        self.num_drafts = 0
        """Rows of guesses in the step's output, E: those wanted, and what they are padded to."""
        # [tasks, 4] slot, head, first index into sources and places, number of guesses
        self.tasks = self._memory[:0].view(-1, 4)
        # [E] the row of each guess, one of those whose logits are wanted; guesses of one task lie side by side
        self.sources = self._memory[:0]
        # [E] the place of each among the rows of guesses
        self.places = self._memory[:0]

    def fill(self, wanted: npt.NDArray[np.int32], num_padded: int | None = None) -> None:
        """wanted: [n, 3] row, slot, number of guesses of each HeadsRow. num_padded: guesses that the step is padded to;
        what is launched, and where it lies, depends on that number alone.
        """
        rows, slots, counts = wanted.T
        num_wanted = int(counts.sum())
        num_drafts = num_wanted if num_padded is None else num_padded
        if num_wanted > num_drafts or num_drafts > self.max_drafts:
            raise RuntimeError(f"{num_wanted} guesses of heads: more than was reserved")
        owners = np.repeat(np.arange(len(wanted)), counts)
        heads = np.arange(num_wanted) - np.repeat(np.cumsum(counts) - counts, counts)
        num_heads = int(counts.max(initial=1))
        found, order = group((slots[owners] * num_heads + heads).astype(np.int32))
        keys, firsts, sizes = found.T
        tasks = np.stack([keys // num_heads, keys % num_heads, firsts, sizes], axis=1).astype(np.int32)
        num_launched = len(tasks) if num_padded is None else num_padded
        self.num_drafts = num_drafts
        sources = rows[owners][order].astype(np.int32)
        told = (tasks.ravel(), 4 * num_launched), (sources, num_drafts), (order, num_drafts)
        tasks_of, self.sources, self.places = send(self._memory, *told)
        self.tasks = tasks_of.view(-1, 4)


def as_array(wanted: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.int32]:
    """[n, 3] row, slot, number of guesses."""
    return np.array(wanted, np.int32).reshape(-1, 3)
