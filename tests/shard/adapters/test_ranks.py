"""Adapters that several ranks, here threads, read: every rank has an adapter, or none has."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lorikeet.shard.adapters.manager import AdapterPart, BroadcastingSlots, CollectiveReader
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.adapters.loading import AdapterContent, AdapterFiles, HostLayout, Opened
from lorikeet.shard.model.lora.memory import Arena
from lorikeet.shard.model.lora.partition import Partition
from lorikeet.shard.model.lora.targets import LoraTarget
from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.ranks.commands import Clear, Forget, Put
from lorikeet.shard.scheduler.adapter_slots import NOT_HERE
from tests.shard.model.adapters.test_loading import write
from tests.shard.ranks_in_threads import together

NUM_OUT, NUM_IN = 24, 40


def files(rank: int, size: int = 2, group: Group | None = None) -> AdapterFiles:
    """Files of one module whose columns are split."""
    site = LoraTarget("linear", NUM_IN // size, NUM_OUT, StepInputs(16, torch.device("cpu")))
    site.partition = Partition(rank, size, NUM_OUT, NUM_IN, is_row_parallel=True)
    weight = torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(4))[:, site.partition.columns]
    site.squared_norms = weight.square().sum(1)
    site.project = lambda x: x @ weight.t()
    destination = HostLayout(torch.float32, Arena(1 << 16))
    return AdapterFiles({"linear": site}, destination, sum_over_ranks=None if group is None else group.add_up)


def adapter(folder: Path) -> Path:
    torch.manual_seed(1)
    a, b = torch.randn(4, NUM_IN), torch.randn(NUM_OUT, 4)
    return write(folder / "d.safetensors", {"linear.A": a, "linear.B": b, "linear.magnitude": torch.rand(NUM_OUT)})


def read(rank: int, path: Path, group: Group) -> AdapterContent:
    return CollectiveReader(files(rank, group=group), group).read(path)


def test_dora_divides_by_the_norm_of_whole_rows(tmp_path: Path) -> None:
    path = adapter(tmp_path)
    first, second = together([partial(read, rank, path) for rank in range(2)])
    (whole,) = together([lambda group: CollectiveReader(files(0, 1, group), group).read(path)])
    scales = [content.weights(0).scale for content in (first, second, whole)]
    for scale in scales:
        assert scale is not None and scales[2] is not None
        torch.testing.assert_close(scale, scales[2], rtol=1e-5, atol=0)
    a = torch.cat([content.weights(0).tensors["a"].flatten() for content in (first, second)])
    assert a.numel() >= whole.weights(0).tensors["a"].numel()


def test_an_adapter_missing_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    path = adapter(tmp_path)
    reasons: list[str] = []

    def on(rank: int, at: Path, group: Group) -> None:
        with pytest.raises(ValueError) as caught:
            read(rank, at, group)
        reasons.append(str(caught.value))

    together([partial(on, 0, path), partial(on, 1, tmp_path / "elsewhere.safetensors")])
    assert reasons == [NOT_HERE] * 2


def test_an_adapter_that_one_rank_cannot_hold_fails_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter(tmp_path)
    reasons: list[str] = []

    def on(rank: int, group: Group) -> None:
        own = files(rank, group=group)
        if rank == 1:
            own.lay_out = full  # type: ignore[method-assign]
        else:
            own._sum_over_ranks = None  # the other does not come so far
        with pytest.raises(ValueError) as caught:
            CollectiveReader(own, group).read(path)
        reasons.append(str(caught.value))

    def full(opened: Opened) -> AdapterContent:
        raise MemoryError

    together([partial(on, rank) for rank in range(2)])
    assert reasons == ["the adapter could not be read: MemoryError"] * 2


class Recorder:
    """Records the calls that it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: self.calls.append((name, *arguments))


def test_every_rank_gets_every_change_of_a_slot(tmp_path: Path) -> None:
    own, leader = Recorder(), Recorder()
    slots = BroadcastingSlots(own, leader)  # type: ignore[arg-type]
    content = files(0, 1).read(adapter(tmp_path))
    slots.put(3, AdapterPart("d", content))
    slots.clear(3)
    slots.forget("d")
    assert leader.calls == [("send", Put(3, "d")), ("send", Clear(3)), ("send", Forget("d"))]
    assert own.calls == [("put", 3, content), ("clear", 3)]
