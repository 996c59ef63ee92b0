"""The kernels for experts on devices against their specification: run by test_triton.py in a process of its
own, on CUDA or, with TRITON_INTERPRET=1, on CPU.
"""

import os
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Padding
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import layers, load_model
from lorikeet.shard.model.adapters.discovery import mark_targets
from lorikeet.shard.model.adapters.loading import AdapterFiles, HostLayout, SlotParts
from lorikeet.shard.model.adapters.tables import DeviceKernels, targets_of
from lorikeet.shard.model.adapters.upload import DeviceSlots
from lorikeet.shard.model.graphs import CudaRecorder, Recorder
from lorikeet.shard.model.kernels import grouped
from lorikeet.shard.model.kernels.grouped import multiply_reference
from lorikeet.shard.model.kernels.pairs import SortedPairs, sort_pairs, tasks_of
from lorikeet.shard.model.kernels.pairs_triton import partition_pairs
from lorikeet.shard.model.kernels.products_triton import multiply_tiles
from lorikeet.shard.model.lora.memory import PinnedMemory
from lorikeet.shard.model.lora.targets import LoraTarget, SlotWeights, adapt_row
from lorikeet.shard.model.moe.experts import Experts, is_experts
from tests import tiny
from tests.shard.engine.adapter_exactness import lay_out, load_plain, make_adapters
from tests.shard.model.moe.test_cuda import NoHostReads, chosen, network_of, of_tokens
from tests.shard.model.tape import TapeRecorder
from tests.shard.near import worst_share

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
NUM_SLOTS = 6
RANKS = (1, 3, 8, 17, 64, 16)
FIRST_ALONE, NOTHING = 4, 5
"""Slots whose adapters change the first product only, and no expert at all."""

# slot of each token, -1 for none
MIXES = {
    "distinct": [0, 1, 2, 3, 4, 5],
    "uniform": [3, 1, 0, 3, 1, 0],
    "zipf": [0, 0, -1, 0, 5, 2],
    "identical": [4] * 18,
    "none": [-1] * 6,
}
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).to(DEVICE, dtype)


def pairs_of(*counts: int) -> SortedPairs:
    """So many pairs of each expert, one expert per token."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(DEVICE)
    return sort_pairs(ids[:, None], len(counts))


@pytest.mark.parametrize("slots", ["distinct", "uniform", "zipf", "identical", "none"])
def test_pairs_are_split_as_by_operations_of_torch(slots: str) -> None:
    of_token = of_tokens(slots, 150).to(DEVICE)
    pairs = sort_pairs(chosen(150, 4, "zipf").to(DEVICE), 4, of_token, 200)
    values = torch.where(pairs.slots >= 0, pairs.slots * 7 + pairs.experts, -1)
    for num_targets, keys, wanted_of in ((7, pairs.keys, values), (None, pairs.experts, pairs.experts)):
        num_rows = 16 if num_targets else 64
        got = partition_pairs(pairs, num_rows, num_targets)
        expected = tasks_of(keys, wanted_of, num_rows, got.tasks.shape[0])
        assert sorted(got.tasks.tolist(), key=by_place) == sorted(expected.tolist(), key=by_place)
        assert got.pair_ids.tolist() == list(range(300))


def by_place(task: list[int]) -> tuple[bool, int]:
    """Empty ones last."""
    return task[2] == 0, task[1]


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("counts", "shape", "dtype"),
    [
        ((3, 0, 19), (33, 37), torch.float32),
        ((1, 2, 0, 1), (96, 130), torch.bfloat16),
        ((70, 1), (48, 24), torch.float16),
        ((0, 20, 16), (144, 64), torch.bfloat16),
        ((1, 0, 2), (2048, 768), torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_products_equal_the_specification(
    counts: tuple[int, ...], shape: tuple[int, int], dtype: torch.dtype, is_transposed: bool
) -> None:
    pairs, (num_in, num_out) = pairs_of(*counts), shape
    x = random(sum(counts), num_in, dtype=dtype)
    matrices = random(len(counts), num_out, num_in, dtype=dtype).mT / num_in**0.5
    matrices = matrices.contiguous() if is_transposed else matrices
    expected = multiply_reference(x, matrices, pairs)
    got = multiply_tiles(x, matrices, pairs)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_equal_bits_with_any_others(dtype: torch.dtype) -> None:
    x, matrices = random(18, 70, dtype=dtype), random(3, 70, 40, dtype=dtype)
    together = multiply_tiles(x, matrices, pairs_of(0, 18, 0))
    among = multiply_tiles(torch.cat([x[:3], x[17:], x[:7]]), matrices, pairs_of(3, 1, 7))
    assert torch.equal(among[3], together[17])


def placed(network: torch.nn.Module, block: Any, dtype: torch.dtype) -> "Placed":
    inputs = StepInputs(16, DEVICE)
    targets = mark_targets(network, inputs, dtype)
    for entry in targets.values():
        entry.allocate(NUM_SLOTS)
    inputs.reserve_groups(32, NUM_SLOTS)
    bench = Placed(inputs, DeviceKernels(targets_of(targets), NUM_SLOTS, DEVICE), block)
    for slot in range(NUM_SLOTS):
        bench.load(slot)
    return bench


@dataclass
class Placed:
    """One block of a network whose slots hold adapters of every rank."""

    inputs: StepInputs
    kernels: DeviceKernels
    block: Any
    plain: dict[tuple[int, LoraTarget], SlotWeights] = field(default_factory=dict)
    memories: list[torch.Tensor] = field(default_factory=list)

    def load(self, slot: int) -> None:
        """One for all experts, one for some products, one for no expert."""
        actual: list[LoraTarget] = []
        entries, pieces = [], []
        for name, targets in self.block.lorikeet_adapters.items():
            if slot == NOTHING or (slot == FIRST_ALONE and name == "down_proj"):
                continue
            for target in targets.experts:
                rank = RANKS[slot % len(RANKS)]
                dtype = self.block.down_proj.dtype
                a = random(rank, target.num_in, dtype=dtype) / target.num_in**0.5
                b = random(rank, target.num_out, dtype=dtype) / rank**0.5
                self.plain[slot, target] = SlotWeights(a, b)
                actual.append(target)
                pieces += [a, b]
        sizes = [-(-piece.nbytes // 64) * 64 for piece in pieces]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=DEVICE)
        starts = np.cumsum([0, *sizes])[:-1].reshape(-1, 2)
        for piece, part in zip(pieces, memory.split(sizes), strict=True):
            part[: piece.nbytes].view(piece.dtype).view(piece.shape).copy_(piece)
        entries = np.full((len(actual), 5), -1, np.int64)
        entries[:, 0] = RANKS[slot % len(RANKS)]
        entries[:, 1:3] = starts
        self.kernels.bind(slot, self.kernels.image(actual, entries), memory)
        self.memories.append(memory)

    def step(self, slots: list[int]) -> None:
        segments = [Segment(0, 1, range(1), slot) for slot in slots]
        self.inputs.fill(segments, *[torch.arange(len(slots), device=DEVICE)] * 2)
        self.inputs.send()

    def wanted(self, slots: list[int], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Token by token and expert by expert."""
        rows = []
        for row, slot in enumerate(slots):
            entry = [self._one(slot, expert, x[row : row + 1]) for expert in ids[row].tolist()]
            rows.append((torch.cat(entry) * weights[row, :, None]).sum(0).to(x.dtype))
        return torch.stack(rows)

    def _one(self, slot: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        up, down = self.block.lorikeet_adapters
        hidden = self._product(up, slot, expert, x)
        return self._product(down, slot, expert, self.block._apply_gate(hidden))

    def _product(self, name: str, slot: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        matrix, biases = getattr(self.block, name)[expert], getattr(self.block, f"{name}_bias", None)
        y = x @ (matrix if self.block.is_transposed else matrix.t())
        y = y if biases is None else y + biases[expert]
        weights = self.plain.get((slot, self.block.lorikeet_adapters[name].experts[expert]))
        if weights is not None:
            adapt_row(weights, None, x[0], y[0])
        return y


@pytest.mark.parametrize(
    ("name", "dtype", "mix"),
    [
        *(("mixtral", torch.float32, mix) for mix in ("distinct", "identical", "none")),
        ("mixtral", torch.bfloat16, "zipf"),
        ("qwen3_moe", torch.bfloat16, "uniform"),
        ("gpt_oss", torch.float32, "zipf"),
        ("gpt_oss", torch.bfloat16, "identical"),
    ],
    ids=str,
)
def test_adapters_of_experts_equal_the_specification(name: str, dtype: torch.dtype, mix: str) -> None:
    network = network_of(name, dtype).to(DEVICE)
    block: Any = next(module for module in network.modules() if is_experts(module))
    bench, slots = placed(network, block, dtype), MIXES[mix]
    x = random(len(slots), 64, dtype=dtype)
    ids = chosen(len(slots), block.num_experts, "zipf").to(DEVICE)
    weights = torch.rand(len(slots), 2, generator=GENERATOR).to(DEVICE)
    experts = Experts(block)
    bench.step([-1] * len(slots))
    base = experts(block, x, ids, weights)
    bench.step(slots)
    with NoHostReads() if DEVICE.type == "cuda" else nullcontext():
        got = experts(block, x, ids, weights)
    expected = bench.wanted(slots, x, ids, weights)
    # two products with a rounding between them
    assert worst_share(got, expected) <= 2 * TOLERANCE[dtype]
    untouched = torch.tensor([slot in (-1, NOTHING) for slot in slots], device=DEVICE)
    assert torch.equal(got[untouched], base[untouched])
    assert not (got[~untouched] == base[~untouched]).all(1).any()


def test_a_captured_block_computes_any_tokens_and_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was captured while no slot that it had held an adapter of its experts."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(grouped, "_is_host", lambda device: False)
        monkeypatch.setattr(grouped, "is_native", lambda x, matrices: True)
    network = network_of("mixtral", torch.bfloat16).to(DEVICE)
    block: Any = next(module for module in network.modules() if is_experts(module))
    bench, experts = placed(network, block, torch.bfloat16), Experts(block)
    x, ids = random(2, 64, dtype=torch.bfloat16), chosen(2, 4, "identical").to(DEVICE)
    weights, actual = torch.rand(2, 2, generator=GENERATOR).to(DEVICE), random(2, 64, dtype=torch.bfloat16)
    bench.inputs.pad(Padding(2, 16, spare_page=0, has_adapters=True))
    bench.step([NOTHING] * 2)
    assert bench.inputs.bounds is not None
    recorder: Recorder = TapeRecorder() if DEVICE.type == "cpu" else CudaRecorder(DEVICE)

    def compute() -> None:
        actual.copy_(experts(block, x, ids, weights))

    replay = recorder(compute)
    for slots in ([-1, 2], [4, 0]):
        x.copy_(random(2, 64, dtype=torch.bfloat16))
        ids.copy_(chosen(3 + slots[0], 4, "zipf")[:2])
        bench.step(slots)
        replay()
        assert torch.equal(actual, experts(block, x, ids, weights))


def test_a_model_gives_peft_s_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several adapters and none in one step, through everything between an adapter's file and a row."""
    warnings.filterwarnings("ignore", category=peft.utils.warning.PeftWarning)
    monkeypatch.setattr(layers, "can_pack", lambda dtype: False)
    base = tiny.make("gpt_oss", tmp_path / "base", num_hidden_layers=1, layer_types=["sliding_attention"])
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    configs = {
        "experts": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=parameters),
        "one": peft.LoraConfig(r=2, lora_alpha=8, target_modules=["o_proj"], target_parameters=parameters[:1]),
        "attention": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    }
    adapters = make_adapters(base, tmp_path / "adapters", configs, seed=1)
    digests = lay_out(base, tmp_path / "store", adapters)
    config = ShardConfig(
        "gpt_oss", str(base), "unix:/dev/null", dtype="float32", max_total_tokens=64, device=str(DEVICE),
        attention="reference",
    )  # fmt: skip
    model = load_model(config)
    model.allocate_kv(16)
    model.allocate_adapters(4)
    kernels = model.enable_device_kernels(4, 64, 0)
    memory = PinnedMemory(1 << 24, 1 << 20, is_pinned=DEVICE.type == "cuda")
    files = AdapterFiles(model.lora_targets, HostLayout(torch.float32, memory, kernels), model.heads)
    slots = DeviceSlots(kernels, model.heads, SlotParts(model.bindings, model.added_tokens))
    for slot, digest in enumerate(digests.values()):
        slots.put(slot, files.read(tmp_path / "store" / f"{digest}.safetensors"))
        while not slots.is_ready(slot):
            pass
    chosen = [("experts", 0), ("", -1), ("one", 1), ("attention", 2)]
    rows = [torch.randint(0, tiny.VOCAB, (length,), generator=GENERATOR) for length in (2, 1, 1, 1)]
    segments = [Segment(0, len(row), [2 * i, 2 * i + 1], slot)
                for i, (row, (_, slot)) in enumerate(zip(rows, chosen, strict=True))]  # fmt: skip
    ids = torch.cat(rows).to(DEVICE)
    model.inputs.fill(segments, ids, torch.arange(len(ids), device=DEVICE))
    actual = model.forward().split([len(row) for row in rows])
    for (adapter, _), row, got in zip(chosen, rows, actual, strict=True):
        expected = load_plain(base)
        if adapter:
            expected = peft.PeftModel.from_pretrained(expected, str(adapters[adapter])).eval()
        with torch.inference_mode():
            logits = expected(row[None]).logits[0]
        torch.testing.assert_close(got.cpu(), logits, rtol=1e-3, atol=1e-3)
