"""The segments of a step, one per request, as columns. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, overload

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int32]


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


NO_SEGMENTS, NO_PAGES = np.empty((8, 0), np.int32), np.empty((0, 1), np.int32)


class Segments(Sequence[Segment]):
    """The segments of a step. Each column is a row of `table`; `table` and `page_table` are not changed."""

    def __init__(self, table: Numbers, page_table: Numbers) -> None:
        """table: [8, R] the fields of Segment except `page_ids`, in order; page_table: [R, most pages of a segment],
        any value after a segment's own pages.
        """
        self._table = table
        self.page_table = page_table
        # [R] each
        self.starts, self.counts, self.slots, self.slot_starts, self.second_texts, self.per_token = table[:6]
        self.num_uncertain, self.device_rows = table[6:]

    @classmethod
    def of(cls, segments: Sequence[Segment], page_size: int) -> Self:
        """The columns of these."""
        if not segments:
            return cls(NO_SEGMENTS, NO_PAGES)
        rows = [
            (segment.start, segment.num_tokens, segment.slot, segment.slot_start, segment.second_text,
             segment.per_token, segment.num_uncertain, segment.device_row)
            for segment in segments
        ]  # fmt: skip
        table = np.array(rows, np.int32).reshape(-1, 8).T.copy()
        num_pages = -(-(table[0] + table[1] + table[6]) // page_size)
        page_table = np.zeros((len(rows), int(num_pages.max(initial=1))), np.int32)
        for row, segment, count in zip(page_table, segments, num_pages.tolist(), strict=True):
            row[:count] = segment.page_ids[:count]
        return cls(table, page_table)

    @classmethod
    def decoding(
        cls,
        starts: Numbers,
        slots: Numbers,
        slot_starts: Numbers,
        page_table: Numbers,
        counts: npt.NDArray[np.int64],
        num_uncertain: Numbers,
        device_rows: npt.NDArray[np.int64],
    ) -> Self:
        """Single texts, in order of the fields of Segment. All are [R] but page_table: [R, pages]."""
        table = np.zeros((8, len(starts)), np.int32)
        table[0], table[1], table[2], table[3], table[6] = starts, counts, slots, slot_starts, num_uncertain
        table[7] = np.where(num_uncertain > 0, device_rows, -1) if np.count_nonzero(num_uncertain) else -1
        return cls(table, page_table)

    def then(self, later: "Segments") -> "Segments":
        """These, and `later` after them."""
        if not later or not self:
            return self if self else later
        width = max(self.page_table.shape[1], later.page_table.shape[1])
        page_table = np.zeros((len(self) + len(later), width), np.int32)
        page_table[: len(self), : self.page_table.shape[1]] = self.page_table
        page_table[len(self) :, : later.page_table.shape[1]] = later.page_table
        return Segments(np.concatenate([self._table, later._table], axis=1), page_table)

    def settled(self, num_accepted: npt.NDArray[np.int64]) -> "Segments":
        """The segments at their true positions. num_accepted: by `device_row`, drafts that the step before accepted."""
        is_moved = self.num_uncertain > 0
        if not is_moved.any():
            return self
        table = self._table.copy()
        table[0, is_moved] += num_accepted[self.device_rows[is_moved]].astype(np.int32)
        table[6], table[7] = 0, np.where(is_moved, -1, self.device_rows)
        return Segments(table, self.page_table)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Segment]: ...
    def __getitem__(self, index: int | slice) -> Segment | list[Segment]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        start, count, slot, slot_start, second_text, per_token, *moved = self._table[:, index].tolist()
        page_ids = self.page_table[index].tolist()
        return Segment(start, count, page_ids, slot, slot_start, second_text, bool(per_token), *moved)
