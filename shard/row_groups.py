"""Rows of a step grouped by adapter, in device memory at a fixed address: what kernels for devices read.

A task is up to TASK_ROWS rows of one slot, wherever they lie in the step. Filled from the host without waiting for the
device; behind the tasks that there are lie empty ones, so that a captured graph may launch more than there are.
"""

import numpy as np
import numpy.typing as npt
import torch

TASK_ROWS = 16
"""Rows of one task at most: one tile of a matrix unit. MOST_ROWS of lora.c."""


class RowGroups:
    """The tasks of one step at a time."""

    def __init__(self, max_rows: int, max_slots: int, device: torch.device) -> None:
        """No step has more rows, nor rows of more slots."""
        self.max_rows = max_rows
        self._max_slots = max_slots
        self.max_tasks = self.most_tasks(max_rows)
        self._sizes = 3 * self.max_tasks, max_rows + 1, max_rows
        self._memory = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        tasks, self.row_slots, self.row_ids = self._memory.split(self._sizes)
        # [max_tasks, 3] slot, first index into row_ids, number of rows
        self.tasks = tasks.view(-1, 3)
        # row_slots: [max_rows + 1] the slot of each row of the step; -1 for none, and behind the rows that there are
        # row_ids: [max_rows] rows of the step, those of one slot side by side
        self.num_launched = 0
        """Tasks that a launch covers: those there are and some empty ones, few different numbers in all."""

    def fill(self, slots: npt.NDArray[np.int32], num_rows: int | None = None) -> None:
        """slots: [rows] the slot of each row of the step, -1 for none. num_rows: that the launch is for, whatever the
        step has; None launches for the step.
        """
        tasks, row_ids = group(slots)
        if len(tasks) > self.max_tasks or len(slots) > self.max_rows:
            raise RuntimeError(f"{len(slots)} rows, {len(tasks)} tasks of adapters: more than was reserved")
        is_pinned = self._memory.device.type == "cuda"
        num_before = self._sizes[0] + self._sizes[1]
        num_values = num_before + len(row_ids)
        host = torch.zeros(num_values, dtype=torch.int32, pin_memory=is_pinned)
        view = host.numpy()
        view[: tasks.size] = tasks.ravel()
        view[self._sizes[0] : num_before] = -1
        view[self._sizes[0] :][: len(slots)] = slots
        view[num_before:] = row_ids
        self._memory[:num_values].copy_(host, non_blocking=True)
        if num_rows is not None:
            self.num_launched = self.most_tasks(num_rows)
        else:
            self.num_launched = min(self.max_tasks, 1 << (len(tasks) - 1).bit_length()) if len(tasks) else 0

    def most_tasks(self, num_rows: int) -> int:
        """Tasks that so many rows may be."""
        return min(self._max_slots, num_rows) + num_rows // TASK_ROWS


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
