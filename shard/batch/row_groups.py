"""Rows of a step grouped by adapter, and draft tokens of Medusa heads grouped by adapter and head, for kernels.

A task is up to TASK_ROWS rows of one slot, anywhere in the step, or draft tokens of one head of one slot. Empty tasks
follow the used ones, so that a captured graph may launch more tasks than are used.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.batch.transfer import Upload

TASK_ROWS = 16
"""Most rows of one task: one tile of a matrix unit. MOST_ROWS of targets.c."""


class RowGroups:
    """The tasks of one step at a time."""

    def __init__(self, max_rows: int, max_slots: int, num_sums: int = 0) -> None:
        """`max_rows`, `max_slots`: most rows of a step, and most slots that they belong to, the last `num_sums` of
        which are sums of adapters.
        """
        self.max_rows, self.max_slots = max_rows, max_slots
        self.first_sum = max_slots - num_sums
        self.has_sums = False
        """Whether a row of the step belongs to a sum; of a padded step, whether one may."""
        # [num_launched, 3] slot, first index into row_ids, number of rows: the used tasks and some empty ones
        self.tasks = torch.empty(0, 3, dtype=torch.int32)
        # [rows + 1] the slot of each row of the step; -1 for none, and after the used rows
        self.row_slots = torch.empty(0, dtype=torch.int32)
        # [rows] rows of the step, those of one slot adjacent
        self.row_ids = torch.empty(0, dtype=torch.int32)

    @property
    def num_launched(self) -> int:
        """Tasks that a launch covers, few different numbers in all."""
        return self.tasks.shape[0]

    def most_tasks(self, num_rows: int) -> int:
        """Most tasks of a step with `num_rows` rows."""
        return most_tasks(num_rows, self.max_slots, TASK_ROWS)

    def num_numbers(self, num_padded: int) -> int:
        """Elements of the arrays of a step that is padded to this many rows."""
        return 3 * self.most_tasks(num_padded) + 2 * num_padded + 1

    def fill(
        self,
        slots: npt.NDArray[np.int32],
        upload: Upload,
        num_padded: int | None = None,
        may_have_sums: bool = False,
    ) -> None:
        """slots: [rows] the slot of each row of the step, -1 for none. num_padded: rows that the step is padded to;
        what is launched depends on that number and on may_have_sums alone. Raises RuntimeError for more rows than were
        reserved.
        """
        self.has_sums = may_have_sums or bool((slots >= self.first_sum).any())
        tasks, row_ids = group(slots)
        if num_padded is None:
            num_launched = 1 << (len(tasks) - 1).bit_length() if len(tasks) else 0
            num_rows = len(slots)
        else:
            num_launched, num_rows = self.most_tasks(num_padded), num_padded
        num_launched = min(num_launched, self.most_tasks(self.max_rows))
        if len(tasks) > num_launched or len(slots) > num_rows or num_rows > self.max_rows:
            raise RuntimeError(f"{len(slots)} rows in {len(tasks)} tasks of adapters: more than were reserved")
        row_slots = extended(slots, num_rows + 1, -1)
        arrays = extended(tasks.ravel(), 3 * num_launched), row_slots, extended(row_ids, num_rows)
        sent, self.row_slots, self.row_ids = upload.add(*arrays)
        self.tasks = sent.view(-1, 3)


class AdapterRows:
    """The rows of a step that belong to an adapter: tasks of up to TASK_ROWS neighbours of one slot each."""

    def __init__(
        self,
        slots: npt.NDArray[np.int32],
        owners: npt.NDArray[np.int64] | None = None,
        groups: RowGroups | None = None,
    ) -> None:
        """slots: [rows] the slot of each row, -1 for none; owners: [rows] rows of different owners share no task;
        groups: the tasks on the device, if kernels read them there.
        """
        self._slots, self._owners = slots, owners
        self.groups = groups

    @cached_property
    def tasks(self) -> npt.NDArray[np.int32]:
        """[tasks, 3] slot, first row, number of rows."""
        slots, owners = self._slots, self._owners
        is_first = np.ones(len(slots), bool)
        is_first[1:] = slots[1:] != slots[:-1]
        if owners is not None:
            is_first[1:] |= owners[1:] != owners[:-1]
        firsts = np.flatnonzero(is_first)
        counts = np.diff(firsts, append=len(slots))
        is_used = slots[firsts] >= 0
        firsts, counts = firsts[is_used], counts[is_used]
        num_tasks = -(-counts // TASK_ROWS)
        # [tasks] the run of each task, and its first row in the run
        runs = np.repeat(np.arange(len(firsts)), num_tasks)
        skipped = TASK_ROWS * (np.arange(len(runs)) - np.repeat(np.cumsum(num_tasks) - num_tasks, num_tasks))
        sizes = np.minimum(TASK_ROWS, counts[runs] - skipped)
        return np.stack([slots[firsts][runs], firsts[runs] + skipped, sizes], axis=1).astype(np.int32)

    def __len__(self) -> int:
        """Number of tasks; on a device, of those that a launch covers."""
        return len(self.tasks) if self.groups is None else self.groups.num_launched

    @property
    def address(self) -> int:
        return int(self.tasks.ctypes.data)


NO_ADAPTERS = AdapterRows(np.empty(0, np.int32))


def most_tasks(num_rows: int, num_keys: int, task_rows: int) -> int:
    """Most tasks that rows of `num_keys` different keys need, `task_rows` rows to a task."""
    return min(num_rows, min(num_rows, num_keys) + num_rows // task_rows)


def extended(values: npt.NDArray[np.int32], length: int, value: int = 0) -> npt.NDArray[np.int32]:
    """values: [≤ length]. Returns [length], `value` behind them."""
    found = np.full(length, value, np.int32)
    found[: values.size] = values
    return found


def group(slots: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """slots: [rows]. Returns the tasks, [tasks, 3], and the row ids that they point into."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    order = order[np.searchsorted(slots[order], 0) :]
    found, firsts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    num_tasks = -(-counts // TASK_ROWS)
    # [tasks] the group of each task, and which of the group's tasks it is
    owners = np.repeat(np.arange(len(found)), num_tasks)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(num_tasks) - num_tasks, num_tasks)
    starts = firsts[owners] + TASK_ROWS * numbers
    sizes = np.minimum(TASK_ROWS, counts[owners] - TASK_ROWS * numbers)
    return np.stack([found[owners], starts, sizes], axis=1).astype(np.int32), order


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


def as_array(wanted: Sequence[tuple[int, int, int]] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """[n, 3] row, slot, number of draft tokens."""
    return np.asarray(wanted, np.int32).reshape(-1, 3)
