"""The kernels for devices against the specification, row by row: run by test_triton.py in a process of its own,
on CUDA or, with TRITON_INTERPRET=1, on CPU.
"""

import json
import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lorikeet.proto.params import Composition
from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model.adapters.added_tokens import AddedTokens
from lorikeet.shard.model.adapters.loading import AdapterFiles, HostLayout, SlotParts
from lorikeet.shard.model.adapters.tables import DeviceKernels
from lorikeet.shard.model.adapters.upload import DeviceSlots
from lorikeet.shard.model.lora.memory import PinnedMemory
from lorikeet.shard.model.lora.served_file import FORMAT
from lorikeet.shard.model.lora.targets import LoraTarget, Product, SlotWeights, adapt, adapt_embedding, adapt_row
from lorikeet.shard.model.medusa.cuda import DeviceHeads
from lorikeet.shard.model.medusa.heads import HeadsPool
from tests.shard.padded import Always

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
NUM_SLOTS = 11
NUM_SUMS = 2
NO_PARTS = SlotParts([], AddedTokens(0))
RANKS = (1, 3, 8, 16, 17, 64, 33)
NONE_OF_IT, BIAS_ALONE, LARGEST = 7, 8, 9
"""Slots whose adapters have nothing for the module, no factors, and as many as there may be."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-9}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

# slot of each request, -1 for none
MIXES = {
    "distinct": [0, 1, 2, 3, 4, 5, 6, 7, 8],
    "uniform": [3, 1, 3, 0, 2, 1, 0, 2, 4],
    "zipf": [0, 0, 0, -1, 0, 1, 1, 2, 3],
    "identical": [5] * 9,
    "none": [-1] * 9,
    "some": [-1, 4, -1, -1, 4, 8, -1, 7, 2],
}
COUNTS = [1, 1, 19, 0, 3, 1, 1, 2, 1]


@dataclass
class Bench:
    """Sites of one base, some adapters in their slots, and steps."""

    dtype: torch.dtype
    targets: list[LoraTarget]
    inputs: StepInputs = field(default_factory=lambda: StepInputs(16, DEVICE))
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    plain: dict[tuple[int, str], SlotWeights] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for target in self.targets:
            target._inputs = self.inputs
            target.allocate(NUM_SLOTS)
        self.inputs.reserve_groups(max_rows=32, max_slots=NUM_SLOTS + NUM_SUMS, max_drafts=8, num_sums=NUM_SUMS)
        self.kernels = DeviceKernels(self.targets, NUM_SLOTS, DEVICE, num_sums=NUM_SUMS)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, dtype or self.dtype)

    def weights(self, slot: int, target: LoraTarget) -> SlotWeights | None:
        """Every rank, DoRA's scale, a bias, a bias alone, nothing."""
        if slot == NONE_OF_IT:
            return None
        bias = self.random(target.num_out, dtype=torch.float32) if slot % 4 == 2 or slot == BIAS_ALONE else None
        if slot == BIAS_ALONE:
            return SlotWeights(bias=bias)
        rank = 512 if slot == LARGEST else RANKS[slot % len(RANKS)]
        a, b = self.random(rank, target.num_in) / target.num_in**0.5, self.random(rank, target.num_out) / rank**0.5
        scale = 1 + 0.1 * self.random(target.num_out, dtype=torch.float32) if slot % 3 == 1 else None
        return SlotWeights(a, b, scale, bias)

    def load(self, *slots: int) -> None:
        """Give slots their adapters, on all targets, as a file's reader would lay them out."""
        for slot in slots:
            actual = [
                (target, weights) for target in self.targets if (weights := self.weights(slot, target)) is not None
            ]
            self.plain |= {(slot, target.name): weights for target, weights in actual}
            self.place(slot, [(target, weights.arranged(target.is_embedding)) for target, weights in actual])

    def place(self, slot: int, actual: list[tuple[LoraTarget, SlotWeights]]) -> None:
        tensors = [tensor for _, weights in actual for tensor in weights.tensors.values()]
        sizes = [-(-tensor.nbytes // 64) * 64 for tensor in tensors]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=DEVICE)
        pieces = [piece[: t.nbytes].view(t.dtype).view(t.shape).copy_(t)
                  for piece, t in zip(memory.split(sizes), tensors, strict=True)]  # fmt: skip
        moved = iter(pieces)
        held = [(target, SlotWeights(**{name: next(moved) for name in weights.tensors})) for target, weights in actual]
        entries = np.full((len(held), 5), -1, np.int64)
        for entry, (_, weights) in zip(entries, held, strict=True):
            entry[0] = weights.rank
            for column, name in enumerate(("a", "b", "scale", "bias"), start=1):
                if name in weights.tensors:
                    entry[column] = weights.tensors[name].data_ptr() - memory.data_ptr()
        self.kernels.bind(slot, self.kernels.image([target for target, _ in held], entries), memory)
        self.memories = [*getattr(self, "memories", []), memory]

    def step(self, slots: list[int], counts: list[int]) -> int:
        """Describe a step of requests with these slots and numbers of tokens; the number of tokens."""
        segments = [Segment(0, count, range(8), slot) for slot, count in zip(slots, counts, strict=True)]
        ids = torch.arange(sum(counts), device=DEVICE)
        self.inputs.fill(segments, ids, ids)
        self.inputs.send()
        return len(ids)

    def wanted(self, target: LoraTarget, slots: list[int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What the specification makes of y. slots: of each row."""
        y = y.clone()
        for row, slot in enumerate(slots):
            weights = self.plain.get((slot, target.name))
            if weights is not None:
                adapt_row(weights, target.base_bias, x[row], y[row])
        return y


def target(name: str, num_in: int, num_out: int) -> LoraTarget:
    made = LoraTarget(name, num_in, num_out, StepInputs(16, DEVICE))
    made.base_bias = torch.randn(num_out, generator=torch.Generator().manual_seed(num_out)).to(DEVICE)
    return made


def per_row(slots: list[int], counts: list[int]) -> list[int]:
    return np.repeat(slots, counts).tolist()


@pytest.mark.parametrize(
    ("shape", "mix", "dtype"),
    [
        *(((33, 37), mix, dtype) for mix in MIXES for dtype in (torch.float32, torch.bfloat16)),
        ((144, 48), "distinct", torch.bfloat16),
        ((300, 130), "some", torch.float32),
        ((144, 48), "zipf", torch.float16),
        ((4096, 1024), "distinct", torch.bfloat16),
        ((2048, 8192), "some", torch.bfloat16),
        ((8192, 2048), "zipf", torch.float16),
    ],
    ids=str,
)
def test_equals_the_specification(shape: tuple[int, int], mix: str, dtype: torch.dtype) -> None:
    bench = Bench(dtype, [target("module", *shape)])
    slots, [module] = MIXES[mix], bench.targets
    bench.load(*{slot for slot in slots if slot >= 0})
    num_rows = bench.step(slots, COUNTS)
    x, base = bench.random(num_rows, shape[0]), bench.random(num_rows, shape[1])
    got = base.clone()
    adapt(module.rows, Product(module, x, got))
    rows = per_row(slots, COUNTS)
    torch.testing.assert_close(got, bench.wanted(module, rows, x, base), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    untouched = torch.tensor([slot in (-1, NONE_OF_IT) for slot in rows], device=DEVICE)
    assert torch.equal(got[untouched], base[untouched])
    assert not (got[~untouched] == base[~untouched]).all(1).any()


def test_memory_is_held_while_the_slot_is_bound() -> None:
    bench = Bench(torch.float32, [target("module", 33, 37)])
    bench.load(1, 2)
    memories = [weakref.ref(memory) for memory in bench.memories]
    del bench.memories
    assert all(memory() is not None for memory in memories)
    bench.kernels.clear(1)
    bench.load(2)
    del bench.memories
    assert [memory() for memory in memories] == [None, None]


def test_an_adapter_without_factors_reads_nothing_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        made = new_empty(self, *size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    bench = Bench(torch.float32, [target("module", 33, 37)])
    [module] = bench.targets
    slots = [BIAS_ALONE, 4, NONE_OF_IT]
    bench.load(BIAS_ALONE, 4)
    num_rows = bench.step(slots, [1, 1, 1])
    x, base = bench.random(num_rows, 33), bench.random(num_rows, 37)
    got = base.clone()
    adapt(module.rows, Product(module, x, got))
    torch.testing.assert_close(got, bench.wanted(module, slots, x, base), rtol=1e-4, atol=1e-4)


@DTYPES
@pytest.mark.parametrize("slot", [4, 5])
def test_a_row_has_equal_bits_in_any_batch(slot: int, dtype: torch.dtype) -> None:
    bench = Bench(dtype, [target("module", 300, 40)])
    [module] = bench.targets
    bench.load(slot, 3)
    x, base = bench.random(18, 300), bench.random(18, 40)
    bench.step([slot], [18])
    together = base.clone()
    adapt(module.rows, Product(module, x, together))
    for index in (7, 17):
        bench.step([3, slot, -1, slot], [1, 2, 1, 1])
        rows = [3, 11, index, index, index]
        alone = base[rows]
        adapt(module.rows, Product(module, x[rows], alone))
        assert torch.equal(alone[2], together[index]) and torch.equal(alone[4], together[index])
        assert torch.equal(alone[3], base[index])


def test_the_largest_rank_leaves_the_bits_of_others() -> None:
    bench = Bench(torch.float32, [target("module", 200, 40)])
    [module] = bench.targets
    bench.load(1)
    bench.step([1, LARGEST], [2, 3])
    x, base = bench.random(5, 200), bench.random(5, 40)
    before, after = base.clone(), base.clone()
    adapt(module.rows, Product(module, x, before))
    assert torch.equal(before[2:], base[2:])
    bench.load(LARGEST)
    adapt(module.rows, Product(module, x, after))
    assert torch.equal(before[:2], after[:2])
    expected = bench.wanted(module, [1, 1] + [LARGEST] * 3, x, base)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)


def test_parts_of_one_output_take_one_launch_and_give_the_same() -> None:
    widths = (48, 30, 7)
    bench = Bench(torch.bfloat16, [target(f"part{width}", 64, width) for width in widths])
    bench.load(0, 2)
    num_rows = bench.step([0, -1, 2], [3, 2, 1])
    rows = bench.inputs.adapter_rows
    x, fused = bench.random(num_rows, 64), bench.random(num_rows, sum(widths) + 8)
    parts = fused.split([*widths, 8], dim=1)[:3]
    expected = []
    for module, part in zip(bench.targets, parts, strict=True):
        alone = part.contiguous()
        adapt(rows, Product(module, x, alone))
        expected.append(alone)
    rest = fused[:, -8:].clone()
    assert len(bench.kernels._parts) == 3
    adapt(rows, *(Product(module, x, part) for module, part in zip(bench.targets, parts, strict=True)))
    assert len(bench.kernels._parts) == 4, "one launch for all"
    assert torch.equal(fused[:, :-8], torch.cat(expected, dim=1)) and torch.equal(fused[:, -8:], rest)


def test_products_that_do_not_lie_side_by_side_take_a_launch_each() -> None:
    bench = Bench(torch.float32, [target("one", 24, 40), target("other", 24, 20)])
    bench.load(1, 2)
    num_rows = bench.step([1, 2], [2, 1])
    xs = [bench.random(num_rows, 24) for _ in bench.targets]
    ys = [bench.random(num_rows, entry.num_out) for entry in bench.targets]
    reference = [bench.wanted(entry, [1, 1, 2], x, y) for entry, x, y in zip(bench.targets, xs, ys, strict=True)]
    adapt(bench.inputs.adapter_rows, *map(Product, bench.targets, xs, ys))
    for got, expected in zip(ys, reference, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


SUMS = {
    "cat": (Composition(("a", "b", "c"), (0.5, -2.0, 0.1), (1.0, 1.0, 1.0)), (0, 6, 5)),
    "linear": (Composition(("a", "b", "c"), (0.7, -0.3, 1.5), (0.7, 0.3, 1.2), shares_factors=True), (6, 0, 6)),
    "wide": (Composition(("a", "b", "a", "b"), (0.5, 1.0, 0.1, 2.0), (1.0, 1.0, 1.0, 1.0)), (5, 5, 5, 6)),
    "of one that changes nothing": (Composition(("a", "b"), (1.0, 2.0), (1.0, 1.0)), (NONE_OF_IT, 6)),
}
"""A sum, and the slots of its adapters, which have factors alone."""


def merged(bench: Bench, name: str, composition: Composition, slots: tuple[int, ...]) -> SlotWeights:
    """The adapter that equals a sum, by the formulas of PEFT's `add_weighted_adapter`."""
    weights = [bench.plain.get((slot, name)) for slot in slots]
    pairs = zip(weights, composition.shrink_weights, composition.expand_weights, strict=True)
    parts = [(w.a.double() * s, w.b.double() * e) for w, s, e in pairs if w is not None]
    every_a, every_b = zip(*parts, strict=True)
    if composition.shares_factors:
        return SlotWeights(sum(every_a), sum(every_b))
    return SlotWeights(torch.cat(every_a), torch.cat(every_b))


@DTYPES
@pytest.mark.parametrize("kind", ["linear layer", "embedding"])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_equals_the_merged_adapter_in_any_batch(name: str, kind: str, dtype: torch.dtype) -> None:
    composition, slots = SUMS[name]
    bench = Bench(dtype, [target("module", 300, 40)])
    [module] = bench.targets
    module.is_embedding = kind == "embedding"
    for slot, rank in {0: 33, 5: 100, 6: 33}.items():
        weights = SlotWeights(bench.random(rank, 300) / 300**0.5, bench.random(rank, 40) / rank**0.5)
        bench.plain[slot, "module"] = weights
        bench.place(slot, [(module, weights.arranged(module.is_embedding))])
    bench.load(4)
    bench.kernels.compose(NUM_SLOTS + 1, composition, slots)
    ids = torch.randint(0, 300, (24,), generator=bench.generator).to(DEVICE)
    x = torch.nn.functional.one_hot(ids, 300).to(dtype) if module.is_embedding else bench.random(24, 300)
    base = bench.random(24, 40)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        y = base[rows]
        if module.is_embedding:
            adapt_embedding(module.rows, module, ids[rows], y)
        else:
            adapt(module.rows, Product(module, x[rows], y))
        return y

    bench.step([-1, NUM_SLOTS + 1, 4], [2, 19, 3])
    got = compute(torch.arange(24, device=DEVICE))
    bench.plain[NUM_SLOTS + 1, "module"] = merged(bench, "module", composition, slots)
    wanted = bench.wanted(module, per_row([-1, NUM_SLOTS + 1], [2, 19]), x[:21], base[:21])
    tolerance = TOLERANCE[dtype] if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got[:21], wanted, rtol=tolerance, atol=tolerance)
    bench.step([4, NUM_SLOTS + 1], [1, 1])
    assert torch.equal(compute(torch.tensor([0, 7], device=DEVICE))[1], got[7])


@DTYPES
def test_embeddings_add_the_column_of_the_token(dtype: torch.dtype) -> None:
    embedding = LoraTarget("embedding", 50, 24, StepInputs(16, DEVICE))
    embedding.is_embedding = True
    bench = Bench(dtype, [embedding])
    bench.load(3, 4)
    num_rows = bench.step([-1, 4, 3], [3, 20, 1])
    ids = torch.randint(0, 50, (num_rows,), generator=bench.generator).to(DEVICE)
    base = bench.random(num_rows, 24)
    got = base.clone()
    adapt_embedding(embedding.rows, embedding, ids, got)
    # the specification of a product, with rows that pick a column
    picks = torch.nn.functional.one_hot(ids, 50).to(dtype)
    expected = bench.wanted(embedding, per_row([-1, 4, 3], [3, 20, 1]), picks, base)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(got[:3], base[:3])


def test_the_head_takes_the_rows_whose_logits_are_wanted() -> None:
    bench = Bench(torch.float32, [target("other", 24, 24)])
    head = LoraTarget("head", 24, 40, bench.inputs, is_head=True)
    bench = Bench(torch.float32, [head])
    head._inputs = bench.inputs
    bench.load(0, 2)
    segments = [Segment(0, 3, range(1), 2), Segment(0, 2, range(1)), Segment(0, 20, range(2), 0)]
    wanted_rows = [2, 4, *range(5, 25)]
    bench.inputs.fill(segments, torch.arange(25, device=DEVICE), torch.tensor(wanted_rows, device=DEVICE), wanted_rows)
    x, base = bench.random(22, 24), bench.random(22, 40)
    got = base.clone()
    adapt(head.rows, Product(head, x, got))
    torch.testing.assert_close(got, bench.wanted(head, [2, -1] + [0] * 20, x, base), rtol=1e-4, atol=1e-4)


def test_a_slot_holds_the_last_adapter_and_none_once_cleared() -> None:
    bench = Bench(torch.float32, [target("module", 24, 20)])
    [module] = bench.targets
    bench.step([2], [3])
    x, base = bench.random(3, 24), bench.random(3, 20)
    for _ in range(2):
        bench.load(2)
        got = base.clone()
        adapt(module.rows, Product(module, x, got))
        torch.testing.assert_close(got, bench.wanted(module, [2] * 3, x, base), rtol=1e-4, atol=1e-4)
    bench.kernels.clear(2)
    adapt(module.rows, Product(module, x, left := base.clone()))
    assert torch.equal(left, base)


def test_padding_tasks_do_nothing() -> None:
    bench = Bench(torch.float32, [target("module", 24, 20)])
    [module] = bench.targets
    bench.load(0, 1, 2)
    bench.inputs.pad(Always(Bounds(num_rows=28, max_kv_len=28, has_adapters=True)))
    places = []
    for slots, counts in (([0, 1, 2, -1], [9, 9, 9, 1]), ([1, -1], [2, 26]), ([-1], [28])):  # as a captured graph would
        num_rows = bench.step(slots, counts)
        x, base = bench.random(num_rows, 24), bench.random(num_rows, 20)
        got = base.clone()
        groups = module.rows.groups
        assert groups is not None and groups.num_launched == groups.most_tasks(28) < 28
        places.append([(tensor.data_ptr(), tensor.shape) for tensor in (groups.tasks, groups.row_ids)])
        adapt(module.rows, Product(module, x, got))
        expected = bench.wanted(module, per_row(slots, counts), x, base)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert places[0] == places[1] == places[2]


def test_an_adapter_from_a_file_is_computed_from_its_slot(tmp_path: Path) -> None:
    """Through everything between a file and a row: host memory, the copy, the table."""
    dtype = torch.float32
    bench = Bench(dtype, [target("linear", 24, 20), target("other", 20, 24)])
    linear = bench.targets[0]
    weight = bench.random(20, 24)
    linear.project = lambda x: x @ weight.t()
    linear.squared_norms = weight.square().sum(1)
    a, b, magnitude, bias = (bench.random(*shape) for shape in ((3, 24), (20, 3), (20,), (20,)))
    tensors = {"linear.A": a, "linear.B": b, "linear.magnitude": magnitude, "linear.bias": bias}
    metadata = {"format": FORMAT, "digest": "d", "modules": json.dumps({"linear": {"kind": "linear", "rank": 3}})}
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, str(tmp_path / "file"), metadata)
    memory = PinnedMemory(1 << 16, 1 << 14, is_pinned=DEVICE.type == "cuda")
    destination = HostLayout(dtype, memory, bench.kernels)
    content = AdapterFiles({entry.name: entry for entry in bench.targets}, destination).read(tmp_path / "file")
    slots = DeviceSlots(bench.kernels, HeadsPool(bench.inputs), NO_PARTS)
    slots.put(3, content)
    while not slots.is_ready(3):
        pass
    bench.step([-1, 3], [1, 2])
    x = bench.random(3, 24)
    assert linear.base_bias is not None
    y = x @ weight.t() + linear.base_bias
    expected = y.clone()
    scale = magnitude / (weight + b @ a).norm(dim=1)
    expected[1:] = (x[1:] @ (weight + b @ a).t()) * scale + linear.base_bias + bias
    adapt(linear.rows, Product(linear, x, y))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    slots.clear(3)
    before = y.clone()
    adapt(linear.rows, Product(linear, x, y))
    assert torch.equal(y, before)


def test_heads_from_a_file_draft_from_their_slot(tmp_path: Path) -> None:
    dtype = torch.float32
    bench = Bench(dtype, [target("linear", 24, 20)])
    output = torch.nn.Linear(24, 40, bias=False).to(DEVICE).requires_grad_(False)
    network = torch.nn.Module()
    network.get_output_embeddings = lambda: output  # type: ignore[assignment]
    pool = HeadsPool(bench.inputs)
    pool.attach(network, LoraTarget("head", 24, 40, bench.inputs, is_head=True))
    pool.kernels = DeviceHeads(bench.inputs, NUM_SLOTS)
    bench.step([-1], [1])
    output(bench.random(1, 1, 24))
    parts = {"weight": (24, 24), "bias": (24,), "output": (40, 24)}
    tensors = {f"heads.{head}.{part}": bench.random(*shape) for head in (0, 1) for part, shape in parts.items()}
    facts = {"format": FORMAT, "modules": "{}", "heads": json.dumps({"count": 2, "version": 1, "layers": 1})}
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, str(tmp_path / "file"), facts)
    memory = PinnedMemory(1 << 16, 1 << 14, is_pinned=DEVICE.type == "cuda")
    content = AdapterFiles({}, HostLayout(dtype, memory, bench.kernels), pool).read(tmp_path / "file")
    slots = DeviceSlots(bench.kernels, pool, NO_PARTS)
    slots.put(6, content)
    while not slots.is_ready(6):
        pass
    x = bench.random(1, 2, 24)
    ids = torch.arange(2, device=DEVICE)
    bench.inputs.fill([Segment(0, 2, range(8))], ids, ids, [0, 1], [HeadsRow(1, 6, 2), HeadsRow(0, 6, 1)])
    pool.prepare()
    expected = [x[0] @ output.weight.t()]
    for row, head in ((1, 0), (1, 1), (0, 0)):
        weight, bias, matrix = (tensors[f"heads.{head}.{part}"] for part in ("weight", "bias", "output"))
        hidden = x[0, row] + torch.nn.functional.silu(weight @ x[0, row] + bias)
        expected.append((matrix @ hidden)[None])
    torch.testing.assert_close(output(x)[0], torch.cat(expected), rtol=1e-4, atol=1e-4)
    slots.clear(6)
    with pytest.raises(RuntimeError, match="slot 6 has no heads"):
        pool.prepare()
