"""Which errors of a step are its own, and which are the device's."""

import pytest
import torch

from lorikeet.shard.batch.inputs import RankDesync
from lorikeet.shard.engine.engine import is_device_broken, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
        RankDesync("a step failed on one of several ranks"),
    ],
)
def test_nothing_is_computed_after_what_breaks_a_device(error: Exception) -> None:
    assert is_device_broken(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        ValueError("wrong shape"),
    ],
)
def test_other_errors_are_those_of_a_step(error: Exception) -> None:
    assert not is_device_broken(error)


def test_a_smaller_step_helps_against_little_memory_alone() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("Triton Error [CUDA]: invalid argument"))
