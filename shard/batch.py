"""The tokens of one step as the model sees them: one flat row of T tokens, cut into segments, one per request.

`StepInputs` is one object for the life of the model: every layer of ours and the attention function hold it, and it is
refilled before each forward. Knows nothing of requests, sampling or scheduling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shard.row_groups import TASK_ROWS, RowGroups


@dataclass(frozen=True)
class Segment:
    """One request's share of a step: tokens at positions `start` … `start + num_tokens - 1`."""

    start: int
    num_tokens: int
    page_ids: Sequence[int]
    """KV pages in the order of positions; cover at least `start + num_tokens` tokens."""
    slot: int = -1
    """The adapter's slot, -1 for the bare base."""

    @property
    def kv_len(self) -> int:
        """Tokens visible to the segment's last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Bounds:
    """What steps of one shape have in common: one of them may stand for another in a captured graph."""

    num_rows: int
    """T of each, and no step has more segments."""
    max_kv_len: int
    """Tokens that a row sees at most."""


class HeadsRow(NamedTuple):
    """What heads are to guess from one of the rows whose logits are wanted."""

    row: int
    """Index into `logits_rows`."""
    slot: int
    """Of the adapter that brings the heads."""
    num_guesses: int
    """Heads 1 … num_guesses guess, head j the token j places after the one that the row itself gives."""


class AdapterRows:
    """The rows of a step that belong to an adapter: tasks of up to TASK_ROWS neighbours of one slot each."""

    def __init__(self, slots: Sequence[int] = (), counts: Sequence[int] = ()) -> None:
        """`counts[i]` neighbouring rows belong to `slots[i]`, -1 for none."""
        found: list[tuple[int, int, int]] = []
        first = 0
        for slot, count in zip(slots, counts, strict=True):
            if slot >= 0:
                ends = range(first, first + count, TASK_ROWS)
                found += [(slot, at, min(TASK_ROWS, first + count - at)) for at in ends]
            first += count
        # [tasks, 3] slot, first row, number of rows
        self.tasks: npt.NDArray[np.int32] = np.array(found, np.int32).reshape(-1, 3)
        self.groups: RowGroups | None = None
        """The same on the device, where kernels read it there."""

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self.tasks)

    @property
    def address(self) -> int:
        return int(self.tasks.ctypes.data)


NO_ADAPTERS = AdapterRows()


def rows_of(slots: Sequence[int]) -> AdapterRows:
    """The tasks of rows that belong to `slots[row]` each."""
    runs = [(slot, len(list(run))) for slot, run in groupby(slots)]
    return AdapterRows([slot for slot, _ in runs], [count for _, count in runs])


class StepInputs:
    """What a forward pass reads besides weights and KV."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self.bounds: Bounds | None = None
        """None: a step may be as large as it is. Else whatever a forward reads lies at addresses, with shapes, and is
        read by as many programs as follow from these alone.
        """
        self.segments: list[Segment] = []
        # Host side, for attention backends. [R] first position, number of tokens, first row in T of each segment
        self.starts: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.counts: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.first_rows: npt.NDArray[np.int32] = np.empty(0, np.int32)
        # [R, most pages of a segment] page ids, 0 where a segment has fewer
        self.page_table: npt.NDArray[np.int32] = np.empty((0, 1), np.int32)
        # [T] token ids
        self.input_ids = torch.empty(0, dtype=torch.long, device=device)
        # [T] absolute position of each token in its request
        self.position_ids = torch.empty(0, dtype=torch.long, device=device)
        # [T] where each token's K and V go: page id * P + offset in page
        self.kv_slots = torch.empty(0, dtype=torch.long, device=device)
        # [S] indices into T whose logits are wanted
        self.logits_rows = torch.empty(0, dtype=torch.long, device=device)
        self.heads: list[HeadsRow] = []
        """Rows of heads' guesses follow the S rows whose logits are wanted, in this order: E in all."""
        self.adapter_rows = NO_ADAPTERS
        """Of the T tokens."""
        self.head_adapter_rows = NO_ADAPTERS
        """Of the S rows whose logits are wanted and the E rows of guesses, which speak through the same output head."""
        self._host_rows: Sequence[int] | None = None
        self._groups: tuple[RowGroups, RowGroups] | None = None

    def reserve_groups(self, max_rows: int, max_slots: int) -> None:
        """From now on tell the device too which rows belong to which adapter."""
        self._groups = RowGroups(max_rows, max_slots, self.device), RowGroups(max_rows, max_slots, self.device)

    def fill(
        self,
        segments: Sequence[Segment],
        input_ids: torch.Tensor,
        logits_rows: torch.Tensor,
        host_rows: Sequence[int] | None = None,
        heads: Sequence[HeadsRow] = (),
    ) -> None:
        """Describe the next step. input_ids: [T] on the device; logits_rows: [S] indices into T on the device, which
        `host_rows` repeats for the host; heads: guesses that are wanted too.
        """
        num_segments = len(segments)
        self.segments = list(segments)
        self.starts = np.fromiter((segment.start for segment in segments), np.int32, num_segments)
        self.counts = np.fromiter((segment.num_tokens for segment in segments), np.int32, num_segments)
        self.first_rows = (np.cumsum(self.counts) - self.counts).astype(np.int32)
        num_pages = -(-(self.starts + self.counts) // self.page_size)
        self.page_table = np.zeros((num_segments, int(num_pages.max(initial=1))), np.int32)
        for row, segment, count in zip(self.page_table, segments, num_pages.tolist(), strict=True):
            row[:count] = segment.page_ids[:count]
        # [T] segment and position of each token
        owners = np.repeat(np.arange(num_segments), self.counts)
        positions = np.arange(owners.size) + (self.starts - self.first_rows).astype(np.int64)[owners]
        slots = self.page_table[owners, positions // self.page_size].astype(np.int64) * self.page_size
        slots += positions % self.page_size
        self.input_ids = input_ids
        self.position_ids = torch.from_numpy(positions).to(self.device, non_blocking=True)
        self.kv_slots = torch.from_numpy(slots).to(self.device, non_blocking=True)
        self.logits_rows = logits_rows
        self._host_rows = host_rows
        self.heads = list(heads)
        self._fill_adapters(segments)

    @property
    def host_rows(self) -> Sequence[int]:
        """[S] `logits_rows` on the host; waits for the device where nobody said."""
        return self.logits_rows.tolist() if self._host_rows is None else self._host_rows

    @property
    def num_logits(self) -> int:
        """Rows that a forward pass gives: S + E."""
        return self.logits_rows.shape[0] + sum(heads.num_guesses for heads in self.heads)

    def _fill_adapters(self, segments: Sequence[Segment]) -> None:
        self.adapter_rows = self.head_adapter_rows = NO_ADAPTERS
        slots = [segment.slot for segment in segments]
        if max(slots, default=-1) < 0:
            return
        self.adapter_rows = AdapterRows(slots, self.counts.tolist())
        row_slots = np.repeat(np.asarray(slots, np.int32), self.counts)
        head_slots = row_slots[np.asarray(self.host_rows, np.int64)]
        guessed = [heads.row for heads in self.heads for _ in range(heads.num_guesses)]
        head_slots = np.concatenate([head_slots, head_slots[np.asarray(guessed, np.int64)]])
        self.head_adapter_rows = rows_of(head_slots.tolist())
        if self._groups is not None:
            self.adapter_rows.groups, self.head_adapter_rows.groups = self._groups
            self._groups[0].fill(row_slots)
            self._groups[1].fill(head_slots)
