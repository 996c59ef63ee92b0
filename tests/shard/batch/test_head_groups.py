"""Drafts grouped for kernels: each is in one task, and a padded step has the addresses of its padding."""

import numpy as np
import pytest
import torch

from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.batch.row_groups import TASK_ROWS, HeadGroups, RowGroups, as_array, group
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.batch.transfer import Upload
from tests.shard.padded import Always

CPU = torch.device("cpu")
PLANS = {
    "none": [],
    "one": [HeadsRow(3, 5, 1)],
    "identical": [HeadsRow(row, 2, 3) for row in range(20)],
    "distinct": [HeadsRow(row, 9 - row, 1 + row % 4) for row in range(10)],
    "mixed": [HeadsRow(row % 7, row % 3, 1 + row % 5) for row in range(25)],
}


@pytest.mark.parametrize("num_padded", [None, 80])
@pytest.mark.parametrize("plan", PLANS)
def test_every_draft_token_is_in_one_task(plan: str, num_padded: int | None) -> None:
    groups, upload = HeadGroups(90), Upload(CPU)
    groups.fill(as_array(PLANS["mixed"]), upload)
    groups.fill(as_array(PLANS[plan]), upload, num_padded)
    found = {}
    for slot, head, first, count in groups.tasks.tolist():
        assert 0 <= count <= TASK_ROWS
        for index in range(first, first + count):
            at = int(groups.places[index])
            assert at not in found
            found[at] = (int(groups.sources[index]), slot, head)
    wanted = [(row, slot, head) for row, slot, count in PLANS[plan] for head in range(count)]
    assert [found[at] for at in range(len(found))] == wanted
    assert groups.num_drafts == (len(wanted) if num_padded is None else num_padded)
    if num_padded is not None:
        assert groups.tasks.shape == (80, 4) and groups.sources.shape == groups.places.shape == (80,)


def test_more_drafts_than_reserved_are_an_error() -> None:
    groups, upload = HeadGroups(8), Upload(CPU)
    with pytest.raises(RuntimeError, match="9 draft tokens of heads"):
        groups.fill(as_array([HeadsRow(0, 0, 4), HeadsRow(1, 0, 5)]), upload)
    with pytest.raises(RuntimeError, match="5 draft tokens of heads"):
        groups.fill(as_array([HeadsRow(1, 0, 5)]), upload, 4)


@pytest.mark.parametrize("num_rows", [1, 7, 16, 100])
def test_no_step_has_more_tasks_than_its_rows_allow(num_rows: int) -> None:
    groups, upload = RowGroups(100, 5), Upload(CPU)
    generator = np.random.default_rng(0)
    for num_slots in (1, 2, 5):
        slots = generator.integers(-1, num_slots, num_rows).astype(np.int32)
        groups.fill(slots, upload, num_rows)
        assert groups.num_launched == groups.most_tasks(num_rows) and groups.row_ids.shape == (num_rows,)
        tasks, row_ids = group(slots)
        assert groups.tasks[: len(tasks)].tolist() == tasks.tolist() and not groups.tasks[len(tasks) :].any()
        assert groups.row_ids[: len(row_ids)].tolist() == row_ids.tolist()


def test_rows_at_the_output_head_are_padded_rows_and_then_drafts() -> None:
    inputs = StepInputs(16, CPU)
    inputs.reserve_groups(max_rows=8, max_slots=4, max_drafts=6)
    inputs.pad(Always(Bounds(num_rows=8, max_kv_len=16, num_drafts=5, has_adapters=True)))
    segments = [Segment(0, 2, [1], 3), Segment(0, 1, [2]), Segment(0, 5, [3])]
    ids = torch.zeros(8, dtype=torch.long)
    # two rows are wanted, six are padding
    inputs.fill(segments, ids, ids[1:3], [1, 2], [HeadsRow(0, 0, 3), HeadsRow(1, 2, 1)])
    inputs.send()
    rows = inputs.head_adapter_rows
    assert rows.tasks.tolist() == [[3, 0, 1], [3, 8, 3]]
    assert rows.groups is not None and len(rows) == rows.groups.num_launched == rows.groups.most_tasks(13)
    assert rows.groups.row_ids.tolist()[:4] == [0, 8, 9, 10]
    inputs.fill([Segment(0, 8, [1])], ids, ids[:1], [0])
    inputs.send()
    assert len(inputs.adapter_rows) and len(inputs.head_adapter_rows), "a captured graph launches for nothing too"
    assert not inputs.head_adapter_rows.groups.tasks.any()  # type: ignore[union-attr]
    assert inputs.num_logits == 1
