"""Divides a step's attention among programs, as integer records of tiles of query rows and spans of their keys.

A row of a tile is one query head of one token; a tile has neighbouring rows of one segment and one K and V head. One
program computes all spans of a tile, or one program each if the tile has more than a fair share per program. Both give
equal bits. Works on numpy arrays only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lorikeet.shard.batch.padding import Bounds

SPAN = 512
"""Positions of a span, but of the first ones."""
SHORT_SPANS = 2
"""The first so many times SPAN positions are in spans of a quarter, at least LEAST_SPAN: so one request with a short
context is computed by enough programs.
"""
LEAST_SPAN = 64
HEADER = 4
"""Numbers per kind in `StepTables.numbers`: offset and number of its items, offset and number of its folds."""
START = 3
"""Which number of an item is the segment's first position."""
RECORD = 8
"""Numbers of an item (first row of the segment in T, first row of the tile in the segment, rows, the segment's first
position, offset of its pages, first span, end of spans, the fold that the span belongs to or -1) and of a fold, a tile
whose spans are shared (partial row of its first span, its first span, number of its spans).
"""

Numbers = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerKind:
    """Layers that share their records."""

    group: int
    """Query heads of one K and V head."""
    num_kv_heads: int
    window: int | None
    tile_rows: int
    num_partial_rows: int
    """Rows of the memory for results of single spans."""


@dataclass(frozen=True)
class SegmentRows:
    """The segments of a step. All are [R]."""

    starts: Numbers
    counts: Numbers
    first_rows: Numbers
    page_offsets: Numbers
    """Offset of the segment's pages in the pages of all segments."""
    num_uncertain: Numbers
    """Positions that the device may add to `starts`, at most."""


@dataclass(frozen=True)
class StepTables:
    """The tables of a step that the kernels read."""

    # [kinds * HEADER, then items, folds and page ids] int32
    numbers: Numbers
    # [kinds] number of items, and of folds
    num_items: Sequence[int]
    num_folds: Sequence[int]


def short_span(span: int) -> int:
    """Positions of the first spans, where later ones have `span`."""
    return max(LEAST_SPAN, span // 4)


def spans_at(positions: Numbers, span: int) -> Numbers:
    """The span of each position; the same for every segment, so that a row's bits do not depend on the batch."""
    num_short = SHORT_SPANS * span // short_span(span)
    late = num_short + (positions - SHORT_SPANS * span) // span
    return np.where(positions < SHORT_SPANS * span, positions // short_span(span), late).astype(np.int32)


def next_span(positions: Numbers, span: int) -> Numbers:
    """The first position of the span after that of each position."""
    sizes = np.where(positions < SHORT_SPANS * span, short_span(span), span)
    return (positions // sizes + 1) * sizes


def pack(
    kinds: Sequence[LayerKind], rows: SegmentRows, pages: Numbers, num_programs: int, span: int = SPAN
) -> StepTables:
    """The records of every kind, then `pages`, the concatenated page ids of all segments."""
    plans = [plan(kind, rows, num_programs, span) for kind in kinds]
    header = np.zeros(header_size(len(kinds)), np.int32)
    at = header.size
    for index, (items, folds) in enumerate(plans):
        header[index * HEADER : (index + 1) * HEADER] = (at, len(items), at + items.size, len(folds))
        at += items.size + folds.size
    for items, _ in plans:
        items[:, 4] += at
    records = [records.ravel() for pair in plans for records in pair]
    numbers = np.concatenate([header, *records, pages])
    return StepTables(numbers, [len(items) for items, _ in plans], [len(folds) for _, folds in plans])


class Packer:
    """`pack` for one step after the other. The records are kept as long as only pages change, and the positions of
    single tokens within their spans.
    """

    def __init__(self, num_programs: int, span: int) -> None:
        self._num_programs, self._span = num_programs, span
        self._tables: StepTables | None = None
        # [R] of the segments of the records; the records hold while first positions are in these bounds
        self._counts = self._page_offsets = self._lowest = self._end = np.empty(0, np.int32)
        self._first_page = 0
        """Index of the first page id in the numbers."""
        # [n] where the numbers have a first position, and of which segment
        self._starts: tuple[Indices, Indices] = np.empty(0, np.int64), np.empty(0, np.int64)

    def pack(self, kinds: Sequence[LayerKind], rows: SegmentRows, pages: Numbers) -> StepTables:
        """The same as `pack`."""
        if not len(rows.counts) or np.count_nonzero(rows.num_uncertain):
            self._tables = None
            return pack(kinds, rows, pages, self._num_programs, self._span)
        tables = self._tables
        if tables is None or not self._hold(tables, rows, pages):
            tables = self._tables = pack(kinds, rows, pages, self._num_programs, self._span)
            self._keep(tables, kinds, rows, pages)
            return tables
        numbers = tables.numbers.copy()
        places, segments = self._starts
        numbers[places] = rows.starts[segments]
        numbers[self._first_page :] = pages
        return StepTables(numbers, tables.num_items, tables.num_folds)

    def _hold(self, tables: StepTables, rows: SegmentRows, pages: Numbers) -> bool:
        """Whether the records of `tables` are those of these segments, apart from first positions."""
        if len(rows.counts) != len(self._counts) or len(tables.numbers) - len(pages) != self._first_page:
            return False
        is_same = (rows.counts == self._counts) & (rows.page_offsets == self._page_offsets)
        return bool((is_same & (rows.starts >= self._lowest) & (rows.starts < self._end)).all())

    def _keep(self, tables: StepTables, kinds: Sequence[LayerKind], rows: SegmentRows, pages: Numbers) -> None:
        self._counts, self._page_offsets, self._lowest = rows.counts, rows.page_offsets, rows.starts
        end = next_span(rows.starts, self._span)
        for window in {kind.window for kind in kinds if kind.window is not None}:
            first_seen = np.maximum(rows.starts - window + 1, 0)
            end = np.minimum(end, next_span(first_seen, self._span) + window - 1)
        self._end = np.where(rows.counts > 1, rows.starts + 1, end)
        self._first_page = len(tables.numbers) - len(pages)
        self._starts = starts_of(tables, replace(rows, num_uncertain=np.ones_like(rows.counts)))


def starts_of(tables: StepTables, rows: SegmentRows) -> tuple[Indices, Indices]:
    """Where `tables.numbers` has the first position of an uncertain segment: [n] indices, and [n] the segments."""
    places, segments = [], []
    for kind, num_items in enumerate(tables.num_items):
        at = int(tables.numbers[kind * HEADER])
        items = tables.numbers[at : at + num_items * RECORD].reshape(-1, RECORD)
        owners = np.searchsorted(rows.first_rows, items[:, 0], side="right") - 1
        moved = np.flatnonzero(rows.num_uncertain[owners])
        places.append(at + RECORD * moved + START)
        segments.append(owners[moved])
    return np.concatenate(places).astype(np.int64), np.concatenate(segments).astype(np.int64)


def header_size(num_kinds: int) -> int:
    """Size of the header, which precedes the records."""
    return -(-num_kinds * HEADER // RECORD) * RECORD


def capacity(kinds: Sequence[LayerKind], bounds: Bounds, page_size: int, num_programs: int, span: int = SPAN) -> int:
    """The largest size of `StepTables.numbers` within `bounds`."""
    most_spans = int(spans_at(np.array([bounds.max_kv_len - 1]), span)[0]) + 1
    size = header_size(len(kinds)) + bounds.num_rows * -(-bounds.max_kv_len // page_size)
    for kind in kinds:
        tiles = bounds.num_rows + bounds.num_rows * kind.group // kind.tile_rows
        split = min(tiles, num_programs // kind.num_kv_heads + 1) if most_spans > 1 else 0
        parts = min(split * most_spans, kind.num_partial_rows)
        size += RECORD * (tiles + parts + split)
    return size


def plan(kind: LayerKind, rows: SegmentRows, num_programs: int, span: int) -> tuple[Numbers, Numbers]:
    """[items, RECORD], the longest first, and [folds, RECORD]."""
    owners, first, count = _split(rows.counts * kind.group, kind.tile_rows)
    starts = rows.starts[owners]
    ends = spans_at(starts + rows.num_uncertain[owners] + (first + count - 1) // kind.group, span) + 1
    begins = np.zeros_like(ends)
    if kind.window is not None:
        begins = spans_at(np.maximum(starts + first // kind.group - kind.window + 1, 0), span)
    order = np.argsort(begins - ends, kind="stable")
    owners, first, count, begins, ends = (array[order] for array in (owners, first, count, begins, ends))
    spans = ends - begins
    fair = max(1, -(-int(spans.sum()) * kind.num_kv_heads // num_programs))
    # [tiles] memory for partial rows up to and including the tile's; the longest tiles are first
    taken = np.cumsum(spans.astype(np.int64) * count)
    num_split = int(((spans > fair) & (taken <= kind.num_partial_rows)).sum())
    common = np.stack([rows.first_rows[owners], first, count, rows.starts[owners], rows.page_offsets[owners]], axis=1)

    whole = np.concatenate([common, np.stack([begins, ends, np.full_like(ends, -1)], axis=1)], axis=1)[num_split:]
    tiles, numbers = _repeat(spans[:num_split])
    span_ids = begins[tiles] + numbers
    parts = np.concatenate([common[tiles], np.stack([span_ids, span_ids + 1, tiles], axis=1)], axis=1)
    items = np.concatenate([whole, parts]).astype(np.int32)

    first_rows = taken[:num_split] - spans[:num_split] * count[:num_split]
    folds = np.zeros((num_split, RECORD), np.int32)
    folds[:, :3] = np.stack([first_rows, begins[:num_split], spans[:num_split]], axis=1)
    return items, folds


def _split(sizes: Numbers, most: int) -> tuple[Numbers, Numbers, Numbers]:
    """Split each size into pieces of up to `most`: the owner, start and size of each piece."""
    owners, numbers = _repeat(-(-sizes // most))
    first = numbers * most
    return owners, first, np.minimum(most, sizes[owners] - first).astype(np.int32)


def _repeat(times: Numbers) -> tuple[Numbers, Numbers]:
    """Each index `times` times, and the number of its earlier occurrences."""
    owners = np.repeat(np.arange(len(times), dtype=np.int32), times)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(times) - times, times)
    return owners, numbers.astype(np.int32)
