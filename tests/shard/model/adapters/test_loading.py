"""What is made of a file in the served layout against `packed` and `SlotWeights.arranged`, bit for bit."""

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.adapters import loading as adapter_file
from lorikeet.shard.model.adapters.loading import AdapterFiles, Form, HostLayout
from lorikeet.shard.model.lora import targets as lora
from lorikeet.shard.model.lora.memory import Arena
from lorikeet.shard.model.lora.partition import Partition
from lorikeet.shard.model.lora.served_file import FORMAT
from lorikeet.shard.model.lora.targets import LoraTarget, SlotWeights
from lorikeet.shard.system.native import CompilerMissing
from tests.shard.model.lora.layout import packed

SHAPES = [(64, 64), (96, 33), (130, 200), (31, 1), (1, 127), (1024, 256)]
RANKS = (1, 2, 8, 16, 17, 64, 320)
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def make_targets(shapes: Sequence[tuple[int, int]] = SHAPES) -> dict[str, LoraTarget]:
    """Linear modules and embeddings of all shapes."""
    inputs = StepInputs(16, torch.device("cpu"))
    names = [(f"{kind}-{number}", shape) for kind in ("linear", "embedding") for number, shape in enumerate(shapes)]
    targets = {name: LoraTarget(name, *shape, inputs) for name, shape in names}
    for name, target in targets.items():
        target.is_embedding = name.startswith("embedding")
    return targets


def make_tensors(targets: dict[str, LoraTarget], rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, target) in enumerate(targets.items()):
        tensors[f"{name}.A"] = torch.randn(rank, target.num_in).to(dtype)
        tensors[f"{name}.B"] = torch.randn(target.num_out, rank).to(dtype)
        if number % 3 == 0:
            tensors[f"{name}.bias"] = torch.randn(target.num_out)
    return tensors


def write(path: Path, tensors: dict[str, torch.Tensor], digest: str = "d", **metadata: str) -> Path:
    modules = json.dumps({name.rpartition(".")[0]: {} for name in tensors if not name.startswith("heads.")})
    save_file(tensors, path, {"format": FORMAT, "digest": digest, "modules": modules, **metadata})
    return path


def read(path: Path, targets: dict[str, LoraTarget], dtype: torch.dtype) -> dict[str, SlotWeights]:
    content = AdapterFiles(targets, HostLayout(dtype, Arena(1 << 22))).read(path)
    return {target.name: content.weights(index) for index, target in enumerate(content.targets)}


def assert_equal(actual: SlotWeights, expected: SlotWeights) -> None:
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[name], tensor), name


def wanted_of(tensors: dict[str, torch.Tensor], target: LoraTarget) -> SlotWeights:
    a, b = tensors[f"{target.name}.A"], tensors[f"{target.name}.B"].t()
    return SlotWeights(a, b, None, tensors.get(f"{target.name}.bias"))


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rank", RANKS)
def test_blocks_equal_torch_s_layout(tmp_path: Path, dtype: torch.dtype, rank: int) -> None:
    targets = make_targets()
    tensors = make_tensors(targets, rank, dtype)
    actual = read(write(tmp_path / "file", tensors), targets, dtype)
    for name, target in targets.items():
        assert actual[name].is_packed
        assert_equal(actual[name], packed(wanted_of(tensors, target), target.is_embedding))


@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_rows_equal_torch_s_layout(
    tmp_path: Path, dtype: torch.dtype, has_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(dtype: torch.dtype) -> None:
        raise CompilerMissing

    targets = make_targets()
    tensors = make_tensors(targets, 17, dtype)
    monkeypatch.setattr(adapter_file, "compiled", lambda dtype: None)
    if not has_compiler:
        monkeypatch.setattr(adapter_file, "library_for", missing)
    actual = read(write(tmp_path / "file", tensors), targets, dtype)
    for name, target in targets.items():
        assert not actual[name].is_packed
        assert_equal(actual[name], wanted_of(tensors, target))


PARTITIONS = {
    "rows": Partition(1, 2, 200, 130, is_row_parallel=False),
    "rows of two matrices": Partition(1, 2, 200, 130, is_row_parallel=False, num_stacked=2),
    "columns": Partition(1, 2, 200, 130, is_row_parallel=True),
    "columns of the first rank": Partition(0, 2, 200, 130, is_row_parallel=True),
}


@pytest.mark.parametrize("form", ["blocks", "rows", "no compiler"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
def test_a_rank_reads_its_part_of_each_factor(
    tmp_path: Path, partition: Partition, dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(dtype: torch.dtype) -> None:
        raise CompilerMissing

    if form != "blocks":
        monkeypatch.setattr(adapter_file, "compiled", lambda dtype: None)
    if form == "no compiler":
        monkeypatch.setattr(adapter_file, "library_for", missing)
    a, b, bias = (
        torch.randn(17, partition.num_in).to(dtype),
        torch.randn(partition.num_out, 17).to(dtype),
        torch.randn(200),
    )
    path = write(tmp_path / "file", {"linear.A": a, "linear.B": b, "linear.bias": bias})
    num_out, num_in = partition.of_weight(torch.empty(partition.num_out, partition.num_in)).shape
    target = LoraTarget("linear", num_in, num_out, StepInputs(16, torch.device("cpu")))
    target.partition = partition
    expected = SlotWeights(a, b.t(), None, bias)
    if partition.is_row_parallel:
        expected = SlotWeights(a[:, partition.columns], b.t(), None, bias if partition.rank == 0 else None)
    else:
        rows = torch.cat([torch.arange(200)[part] for part in partition.rows])
        expected = SlotWeights(a, b[rows].t(), None, bias[rows])
    assert_equal(read(path, {"linear": target}, dtype)["linear"], packed(expected) if form == "blocks" else expected)


@pytest.mark.parametrize("key", ["A", "B", "bias"])
def test_a_rank_rejects_tensors_that_do_not_fit_the_whole_module(tmp_path: Path, key: str) -> None:
    partition = Partition(0, 2, 64, 32, is_row_parallel=key == "A")
    tensors = {"A": torch.randn(4, 32), "B": torch.randn(64, 4), "bias": torch.randn(64)}
    tensors[key] = tensors[key][..., :16].contiguous() if key == "A" else tensors[key][:32].contiguous()
    target = LoraTarget(
        "linear", 16 if partition.is_row_parallel else 32, 64 if partition.is_row_parallel else 32, StepInputs(16, CPU)
    )
    target.partition = partition
    path = write(tmp_path / "file", {f"linear.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(ValueError, match=rf"linear: {key} of shape .* does not fit"):
        read(path, {"linear": target}, torch.float32)


def test_files_with_equal_headers_share_only_the_plan(tmp_path: Path) -> None:
    targets = make_targets([(40, 24)])
    files = AdapterFiles(targets, HostLayout(torch.float32, Arena(1 << 20)))
    contents = []
    for digest in ("one", "two"):
        tensors = make_tensors(targets, 8, torch.float32)
        contents.append((files.read(write(tmp_path / digest, tensors, digest)), tensors))
    assert len(files._plans) == 1
    for content, tensors in contents:
        for index, target in enumerate(content.targets):
            assert_equal(content.weights(index), packed(wanted_of(tensors, target), target.is_embedding))


def test_plans_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_file, "MOST_PLANS", 2)
    targets = make_targets([(40, 24)])
    files = AdapterFiles(targets, HostLayout(torch.float32, Arena(1 << 20)))
    for rank in (1, 2, 3, 1):
        tensors = make_tensors(targets, rank, torch.float32)
        content = files.read(write(tmp_path / "file", tensors))
        assert_equal(content.weights(0), packed(wanted_of(tensors, content.targets[0])))
    assert len(files._plans) == 2


def test_all_memory_comes_back(tmp_path: Path) -> None:
    targets, arena = make_targets(), Arena(1 << 22)
    files = AdapterFiles(targets, HostLayout(torch.float32, arena))
    content = files.read(write(tmp_path / "file", make_tensors(targets, 4, torch.float32)))
    assert content.form is Form.BLOCKS and 0 < content.num_bytes <= arena.num_used
    del content
    assert arena.num_used == 0


def bad(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"linear-0.A": torch.ones(2, 40), "linear-0.B": torch.ones(24, 2)} | {name: tensor}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (bad("linear-0.A", torch.ones(3, 40)), "do not fit"),
        (bad("linear-0.B", torch.ones(24, 2).bfloat16()), "the base is torch.float32"),
        (bad("linear-0.bias", torch.ones(23)), "for 24 outputs"),
        (bad("linear-0.magnitude", torch.ones(24)), "no rows, whose norms"),
        (bad("another.A", torch.ones(2, 40)), "no module another"),
        (bad("heads.0.weight", torch.ones(2, 2)), "does not support tensor heads.0.weight"),
        (bad("linear-0.weight", torch.ones(24, 40)), "does not support tensor"),
        ({"linear-0.A": torch.ones(4097, 40), "linear-0.B": torch.ones(24, 4097)}, "do not fit"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected(tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(write(tmp_path / "file", tensors), make_targets([(40, 24)]), torch.float32)


def test_a_file_must_list_its_modules(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "file", {"format": FORMAT, "digest": "d"})
    with pytest.raises(ValueError, match="does not list the modules"):
        read(tmp_path / "file", make_targets([(40, 24)]), torch.float32)


def test_laying_out_keeps_the_caller_s_priority() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    lora.library_for(torch.float32).pack(None, 0, 0, adapter_file.NICENESS, 2)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_norms_of_dora_are_computed_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the kernels of a running step do not wait for them, nor they for these."""
    streams: list[object] = []
    entered: list[object] = []

    @contextmanager
    def stream(entering: object) -> Iterator[None]:
        entered.append(entering)
        yield
        entered.append(None)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or f"stream {len(streams)}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    adapter_file._reader_stream.cache_clear()
    for _ in range(2):
        with adapter_file.apart_from_steps(torch.device("cuda")):
            assert entered[-1] == "stream 1"
    adapter_file._reader_stream.cache_clear()
    assert streams == [torch.device("cuda")]

    inside: list[bool] = []

    @contextmanager
    def apart(device: torch.device) -> Iterator[None]:
        inside.append(True)
        yield
        inside.append(False)

    monkeypatch.setattr(adapter_file, "apart_from_steps", apart)
    target = make_targets([(8, 4)])["linear-0"]
    weight, a, b = torch.randn(4, 8), torch.randn(2, 8), torch.randn(2, 4)
    target.squared_norms = weight.square().sum(1)

    def project(x: torch.Tensor) -> torch.Tensor:
        assert inside == [True]
        return x @ weight.t()

    target.project = project
    expected = (weight + b.t() @ a).square().sum(1)
    torch.testing.assert_close(adapter_file.row_squares(target, a, b), expected)
    assert inside == [True, False]
