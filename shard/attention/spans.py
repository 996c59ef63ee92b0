"""Who computes what of a step's attention: tiles of query rows, spans of the keys that they see, as records of numbers.

A row of a tile is one query head of one token; a tile has neighbouring rows of one segment and one K and V head. Its
spans go to one program, or to one each where the tile sees more than a program's fair share: results are the same, bit
by bit. Knows nothing of tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorikeet.shard.batch.padding import Bounds

SPAN = 512
"""Positions of a span."""
FOLD_ROWS = 8
"""Rows whose spans one program merges."""
HEADER = 4
"""Numbers about a kind, of `Told.numbers`: where its items begin, how many; where its folds begin, how many."""
RECORD = 8
"""Numbers of an item (first row of the segment in T, first row of the tile in the segment, rows, the segment's first
position, where its pages begin, first span, end of spans, first partial row or -1) and of a fold (first row of the
segment in T, first row in the segment, rows, partial row of the first span, partial rows from span to span, spans).
"""

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Kind:
    """Layers that share their records."""

    group: int
    """Query heads of one K and V head."""
    num_kv_heads: int
    window: int | None
    tile_rows: int
    num_partial_rows: int
    """Rows that there is memory for, of what single spans give."""


@dataclass(frozen=True)
class Rows:
    """The segments of a step. All are [R]."""

    starts: Numbers
    counts: Numbers
    first_rows: Numbers
    page_offsets: Numbers
    """Where the segment's pages begin, counted from the first page of all."""


@dataclass(frozen=True)
class Told:
    """What the kernels read of a step."""

    # [kinds * HEADER, then items, folds and page ids] int32
    numbers: Numbers
    # [kinds] programs that have something to do in `attend` and in `fold`, if each did one thing
    num_items: Sequence[int]
    num_folds: Sequence[int]


def pack(kinds: Sequence[Kind], rows: Rows, pages: Numbers, num_programs: int, span: int = SPAN) -> Told:
    """The records of every kind, then `pages`: the page ids of all segments, one segment after another."""
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
    return Told(numbers, [len(items) for items, _ in plans], [len(folds) for _, folds in plans])


def header_size(num_kinds: int) -> int:
    """Numbers before the first record."""
    return -(-num_kinds * HEADER // RECORD) * RECORD


def capacity(kinds: Sequence[Kind], bounds: Bounds, page_size: int, num_programs: int, span: int = SPAN) -> int:
    """Numbers that a step within `bounds` has at most."""
    most_spans = -(-bounds.max_kv_len // span)
    size = header_size(len(kinds)) + bounds.num_rows * -(-bounds.max_kv_len // page_size)
    for kind in kinds:
        tiles = bounds.num_rows + bounds.num_rows * kind.group // kind.tile_rows
        split = min(tiles, num_programs // kind.num_kv_heads + 1) if most_spans > 1 else 0
        parts = min(split * most_spans, kind.num_partial_rows)
        size += RECORD * (tiles + parts + split * -(-kind.tile_rows // FOLD_ROWS))
    return size


def plan(kind: Kind, rows: Rows, num_programs: int, span: int) -> tuple[Numbers, Numbers]:
    """[items, RECORD], those that take longest first, and [folds, RECORD]."""
    owners, first, count = _cut(rows.counts * kind.group, kind.tile_rows)
    starts = rows.starts[owners]
    ends = (starts + (first + count - 1) // kind.group) // span + 1
    begins = np.zeros_like(ends)
    if kind.window is not None:
        begins = np.maximum(starts + first // kind.group - kind.window + 1, 0) // span
    order = np.argsort(begins - ends, kind="stable")
    owners, first, count, begins, ends = (each[order] for each in (owners, first, count, begins, ends))
    spans = ends - begins
    fair = max(1, -(-int(spans.sum()) * kind.num_kv_heads // num_programs))
    # [tiles] memory for partial rows up to and with the tile's; the longest come first
    taken = np.cumsum(spans.astype(np.int64) * count)
    num_split = int(((spans > fair) & (taken <= kind.num_partial_rows)).sum())
    common = np.stack([rows.first_rows[owners], first, count, rows.starts[owners], rows.page_offsets[owners]], axis=1)

    whole = np.concatenate([common, np.stack([begins, ends, np.full_like(ends, -1)], axis=1)], axis=1)[num_split:]
    tiles, numbers = _repeat(spans[:num_split])
    partial = (taken[:num_split] - spans[:num_split] * count[:num_split])[tiles] + numbers * count[tiles]
    span_ids = begins[tiles] + numbers
    parts = np.concatenate([common[tiles], np.stack([span_ids, span_ids + 1, partial], axis=1)], axis=1)
    items = np.concatenate([whole, parts]).astype(np.int32)

    tiles, at, size = _cut(count[:num_split], FOLD_ROWS)
    begin_of = taken[:num_split] - spans[:num_split] * count[:num_split]
    folds = np.zeros((len(tiles), RECORD), np.int32)
    folds[:, 0] = common[tiles, 0]
    folds[:, 1] = first[tiles] + at
    folds[:, 2] = size
    folds[:, 3] = begin_of[tiles] + at
    folds[:, 4] = count[tiles]
    folds[:, 5] = spans[tiles]
    return items, folds


def _cut(sizes: Numbers, most: int) -> tuple[Numbers, Numbers, Numbers]:
    """Pieces of up to `most`: whose each is, where it begins, its size."""
    owners, numbers = _repeat(-(-sizes // most))
    first = numbers * most
    return owners, first, np.minimum(most, sizes[owners] - first).astype(np.int32)


def _repeat(times: Numbers) -> tuple[Numbers, Numbers]:
    """Each index as often as `times` says, and how often it came before."""
    owners = np.repeat(np.arange(len(times), dtype=np.int32), times)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(times) - times, times)
    return owners, numbers.astype(np.int32)
