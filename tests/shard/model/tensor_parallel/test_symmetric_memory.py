"""Which sums of ranks go through symmetric memory, with fakes of torch's module and operator: they run on CUDA only."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lorikeet.shard.model.tensor_parallel import symmetric_memory
from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.model.tensor_parallel.symmetric_memory import OneShotAllReduce, unsupported_reason

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SIZE = 2


class Fake:
    """torch's module and operator, as if every rank had the same part."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self.calls: list[str] = []
        self.memory = torch.empty(0)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == CUDA
        self.memory = torch.zeros(size, dtype=dtype)
        return self.memory

    def rendezvous(self, memory: torch.Tensor, group: str) -> None:
        assert memory is self.memory
        self.calls.append(f"rendezvous in {group}")
        if self._error:
            raise RuntimeError(self._error)

    def one_shot_all_reduce_copy_out(
        self, part: torch.Tensor, own: torch.Tensor, operation: str, group: str, out: torch.Tensor
    ) -> None:
        assert part.shape == own.shape and part.dtype == own.dtype and part.data_ptr() == self.memory.data_ptr()
        self.calls.append(f"{operation} of {tuple(own.shape)} in {group}")
        part.copy_(own)
        out.copy_(SIZE * part)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    memory = Fake()
    install(memory, monkeypatch)
    return memory


def install(memory: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "_module", lambda: memory)
    monkeypatch.setattr(symmetric_memory, "_operator", lambda: memory.one_shot_all_reduce_copy_out)
    monkeypatch.setattr(symmetric_memory, "_group_name", lambda: "all")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: memory.calls.append(f"set {device}"))


def test_this_torch_has_the_operator_with_these_arguments() -> None:
    assert unsupported_reason(CUDA, SIZE) == ""
    schema = str(symmetric_memory._operator().default._schema)
    arguments = "Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name, Tensor(a!) out"
    assert schema == f"symm_mem::{symmetric_memory.OPERATOR}({arguments}) -> Tensor(a!)"
    module: Any = symmetric_memory._module()
    assert callable(module.empty) and callable(module.rendezvous)


def test_small_tensors_are_added_in_place_in_memory_that_is_mapped_once(fake: Fake) -> None:
    one_shot = OneShotAllReduce(CUDA, SIZE)
    for rows, dtype in ((1, torch.bfloat16), (4, torch.bfloat16), (3, torch.float32)):
        y = torch.arange(rows * 64, dtype=dtype).view(rows, 64)
        expected = SIZE * y
        assert one_shot.takes(y) and one_shot.sum(y) is y and torch.equal(y, expected)
    assert fake.calls == ["set cuda:0", "rendezvous in all", *(f"sum of ({rows}, 64) in all" for rows in (1, 4, 3))]


@pytest.mark.parametrize(("size", "most"), [(2, 512 << 10), (4, 512 << 10), (8, 256 << 10)])
def test_larger_tensors_are_nccl_s(fake: Fake, size: int, most: int) -> None:
    one_shot = OneShotAllReduce(CUDA, size)
    assert one_shot.takes(torch.zeros(1, most // 2, dtype=torch.bfloat16))
    assert not one_shot.takes(torch.zeros(1, most // 2 + 8, dtype=torch.bfloat16))


def test_tensors_that_the_operator_rejects_are_nccl_s(fake: Fake) -> None:
    one_shot, y = OneShotAllReduce(CUDA, SIZE), torch.zeros(4, 64)
    assert one_shot.takes(y)
    rejected = (y.half(), y.t(), y[:, :3], y.flatten()[:7], y.flatten()[1:65])
    assert not any(one_shot.takes(tensor) for tensor in rejected)


@pytest.mark.parametrize(
    ("device", "size", "reason"),
    [(CUDA, 1, "it is for --num-shard 2 or more"), (CPU, 2, "needs CUDA devices, not cpu")],
)
def test_where_it_cannot_work_the_error_names_the_flag(device: torch.device, size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=f"--symmetric-memory-all-reduce is refused: .*{reason}"):
        OneShotAllReduce(device, size)


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "MODULE", "torch.distributed.nothing")
    with pytest.raises(ValueError, match=r"is refused: torch 2\..* has no one_shot_all_reduce_copy_out"):
        OneShotAllReduce(CUDA, SIZE)
    monkeypatch.undo()
    monkeypatch.setattr(symmetric_memory, "OPERATOR", "no_operator")
    assert "has no no_operator" in unsupported_reason(CUDA, SIZE)


def test_devices_that_cannot_map_memory_of_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(Fake("no access between peers\nand more"), monkeypatch)
    with pytest.raises(ValueError, match=r"cannot map each other's memory: no access between peers$"):
        OneShotAllReduce(CUDA, SIZE)


@pytest.fixture
def group() -> Iterator[Group]:
    """One rank: its sums are what they were."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    yield Group(0, 1, store, CPU, 10.0)
    distributed.destroy_process_group()


def test_a_group_chooses_by_tensor(group: Group, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[torch.Tensor] = []
    monkeypatch.setattr(distributed, "all_reduce", reduced.append)
    small, large = torch.ones(2, 64), torch.ones(200_000)
    assert group.sum(small) is small and len(reduced) == 1
    group._one_shot = OneShotAllReduce(CUDA, SIZE)
    assert torch.equal(group.sum(small), torch.full((2, 64), float(SIZE))) and len(reduced) == 1
    assert group.sum(large) is large and reduced[1] is large


def test_a_group_on_cpu_refuses_it() -> None:
    """Every rank of the shard does, before it loads anything."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    try:
        with pytest.raises(ValueError, match="--symmetric-memory-all-reduce is refused"):
            Group(0, 1, store, CPU, 10.0, has_symmetric_memory=True)
    finally:
        distributed.destroy_process_group()
