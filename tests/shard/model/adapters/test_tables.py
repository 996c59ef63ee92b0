"""The table of adapters on a device: whether programs of one launch may wait for each other."""

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import torch

from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.lora.targets import LoraTarget

if TYPE_CHECKING or importlib.util.find_spec("triton") is not None:
    from lorikeet.shard.model.adapters import tables

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
CPU = torch.device("cpu")


class Launches:
    """Takes the place of the kernel; raises `error` for programs that may wait for each other."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_tasks: list[int] = []
        self.may_meet: list[bool] = []

    def __call__(self, *arguments: Any) -> None:
        shape, tasks = arguments[7], arguments[2]
        self.num_tasks.append(len(tasks))
        self.may_meet.append(bool(shape[3]))
        assert not tasks.any()
        if shape[3] and self.error is not None:
            raise self.error


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> "tables.DeviceKernels":
    monkeypatch.setattr(tables.gpu, "num_processors", lambda device: 7)
    return made()


def made(**options: Any) -> "tables.DeviceKernels":
    target = LoraTarget("layer", 32, 48, StepInputs(16, CPU))
    target.allocate(2)
    return tables.DeviceKernels([target], 2, CPU, **options)


def test_as_many_programs_as_run_at_once_are_tried(
    kernels: "tables.DeviceKernels", monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches()
    monkeypatch.setattr(tables, "add_delta", launches)
    kernels.try_cooperative_launch(torch.bfloat16)
    assert launches.may_meet == [True] and launches.num_tasks == [3 * 7]


def test_where_the_device_refuses_products_take_two_launches(
    kernels: "tables.DeviceKernels", monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(RuntimeError("too many blocks in cooperative launch"))
    monkeypatch.setattr(tables, "add_delta", launches)
    with structlog.testing.capture_logs() as logged:
        kernels.try_cooperative_launch(torch.bfloat16)
        kernels.try_cooperative_launch(torch.bfloat16)  # not tried again
    assert [entry["event"] for entry in logged] == ["cooperative_launch_refused"]
    tasks = torch.zeros(1, 3, dtype=torch.int32)
    x, y = torch.zeros(1, 32).bfloat16(), torch.zeros(1, 48).bfloat16()
    kernels._add(x, y, tasks, tasks[0], kernels._describe([]), kernels.table, 32, 48)
    assert launches.may_meet == [True, False]


def test_other_errors_of_the_launch_are_raised(
    kernels: "tables.DeviceKernels", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "add_delta", Launches(RuntimeError("an illegal memory access was encountered")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernels.try_cooperative_launch(torch.bfloat16)


def test_programs_that_wait_for_ever_end_the_start(
    kernels: "tables.DeviceKernels", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "add_delta", Launches())
    monkeypatch.setattr(tables.gpu, "finishes", lambda device, seconds: False)
    with pytest.raises(ValueError, match="--disable-custom-kernels"):
        kernels.try_cooperative_launch(torch.bfloat16)


def test_without_custom_kernels_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(tables, "add_delta", launches)
    kernels = made(is_cooperative=False)
    kernels.try_cooperative_launch(torch.bfloat16)
    assert launches.may_meet == []
