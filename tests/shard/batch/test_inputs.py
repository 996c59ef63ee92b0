"""What a step's arrays are on the device: the same padded or not, and of padded steps at the same addresses."""

import numpy as np
import pytest
import torch

from lorikeet.proto.params import FIRST_VIRTUAL_ID
from lorikeet.shard.batch.device_tokens import DeviceTokens
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Bounds, Padding
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.batch.transfer import ALIGNED, DeviceArrays, Upload
from tests.shard.padded import Always

CPU = torch.device("cpu")
PAGE = 4
STEPS = (
    ([Segment(5, 1, [3, 1]), Segment(0, 3, [2])], [0, 3]),
    ([Segment(9, 1, [3, 1, 7], 2), Segment(4, 1, [2, 6])], [1, 0]),
    ([Segment(3, 8, [5, 4, 0], 1)], [7]),
)
TOKENS = torch.tensor([50, 51, 52, -1])


def arrays_of(inputs: StepInputs) -> list[torch.Tensor]:
    return [inputs.input_ids, inputs.logits_rows, inputs.position_ids, inputs.kv_slots, inputs.next_positions]


def fill(inputs: StepInputs, step: int, on_device: DeviceTokens | None = None) -> list[torch.Tensor]:
    """One of STEPS with tokens 10, 11, …; its arrays without padding."""
    segments, rows = STEPS[step]
    num_rows = sum(segment.num_tokens for segment in segments)
    inputs.fill(segments, torch.arange(10, 10 + num_rows), torch.tensor(rows), on_device=on_device)
    inputs.send()
    inputs.put_device_tokens()
    sizes = num_rows, len(rows), num_rows, num_rows, len(rows)
    return [array[:size] for array, size in zip(arrays_of(inputs), sizes, strict=True)]


def with_groups() -> StepInputs:
    inputs = StepInputs(PAGE, CPU)
    inputs.reserve_groups(max_rows=8, max_slots=4, max_drafts=8)
    return inputs


def test_a_step_with_virtual_tokens_is_not_padded_and_has_their_rows() -> None:
    inputs = with_groups()
    inputs.pad(Always(Bounds(num_rows=8, max_kv_len=12, has_adapters=True), spare_page=9))
    ids = torch.tensor([10, FIRST_VIRTUAL_ID + 3, FIRST_VIRTUAL_ID + 4, 11, FIRST_VIRTUAL_ID])
    inputs.fill([Segment(5, 1, [3, 1], 0), Segment(3, 3, [2, 4], 1), Segment(0, 1, [5], 2)], ids, torch.tensor([0]))
    inputs.send()
    assert inputs.bounds is None and inputs.input_ids.tolist() == [10, 0, 0, 11, 0]
    found = [(slot, rows.tolist(), places.tolist()) for slot, rows, places in inputs.virtual_rows]
    assert found == [(1, [1, 2], [3, 4]), (2, [4], [0])]
    fill(inputs, 0)
    assert inputs.bounds is not None and inputs.virtual_rows == []


def test_padded_steps_have_the_arrays_of_others_at_the_addresses_of_their_bounds() -> None:
    plain, padded = with_groups(), with_groups()
    padded.pad(Always(Bounds(num_rows=8, max_kv_len=12, has_adapters=True), spare_page=9))
    places = []
    for step in (0, 1, 2, 1, 0):
        wanted, found = fill(plain, step), fill(padded, step)
        assert all(torch.equal(each, other) for each, other in zip(found, wanted, strict=True))
        assert set(padded.kv_slots[len(wanted[0]) :].tolist()) <= set(range(9 * PAGE, 10 * PAGE))
        groups = padded.adapter_rows.groups
        assert groups is not None
        tensors = [*arrays_of(padded), padded.token_places, groups.tasks, groups.row_slots, groups.row_ids]
        places.append([(tensor.data_ptr(), tensor.shape) for tensor in tensors])
        assert all((place - places[0][0][0]) % ALIGNED == 0 for place, _ in places[-1])
    assert all(each == places[0] for each in places)


def test_steps_of_other_bounds_lie_elsewhere() -> None:
    inputs = StepInputs(PAGE, CPU)
    inputs.pad(Padding(8, 12, spare_page=9))
    of_step = [fill(inputs, step)[0].data_ptr() for step in (0, 1, 2, 0)]
    assert len(set(of_step)) == 3 and of_step[0] == of_step[3]


def test_positions_that_follow_are_those_of_the_wanted_rows() -> None:
    assert fill(StepInputs(PAGE, CPU), 0)[4].tolist() == [6, 3]
    assert fill(StepInputs(PAGE, CPU), 2)[4].tolist() == [11]


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_tokens_that_only_the_device_knows(is_padded: bool, is_captured: bool) -> None:
    """Put in by the graph where it reads the same tensor, else outside it."""
    inputs = StepInputs(PAGE, CPU)
    if is_captured:
        inputs.device_tokens = TOKENS
    inputs.pad(Padding(8, 12, spare_page=9) if is_padded else None)
    assert fill(inputs, 0, DeviceTokens([0, 3], [2, 0], TOKENS))[0].tolist() == [52, 11, 12, 50]
    assert fill(inputs, 0, DeviceTokens([1], [3], TOKENS))[0].tolist() == [10, 0, 12, 13]
    assert fill(inputs, 0)[0].tolist() == [10, 11, 12, 13]


def test_arrays_are_copied_once_all_are_known() -> None:
    upload, memory = Upload(CPU), DeviceArrays(torch.zeros(96, dtype=torch.uint8))
    upload.begin(memory)
    first, second = upload.add(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int64))
    [third] = upload.add(np.arange(5, dtype=np.int32), capacity=8)
    assert not memory.memory.any()
    upload.send()
    assert first.tolist() == second.tolist() == [0, 1, 2] and third.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    upload.begin(memory)
    assert upload.add(np.zeros(3, np.int32))[0] is first
    with pytest.raises(RuntimeError, match="9 numbers, 8 are reserved"):
        upload.add(np.zeros(9, np.int32), capacity=8)
    with pytest.raises(RuntimeError, match="need 112 bytes, 96 are reserved"):
        upload.add(np.zeros(12, np.int64))


def test_without_padding_arrays_are_copied_at_once() -> None:
    upload = Upload(CPU)
    upload.begin(None)
    found = upload.add(np.arange(3, dtype=np.int32), np.arange(0, dtype=np.int32), np.arange(2, dtype=np.int64))
    assert [each.tolist() for each in found] == [[0, 1, 2], [], [0, 1]]
    assert [each.dtype for each in found] == [torch.int32, torch.int32, torch.int64]
