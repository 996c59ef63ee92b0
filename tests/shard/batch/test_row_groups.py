"""What devices read of which row has which adapter."""

import numpy as np
import pytest
import torch

from lorikeet.shard.batch.row_groups import RowGroups
from lorikeet.shard.batch.transfer import Upload


def test_every_row_has_its_slot_and_rows_that_are_not_there_none() -> None:
    groups, upload = RowGroups(8, 4), Upload(torch.device("cpu"))
    groups.fill(np.array([3, -1, 0, 3, 3, -1, 2, 1], np.int32), upload)
    assert groups.row_slots.tolist() == [3, -1, 0, 3, 3, -1, 2, 1, -1]
    groups.fill(np.array([-1, 2, 2], np.int32), upload)
    assert groups.row_slots.tolist() == [-1, 2, 2, -1]
    assert groups.tasks[0].tolist() == [2, 0, 2] and groups.row_ids[:2].tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="more than were reserved"):
        groups.fill(np.zeros(9, np.int32), upload)
