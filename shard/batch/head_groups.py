"""Draft tokens of Medusa heads grouped by adapter and head, in device memory at a fixed address, as kernels read them.

A task is up to TASK_ROWS draft tokens of one head of one slot. Filled from the host without waiting for the device, as
RowGroups is; empty tasks follow the used ones.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.batch.row_groups import ALIGNMENT, group, send


class HeadGroups:
    """The tasks of one step at a time."""

    def __init__(self, max_drafts: int, device: torch.device) -> None:
        """`max_drafts`: most draft tokens of a step."""
        self.max_drafts = max_drafts
        self._memory = torch.zeros(6 * max_drafts + 3 * ALIGNMENT, dtype=torch.int32, device=device)
        self.num_drafts = 0
        """Rows of draft tokens in the step's output, E: those wanted, and their padding."""
        # [tasks, 4] slot, head, first index into sources and places, number of draft tokens
        self.tasks = self._memory[:0].view(-1, 4)
        # [E] the row of each draft token, one of those whose logits are wanted; those of one task are adjacent
        self.sources = self._memory[:0]
        # [E] the place of each among the rows of draft tokens
        self.places = self._memory[:0]

    def fill(self, wanted: npt.NDArray[np.int32], num_padded: int | None = None) -> None:
        """wanted: [n, 3] row, slot, number of draft tokens of each HeadsRow. num_padded: draft tokens that the step is
        padded to; what is launched, and its addresses, depend on that number alone.
        """
        rows, slots, counts = wanted.T
        num_wanted = int(counts.sum())
        num_drafts = num_wanted if num_padded is None else num_padded
        if num_wanted > num_drafts or num_drafts > self.max_drafts:
            raise RuntimeError(f"{num_wanted} draft tokens of heads: more than were reserved")
        owners = np.repeat(np.arange(len(wanted)), counts)
        heads = np.arange(num_wanted) - np.repeat(np.cumsum(counts) - counts, counts)
        num_heads = int(counts.max(initial=1))
        found, order = group((slots[owners] * num_heads + heads).astype(np.int32))
        keys, firsts, sizes = found.T
        tasks = np.stack([keys // num_heads, keys % num_heads, firsts, sizes], axis=1).astype(np.int32)
        num_launched = len(tasks) if num_padded is None else num_padded
        self.num_drafts = num_drafts
        sources = rows[owners][order].astype(np.int32)
        parts = (tasks.ravel(), 4 * num_launched), (sources, num_drafts), (order, num_drafts)
        sent, self.sources, self.places = send(self._memory, *parts)
        self.tasks = sent.view(-1, 4)


def as_array(wanted: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.int32]:
    """[n, 3] row, slot, number of draft tokens."""
    return np.array(wanted, np.int32).reshape(-1, 3)
