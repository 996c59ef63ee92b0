"""Medusa heads of a model on CUDA: the table of each slot's addresses for each head, and the launches of a step.

triton.py has the arithmetic, shard/batch/row_groups.py the draft rows of a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.row_groups import HeadGroups
from lorikeet.shard.batch.transfer import sendable
from lorikeet.shard.model.kernels.tuning import DEFAULTS, Tuned
from lorikeet.shard.model.medusa.heads import MOST_BLOCKS, MOST_HEADS, SlotHeads
from lorikeet.shard.model.medusa.triton import ENTRY, add_drafts, put_head_logits


class DeviceHeads:
    """The heads of all slots and their table on the device."""

    def __init__(self, inputs: StepInputs, num_slots: int, tuned: Tuned = DEFAULTS) -> None:
        self._inputs, self._tuned = inputs, tuned
        # [slots, heads, ENTRY] numbers of blocks and addresses, 0 for none
        self.table = torch.zeros(num_slots, MOST_HEADS, ENTRY.value, dtype=torch.int64, device=inputs.device)
        self._num_blocks = 1
        self._dtype: torch.dtype | None = None
        self._has_outputs = False

    def bind(self, slot: int, heads: SlotHeads) -> None:
        """Put heads, which lie on the device, into `slot`, for steps launched from now on."""
        num_blocks = len(heads.blocks)
        entries = np.zeros((MOST_HEADS, ENTRY.value), np.int64)
        for head in range(heads.num_heads):
            addresses = [tensor[head].data_ptr() for tensor in heads.tensors]
            entries[head, 0] = num_blocks
            entries[head, 1] = addresses[-1] if heads.outputs else 0
            entries[head, 2 : 2 + 2 * num_blocks] = addresses[: 2 * num_blocks]
        self._dtype = heads.tensors[0].dtype
        self._num_blocks = max(self._num_blocks, num_blocks)
        self._has_outputs = self._has_outputs or bool(heads.outputs)
        self.table[slot].copy_(sendable(torch.from_numpy(entries), self.table.device), non_blocking=True)

    def clear(self, slot: int) -> None:
        """Empty `slot`, for steps launched from now on."""
        self.table[slot].zero_()

    @contextmanager
    def assumed_outputs(self) -> Iterator[None]:
        """Inside, steps launch the kernel of output matrices, which empty slots do not have."""
        before, self._has_outputs = self._has_outputs, True
        try:
            yield
        finally:
            self._has_outputs = before

    def draft(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [S, H]. Returns [S + E, H], the rows, then the draft rows. Draft rows that no request uses hold any
        value.
        """
        (num_rows, size), groups = rows.shape, self._groups
        num_blocks = MOST_BLOCKS if self._is_padded else self._num_blocks
        if self._dtype not in (None, rows.dtype):
            raise RuntimeError(f"heads are {self._dtype}, rows at the output head {rows.dtype}")
        num_kept = num_rows + groups.num_drafts
        num_scratch = groups.num_drafts if num_blocks > 1 else 0
        x = rows.new_empty(num_kept + num_scratch, size)
        x[:num_rows].copy_(rows)
        tiles = self._tuned.tiles("head_block", size, rows.dtype)
        add_drafts(x, groups.tasks, groups.sources, groups.places, self.table, num_rows, num_blocks, tiles)
        return x[:num_kept]

    def put_logits(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        """Write the logits of version 1 heads into their rows. x: [S + E, H], logits: [S + E, V]."""
        if self._has_outputs or self._is_padded:
            groups, tiles = self._groups, self._tuned.tiles("head_logits", x.shape[1], x.dtype)
            num_rows = x.shape[0] - groups.num_drafts
            put_head_logits(x, logits, groups.tasks, groups.places, self.table, num_rows, tiles)

    @property
    def _is_padded(self) -> bool:
        """Whether this step's launches may be replayed with other heads in the slots."""
        return self._inputs.bounds is not None

    @property
    def _groups(self) -> HeadGroups:
        groups = self._inputs.head_groups
        if groups is None:
            raise RuntimeError("the draft rows of heads were not copied to the device")
        return groups
