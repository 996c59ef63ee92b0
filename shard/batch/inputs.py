"""The tokens of one step as the model sees them: one flat row of T tokens, cut into segments, one per request.

`StepInputs` is one object for the life of the model: our layers and the attention function hold it, and it is refilled
before each forward.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.batch.head_groups import HeadGroups, as_array
from lorikeet.shard.batch.padding import Bounds, Padding
from lorikeet.shard.batch.row_groups import TASK_ROWS, RowGroups
from lorikeet.shard.batch.transfer import sendable, to_device


@dataclass(frozen=True)
class Segment:
    """One request's part of a step: tokens at positions `start` … `start + num_tokens - 1`."""

    start: int
    num_tokens: int
    page_ids: Sequence[int]
    """KV pages in the order of positions; cover at least `start + num_tokens` tokens."""
    slot: int = -1
    """The adapter's slot, -1 for the bare base."""
    slot_start: int = 0
    """Position of the first token that the adapter applies to."""
    second_text: int = 0
    """Position of the first token of the second text of a pair, 0 for a single text."""
    per_token: bool = False
    """Whether each of its tokens has a result, in place of one that is pooled."""
    num_uncertain: int = 0
    """The step before may accept up to as many drafts. `start` is what it is if none is accepted; each moves the
    segment by one position. Pages cover these too.
    """
    device_row: int = -1
    """Where `StepInputs.num_accepted` has their number; -1 without `num_uncertain`."""

    @property
    def kv_len(self) -> int:
        """Tokens visible to the segment's last token."""
        return self.start + self.num_tokens


class HeadsRow(NamedTuple):
    """Draft tokens that Medusa heads propose from one of the rows whose logits are wanted."""

    row: int
    """Index into `logits_rows`."""
    slot: int
    """Slot of the adapter with the heads."""
    num_drafts: int
    """Heads 1 … num_drafts propose one token each, head j the one j positions after the row's own."""


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
        """Number of tasks; on a device, of those that a launch covers."""
        return len(self.tasks) if self.groups is None else self.groups.num_launched

    @property
    def address(self) -> int:
        return int(self.tasks.ctypes.data)


NO_ADAPTERS = AdapterRows()


def slot_runs(segment: Segment) -> Iterator[tuple[int, int]]:
    """The slots of a segment's tokens, each with its number of them: the adapter may apply to the last ones only."""
    num_before = min(max(segment.slot_start - segment.start, 0), segment.num_tokens)
    if segment.slot < 0 or num_before == 0:
        yield segment.slot, segment.num_tokens
        return
    yield -1, num_before
    if num_before < segment.num_tokens:
        yield segment.slot, segment.num_tokens - num_before


def rows_of(slots: Sequence[int]) -> AdapterRows:
    """The tasks of rows that belong to `slots[row]` each."""
    runs = [(slot, len(list(run))) for slot, run in groupby(slots)]
    return AdapterRows([slot for slot, _ in runs], [count for _, count in runs])


class StepInputs:
    """What a forward pass reads apart from weights and KV."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self.segments: list[Segment] = []
        # [rows of device state] int64: drafts that the step before accepted; None where the host always knows them
        self.num_accepted: torch.Tensor | None = None
        self.adds_on_device = device.type != "cpu"
        """Whether the device adds the accepted drafts to positions. On CPU the host reads them without waiting."""
        # Host side, for attention backends. [R] first position, number of tokens, first row in T of each segment
        self.starts: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.counts: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.first_rows: npt.NDArray[np.int32] = np.empty(0, np.int32)
        # [R] `num_uncertain` and `device_row` of each segment
        self.num_uncertain: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.device_rows: npt.NDArray[np.int32] = np.empty(0, np.int32)
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
        """Rows of heads' draft tokens follow the S rows whose logits are wanted, in this order: E in all."""
        self.adapter_rows = NO_ADAPTERS
        """Adapter rows of the T tokens."""
        self.head_adapter_rows = NO_ADAPTERS
        """Adapter rows of the S wanted rows and the E rows of draft tokens, which use the same output head."""
        self.num_wanted = self.num_drafts = 0
        """S and E."""
        self.bounds: Bounds | None = None
        """What the step is padded to; None without padding."""
        self._host_rows: Sequence[int] | None = None
        self.head_groups: HeadGroups | None = None
        """The wanted draft tokens of heads on the device, where kernels read them there."""
        self._groups: tuple[RowGroups, RowGroups] | None = None
        self._padding: Padding | None = None
        self._frame = Frame(0, device)

    def reserve_groups(self, max_rows: int, max_slots: int, max_drafts: int = 0) -> None:
        """From now on describe to the device too which rows belong to which adapter, and which draft tokens to which
        head, in steps of up to `max_rows` rows, and `max_drafts` draft tokens with them at the output head.
        """
        head_rows = RowGroups(max_rows + max_drafts, max_slots, self.device)
        self._groups = RowGroups(max_rows, max_slots, self.device), head_rows
        self.head_groups = HeadGroups(max_drafts, self.device)

    def pad(self, padding: Padding | None) -> None:
        """From now on pad the steps that fit, and keep what the device reads of them at fixed addresses."""
        self._padding = padding
        self._frame = Frame(0 if padding is None else padding.most_rows, self.device)

    def fill(
        self,
        segments: Sequence[Segment],
        input_ids: torch.Tensor,
        logits_rows: torch.Tensor,
        host_rows: Sequence[int] | None = None,
        heads: Sequence[HeadsRow] = (),
    ) -> None:
        """Describe the next step. input_ids: [T] on the device; logits_rows: [S] indices into T on the device, which
        `host_rows` repeats for the host; heads: draft tokens that are wanted too.
        """
        self.num_wanted, self.num_drafts = logits_rows.shape[0], sum(each.num_drafts for each in heads)
        self.segments = [self._settled(each) for each in segments]
        self.heads, self._host_rows = list(heads), host_rows
        self.bounds = None
        if self._padding is not None:
            num_rows, has_adapters = input_ids.shape[0], any(segment.slot >= 0 for segment in segments)
            self.bounds = self._padding.fit(num_rows, self.num_wanted, self.num_drafts, has_adapters)
            if self.bounds is not None:
                self.segments += self._spare(self.bounds.num_rows - num_rows, self._padding.spare_page)
        positions = self._lay_out()
        if self.bounds is None:
            self.input_ids, self.logits_rows = input_ids, logits_rows
            self.position_ids, self.kv_slots = to_device(torch.from_numpy(positions), self.device)
        else:
            self._frame.fill(self.bounds, input_ids, logits_rows, positions)
            self.input_ids, self.logits_rows, self.position_ids, self.kv_slots = self._frame.views(self.bounds)
        self._add_accepted()
        self._fill_adapters()
        if self.head_groups is not None:
            self.head_groups.fill(as_array(self.heads), None if self.bounds is None else self.bounds.num_drafts)

    def _lay_out(self) -> npt.NDArray[np.int64]:
        """Set the host's arrays of the segments. Returns [2, T] each token's position, and where its K and V go."""
        segments, num_segments = self.segments, len(self.segments)
        self.starts = np.fromiter((segment.start for segment in segments), np.int32, num_segments)
        self.counts = np.fromiter((segment.num_tokens for segment in segments), np.int32, num_segments)
        self.first_rows = (np.cumsum(self.counts) - self.counts).astype(np.int32)
        self.num_uncertain = np.fromiter((segment.num_uncertain for segment in segments), np.int32, num_segments)
        self.device_rows = np.fromiter((segment.device_row for segment in segments), np.int32, num_segments)
        num_pages = -(-(self.starts + self.num_uncertain + self.counts) // self.page_size)
        self.page_table = np.zeros((num_segments, int(num_pages.max(initial=1))), np.int32)
        for row, segment, count in zip(self.page_table, segments, num_pages.tolist(), strict=True):
            row[:count] = segment.page_ids[:count]
        # [T] segment and position of each token
        owners = np.repeat(np.arange(num_segments), self.counts)
        positions = np.arange(owners.size) + (self.starts - self.first_rows).astype(np.int64)[owners]
        return np.stack([positions, self._slots(owners, positions)])

    def _slots(self, owners: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the K and V of these positions of these segments go, in the same shape."""
        pages = self.page_table[owners, positions // self.page_size].astype(np.int64)
        slots: npt.NDArray[np.int64] = pages * self.page_size + positions % self.page_size
        return slots

    def _settled(self, segment: Segment) -> Segment:
        """The segment at its true position where the host can read it."""
        if segment.num_uncertain == 0 or self.adds_on_device:
            return segment
        assert self.num_accepted is not None
        start = segment.start + int(self.num_accepted[segment.device_row])
        return replace(segment, start=start, num_uncertain=0, device_row=-1)

    def _add_accepted(self) -> None:
        """Move the tokens of uncertain segments to their true positions, on the device."""
        if not self.num_uncertain.any():
            return
        assert self.num_accepted is not None
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        tokens = np.flatnonzero(self.num_uncertain[owners])
        owners = owners[tokens]
        positions = tokens + (self.starts - self.first_rows).astype(np.int64)[owners]
        # [tokens, most accepted drafts + 1] where K and V go, by the number of accepted drafts
        steps = np.minimum(np.arange(self.num_uncertain.max() + 1), self.num_uncertain[owners][:, None])
        slots = self._slots(owners[:, None], positions[:, None] + steps)
        numbers = np.concatenate([tokens[:, None], self.device_rows[owners][:, None], slots], axis=1)
        table = to_device(torch.from_numpy(numbers), self.device)
        accepted = self.num_accepted.index_select(0, table[:, 1])
        self.position_ids.index_add_(0, table[:, 0], accepted)
        self.kv_slots.index_copy_(0, table[:, 0], table[:, 2:].gather(1, accepted[:, None])[:, 0])

    def token_types(self) -> torch.Tensor | None:
        """[T] 1 for tokens of the second text of a pair, else 0; None where there are none."""
        if not any(segment.second_text for segment in self.segments):
            return None
        types = np.zeros(int(self.counts.sum()), np.int64)
        for segment, first in zip(self.segments, self.first_rows.tolist(), strict=True):
            if segment.second_text:
                types[first + max(0, segment.second_text - segment.start) : first + segment.num_tokens] = 1
        return to_device(torch.from_numpy(types), self.device)

    def _spare(self, num_rows: int, page_id: int) -> list[Segment]:
        """Rows of no request, in a page of no request."""
        counts = [min(self.page_size, num_rows - first) for first in range(0, num_rows, self.page_size)]
        return [Segment(0, count, (page_id,)) for count in counts]

    @property
    def host_rows(self) -> Sequence[int]:
        """[S] `logits_rows` on the host; waits for the device where they were not given."""
        return self.logits_rows.tolist() if self._host_rows is None else self._host_rows

    @property
    def num_draft_rows(self) -> int:
        """Rows of heads' draft tokens that a forward pass gives: E, or more of a padded step."""
        return self.num_drafts if self.bounds is None else self.bounds.num_drafts

    @property
    def num_logits(self) -> int:
        """Wanted rows of a forward pass: S + E."""
        return self.num_wanted + self.num_drafts

    def _fill_adapters(self) -> None:
        self.adapter_rows = self.head_adapter_rows = NO_ADAPTERS
        runs, bounds = [run for segment in self.segments for run in slot_runs(segment)], self.bounds
        slots, counts = [slot for slot, _ in runs], [count for _, count in runs]
        if max(slots, default=-1) < 0 and not (bounds is not None and bounds.has_adapters):
            return
        self.adapter_rows = AdapterRows(slots, counts)
        row_slots = np.repeat(np.asarray(slots, np.int32), counts)
        wanted = row_slots[np.asarray(self.host_rows, np.int64)]
        # [S] -1 for rows that are padding
        head_slots = np.full(self.logits_rows.shape[0], -1, np.int32)
        head_slots[: len(wanted)] = wanted
        drafted = [heads.row for heads in self.heads for _ in range(heads.num_drafts)]
        head_slots = np.concatenate([head_slots, head_slots[np.asarray(drafted, np.int64)]])
        self.head_adapter_rows = rows_of(head_slots.tolist())
        if self._groups is not None:
            self.adapter_rows.groups, self.head_adapter_rows.groups = self._groups
            self._groups[0].fill(row_slots, None if bounds is None else bounds.num_rows)
            self._groups[1].fill(head_slots, None if bounds is None else bounds.num_logits)


class Frame:
    """What the device reads of a padded step apart from pages and adapters, at the same addresses for the same number
    of rows.
    """

    def __init__(self, most_rows: int, device: torch.device) -> None:
        # [most_rows] token ids
        self._input_ids = torch.zeros(most_rows, dtype=torch.long, device=device)
        # [most_rows] indices into T
        self._logits_rows = torch.zeros(most_rows, dtype=torch.long, device=device)
        # [2 * most_rows] of T rows first the positions, then where their K and V go
        self._positions = torch.zeros(2 * most_rows, dtype=torch.long, device=device)

    def fill(
        self, bounds: Bounds, input_ids: torch.Tensor, logits_rows: torch.Tensor, positions: npt.NDArray[np.int64]
    ) -> None:
        """input_ids: [≤ T], logits_rows: [≤ S] on the device; positions: [2, T] of the bounds."""
        num_rows = bounds.num_rows
        self._input_ids[: input_ids.shape[0]].copy_(input_ids)
        self._logits_rows[: logits_rows.shape[0]].copy_(logits_rows)
        self._logits_rows[logits_rows.shape[0] : bounds.num_wanted].zero_()
        host = sendable(torch.from_numpy(positions.ravel()), self._positions.device)
        self._positions[: 2 * num_rows].copy_(host, non_blocking=True)

    def views(self, bounds: Bounds) -> tuple[torch.Tensor, ...]:
        """[T] token ids, [S] rows whose logits are wanted, [T] positions, [T] where K and V go."""
        num_rows = bounds.num_rows
        positions, kv_slots = self._positions[: 2 * num_rows].split(num_rows)
        return self._input_ids[:num_rows], self._logits_rows[: bounds.num_wanted], positions, kv_slots


class Network(Protocol):
    """What the step loop needs of a model: fill `inputs`, call `forward`."""

    inputs: StepInputs

    def forward(self) -> torch.Tensor:
        """Logits of `inputs.logits_rows`: [S, V] float32."""
        ...


class RankDesync(RuntimeError):
    """A step failed on one of several ranks: they are no longer in step and can compute nothing together any more."""
