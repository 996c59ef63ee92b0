"""The paged kernels, whose cases are in paged_cases.py, and the tables of a step."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.shard.attention.spans import (
    HEADER,
    RECORD,
    SPAN,
    LayerKind,
    Packer,
    SegmentRows,
    capacity,
    header_size,
    pack,
    spans_at,
)
from lorikeet.shard.batch.padding import Bounds
from tests.shard.apart import KernelsApart


class TestPaged(KernelsApart):
    cases = (Path(__file__).with_name("paged_cases.py"),)
    sample = (
        "(reference and (grouped or sinks)) or (eight_bits and bfloat16) or (equal_bits and grouped) or under_bounds "
        "or (by_length and (both or padded)) or (accepted and beyond and True)"
    )
    compiles = "tests.shard.attention.compile_paged"


def rows_of(*segments: tuple[int, int]) -> SegmentRows:
    """Start and tokens of each segment, with 100 pages each."""
    starts, counts = (np.array(each, np.int32) for each in zip(*segments, strict=True))
    return SegmentRows(starts, counts, np.cumsum(counts) - counts, 100 * np.arange(len(counts)), np.zeros_like(counts))


NO_PAGES = np.empty(0, np.int32)
SIZES = ((0, 50, 10**6), (1, 64, 1000), (1, 3, 71), (None, 1, 100, 700))
"""Partial rows, programs, group and window."""


@pytest.mark.parametrize(
    ("num_partial_rows", "num_programs", "group", "window"),
    [
        pytest.param(rows, programs, group, window, marks=() if (a + 2 * b + c) % 3 == 0 else pytest.mark.long)
        for (a, rows), (b, programs), (_, group), (c, window) in itertools.product(*map(enumerate, SIZES))
    ],
)
def test_every_row_sees_every_span_once(
    window: int | None, group: int, num_programs: int, num_partial_rows: int
) -> None:
    segments = [(0, 300), (5000, 1), (511, 2), (3000, 17), (0, 1)]
    kind = LayerKind(group, 2, window, 64, num_partial_rows)
    tables = pack([kind], rows_of(*segments), NO_PAGES, num_programs)
    numbers = tables.numbers
    at, num_items, folds_at, num_folds = numbers[:HEADER]
    folds = numbers[folds_at : folds_at + num_folds * RECORD].reshape(-1, RECORD)
    seen: dict[tuple[int, int], set[int]] = {}
    places: set[int] = set()
    merged: dict[int, set[int]] = {}
    for first_row, first, count, _, _, begin, end, fold in numbers[at : at + num_items * RECORD].reshape(-1, 8):
        assert 0 < count <= 64 and begin < end
        for row in range(count):
            spans = seen.setdefault((int(first_row), int(first + row)), set())
            assert spans.isdisjoint(range(begin, end))
            spans.update(range(begin, end))
        if fold >= 0:
            memory, first_span, num_spans, *_ = folds[fold].tolist()
            assert end == begin + 1 and first_span <= begin < first_span + num_spans
            merged.setdefault(int(fold), set()).add(int(begin))
            mine = {memory + (int(begin) - first_span) * int(count) + row for row in range(count)}
            assert places.isdisjoint(mine)
            places |= mine
    firsts = [first for first, _ in _firsts(segments)]
    for (start, count), first_row in zip(segments, firsts, strict=True):
        for row in range(count * group):
            position = start + row // group
            lowest = 0 if window is None else max(0, position - window + 1)
            first, last = spans_at(np.array([lowest, position]), SPAN).tolist()
            needed = range(first, last + 1)
            assert seen.pop((first_row, row)).issuperset(needed)
    assert not seen
    assert max(places, default=-1) < num_partial_rows and num_folds * 2 <= num_programs
    assert sorted(merged) == list(range(num_folds))
    assert all(len(merged[fold]) == num_spans for fold, (_, _, num_spans, *_) in enumerate(folds.tolist()))


def _firsts(segments: list[tuple[int, int]]) -> list[tuple[int, int]]:
    counts = [count for _, count in segments]
    return [(sum(counts[:index]), count) for index, count in enumerate(counts)]


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_no_step_exceeds_the_capacity_of_its_bounds(group: int, num_kv_heads: int) -> None:
    generator = np.random.default_rng(0)
    kinds = [LayerKind(group, num_kv_heads, window, 64, 10**4) for window in (None, 128)]
    bounds = Bounds(num_rows=64, max_kv_len=32768)
    most = capacity(kinds, bounds, 64, 264)
    for _ in range(50):
        cuts = np.sort(generator.integers(0, 65, generator.integers(1, 64)))
        counts = np.diff([0, *cuts, 64])
        counts = counts[counts > 0]
        segments = [(int(generator.integers(0, 32768 - count + 1)), int(count)) for count in counts]
        num_pages = sum(-(-(start + count) // 64) for start, count in segments)
        tables = pack(kinds, rows_of(*segments), np.zeros(num_pages, np.int32), 264)
        assert len(tables.numbers) <= most


def test_programs_share_a_long_request_among_short_ones() -> None:
    tables = pack([LayerKind(4, 8, None, 64, 10**6)], rows_of((32767, 1), *[(100, 1)] * 31), NO_PAGES, 264)
    num_spans = 1024 // 128 + (32768 - 1024) // 512
    assert tables.num_items == [31 + num_spans] and tables.num_folds == [1]
    header = header_size(1)
    spans = tables.numbers[header : header + (31 + num_spans) * RECORD].reshape(-1, RECORD)[:, 5:7]
    assert (spans[:, 1] - spans[:, 0] == 1).all()


STEPS = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 700), st.integers(1, 3)), min_size=1, max_size=5), st.integers(0, 40)),
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_records_that_are_kept_are_those_of_the_step(steps: list[tuple[list[tuple[int, int]], int]]) -> None:
    """Segments that move on by one token for a while, with other segments after them."""
    kinds = [LayerKind(4, 2, None, 16, 10**6), LayerKind(2, 4, 100, 16, 10**6)]
    packer = Packer(6, 64)
    for segments, num_further in steps:
        for further in range(num_further):
            rows = rows_of(*[(start + further * (count == 1), count) for start, count in segments])
            pages = np.arange(further, further + 2 * len(segments), dtype=np.int32)
            kept, made = packer.pack(kinds, rows, pages), pack(kinds, rows, pages, 6, 64)
            assert kept.numbers.tolist() == made.numbers.tolist()
            assert (kept.num_items, kept.num_folds) == (made.num_items, made.num_folds)
