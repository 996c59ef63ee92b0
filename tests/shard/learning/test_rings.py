"""Rings of rows: each pair keeps its newest, within a bound for all, and a reader notices blocks that were replaced."""

import mmap
import os

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorikeet.adapters.medusa.learning import CANDIDATE_SHARE, JobRows
from lorikeet.adapters.medusa.texts import NOTHING
from lorikeet.proto.learning import BLOCK_ROWS, MIN_BLOCKS, Pair, RowsLayout, TrainingJob, row_indices
from lorikeet.shard.learning.learning import Rings
from tests.shard.learning.learners import check_blocks

SIZE = 4


def rows(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `first` … and rows of hidden values that repeat them."""
    tokens = np.arange(first, first + count, dtype=np.int32)
    return tokens, np.repeat(tokens.astype(np.uint16)[:, None], SIZE, axis=1)


def append(rings: Rings, pair: Pair, text: int, tokens: np.ndarray, hidden: np.ndarray) -> None:
    rings.append(pair, [text] * len(tokens), tokens.tolist(), hidden)


def rows_of(rings: Rings, job: TrainingJob) -> JobRows:
    """What a trainer reads."""
    memory = mmap.mmap(rings.fd, rings.layout.num_bytes, prot=mmap.PROT_READ)
    return JobRows(memoryview(memory), rings.layout, job, 3)


def test_too_little_memory_is_an_error_that_says_how_much_is_needed() -> None:
    with pytest.raises(ValueError, match=r"--learning-memory must be at least \d+ bytes"):
        RowsLayout.within(1000, 4096)
    assert RowsLayout.within(RowsLayout(SIZE, 20).num_bytes, SIZE).num_blocks == 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3 * BLOCK_ROWS)), min_size=1, max_size=40))
@example([(0, 1), (2, 257), (0, 256), (1, 257), (3, 513), (2, 1)]).via("blocks counted in place of rows")
def test_every_pair_keeps_its_newest_rows_and_none_of_another(steps: list[tuple[int, int]]) -> None:
    layout = RowsLayout(SIZE, MIN_BLOCKS)
    rings, kept = Rings(layout), dict[int, list[int]]()
    _, array = layout.arrays(memoryview(mmap.mmap(rings.fd, layout.num_bytes)))
    newest = 0
    for number, count in steps:
        tokens, hidden = rows(newest % 60_000, count)
        newest += count
        append(rings, (f"tenant {number}", ""), number, tokens, hidden)
        kept.setdefault(number, []).extend(tokens.tolist())
        check_blocks(rings)
        assert rings.num_bytes <= layout.num_bytes
        for other, expected in kept.items():
            indices = row_indices(rings.blocks((f"tenant {other}", "")))
            found = array["token_id"][indices].tolist()
            assert found == expected[len(expected) - len(found) :]
            assert (array["text"][indices] == other).all()
            assert (array["hidden"][indices, 0] == np.array(found, np.uint16)).all()
    assert rings.num_rows((f"tenant {steps[-1][0]}", "")) >= min(len(kept[steps[-1][0]]), BLOCK_ROWS)


def test_the_pair_with_the_most_rows_gives_way() -> None:
    rings = Rings(RowsLayout(SIZE, MIN_BLOCKS))
    append(rings, ("small", ""), 1, *rows(0, BLOCK_ROWS))
    for first in range(0, 10 * BLOCK_ROWS, BLOCK_ROWS):
        append(rings, ("flood", ""), 2, *rows(first, BLOCK_ROWS))
    assert rings.num_rows(("small", "")) == BLOCK_ROWS
    assert rings.num_rows(("flood", "")) == (MIN_BLOCKS - 1) * BLOCK_ROWS
    append(rings, ("new", ""), 3, *rows(0, 1))
    assert rings.num_rows(("small", "")) == BLOCK_ROWS and rings.num_rows(("new", "")) == 1
    rings.clear()
    check_blocks(rings)
    assert rings.num_bytes == 0 and not any(os.pread(rings.fd, rings.layout.num_bytes, 8 * MIN_BLOCKS))


def job_of(rings: Rings, num_new: int) -> TrainingJob:
    return TrainingJob(("one", ""), rings.blocks(("one", "")), num_new, "", 1.02)


def test_a_job_learns_from_whole_texts_and_holds_out_the_newest() -> None:
    rings = Rings(RowsLayout(SIZE, MIN_BLOCKS))
    texts = {text: list(range(100 * text, 100 * text + 20 + text)) for text in range(1, 13)}
    positions = dict.fromkeys(texts, 0)
    while any(positions[text] < len(ids) for text, ids in texts.items()):  # interleaved, as steps give them
        for text, ids in texts.items():
            part = ids[positions[text] : positions[text] + 1 + text % 3]
            if part:
                append(rings, ("one", ""), text, *rows(part[0], len(part)))
                positions[text] += len(part)
    total = sum(map(len, texts.values()))
    found = rows_of(rings, job_of(rings, total))
    held_out = {ids[0] // 100 for ids in found.held_out.output_ids}
    assert held_out and all(texts[text] == ids for ids in found.held_out.output_ids for text in [ids[0] // 100])
    assert found.num_held_out >= int(0.1 * total)
    assert max(texts) in held_out  # it is the longest, so that it ends last
    batch = np.concatenate(found.batches(16, np.random.default_rng(0)))
    assert sorted(batch.tolist()) == list(range(total - found.num_held_out))
    hidden, labels = found.take(batch)
    tokens = hidden.view(torch.int16)[:, 0].tolist()
    num_rare = 0
    for token, label in zip(tokens, labels.tolist(), strict=True):
        ids = texts[token // 100]
        after = ids[ids.index(token) + 1 :][:3]
        known = [NOTHING if number == NOTHING else int(found.candidates[number]) for number in label]
        wanted = after + [NOTHING] * (3 - len(after))
        num_rare += sum(a != b for a, b in zip(known, wanted, strict=True))
        assert all(a in (NOTHING, b) for a, b in zip(known, wanted, strict=True)) and token // 100 not in held_out
    assert num_rare <= (1 - CANDIDATE_SHARE) * 3 * total


def test_new_rows_are_learned_with_as_many_old_ones() -> None:
    rings = Rings(RowsLayout(SIZE, MIN_BLOCKS))
    for text in range(50):
        append(rings, ("one", ""), text, *rows(20 * text, 20))
    found = rows_of(rings, job_of(rings, 200))
    batch = np.concatenate(found.batches(16, np.random.default_rng(0)))
    tokens = found.take(batch)[0].view(torch.int16)[:, 0].numpy()
    first_new = 1000 - 200 - found.num_held_out
    new = tokens[tokens >= first_new]
    assert sorted(new.tolist()) == list(range(first_new, 1000 - found.num_held_out))
    assert len(tokens) == 2 * len(new)


def test_nothing_is_learned_from_rows_that_were_replaced_meanwhile() -> None:
    rings = Rings(RowsLayout(SIZE, MIN_BLOCKS))
    for text in range(MIN_BLOCKS):
        append(rings, ("one", ""), text, *rows(0, BLOCK_ROWS))
    found = rows_of(rings, job_of(rings, 10**6))
    append(rings, ("two", ""), 99, *rows(5000, 1))  # takes the oldest block
    batch = np.arange(len(found.indices))
    labels = found.take(batch)[1]
    gone = (found.indices // BLOCK_ROWS) == found.indices[0] // BLOCK_ROWS
    assert gone.sum() == BLOCK_ROWS
    assert (labels[torch.from_numpy(gone)] == NOTHING).all() and (labels[torch.from_numpy(~gone)] != NOTHING).any()
    assert len(rows_of(rings, job_of(rings, 1)).indices) < len(found.indices)
