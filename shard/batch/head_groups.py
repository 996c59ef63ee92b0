"""Draft tokens of Medusa heads grouped by adapter and head, as device kernels read them.

A task is up to TASK_ROWS draft tokens of one head of one slot. Empty tasks follow the used ones, as in RowGroups.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.batch.row_groups import extended, group
from lorikeet.shard.batch.upload import Upload


class HeadGroups:
    """The tasks of one step at a time."""

    def __init__(self, max_drafts: int) -> None:
        """`max_drafts`: most draft tokens of a step."""
        self.max_drafts = max_drafts
        self.num_drafts = 0
        """Rows of draft tokens in the step's output, E: those wanted, and their padding."""
        # [tasks, 4] slot, head, first index into sources and places, number of draft tokens
        self.tasks = torch.empty(0, 4, dtype=torch.int32)
        # [E] the row of each draft token, one of those whose logits are wanted; those of one task are adjacent
        self.sources = torch.empty(0, dtype=torch.int32)
        # [E] the place of each among the rows of draft tokens
        self.places = torch.empty(0, dtype=torch.int32)

    @staticmethod
    def num_numbers(num_padded: int) -> int:
        """Elements of the arrays of a step that is padded to this many draft tokens."""
        return 6 * num_padded

    def fill(self, wanted: npt.NDArray[np.int32], upload: Upload, num_padded: int | None = None) -> None:
        """wanted: [n, 3] row, slot, number of draft tokens of each HeadsRow. num_padded: draft tokens that the step is
        padded to; what is launched depends on that number alone. Raises RuntimeError for more than were reserved.
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
        arrays = extended(tasks.ravel(), 4 * num_launched), extended(sources, num_drafts), extended(order, num_drafts)
        sent, self.sources, self.places = upload.add(*arrays)
        self.tasks = sent.view(-1, 4)


def as_array(wanted: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.int32]:
    """[n, 3] row, slot, number of draft tokens."""
    return np.array(wanted, np.int32).reshape(-1, 3)
