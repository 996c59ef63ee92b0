"""The kernels for heads against adapters/formats/heads.py: run by test_triton.py in a process of its own, on CUDA
or, with TRITON_INTERPRET=1, on CPU.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from lorikeet.adapters.formats.heads import MedusaHeads
from lorikeet.adapters.formats.heads import MedusaShape as Shape
from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model.adapters.tables import DeviceKernels
from lorikeet.shard.model.kernels.tuning import Tuned
from lorikeet.shard.model.lora.targets import LoraTarget, Product, SlotWeights, adapt
from lorikeet.shard.model.medusa.cuda import DeviceHeads
from lorikeet.shard.model.medusa.heads import HeadsContent, HeadsPool, HeadsShape, SlotHeads
from tests import tiny
from tests.adapters.medusa import small
from tests.shard.model.medusa import test_heads
from tests.shard.padded import Always

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
VOCAB = 40
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

# heads, blocks, whether they have output matrices of their own
KINDS = [(1, 1, False), (3, 1, False), (4, 2, False), (2, 1, True), (3, 0, True), (2, 2, True), (2, 1, False)]
# slot of each row, -1 for no heads
MIXES = {
    "distinct": [0, 1, 2, 3, 4, 5, 6],
    "uniform": [3, 1, 3, 0, 2, 1, 0, 2],
    "zipf": [2, 2, 2, -1, 2, 1, 1, 5],
    "identical": [1] * 18,
    "none": [-1] * 4,
    "some": [-1, 4, -1, -1, 4, 2],
}


class World:
    """A network that is its output head, and the heads of some slots, as a device has them and as plain torch does."""

    def __init__(self, dtype: torch.dtype, size: int = 24, tuned: Tuned | None = None) -> None:
        self.dtype, self.size = dtype, size
        self.generator = torch.Generator().manual_seed(0)
        self.inputs = StepInputs(16, DEVICE)
        self.inputs.reserve_groups(max_rows=64, max_slots=len(KINDS), max_drafts=96)
        self.output = nn.Linear(size, VOCAB, bias=False).to(DEVICE, dtype).requires_grad_(False)
        network = nn.Module()
        network.get_output_embeddings = lambda: self.output  # type: ignore[assignment]
        self.target = LoraTarget("head", size, VOCAB, self.inputs, is_head=True)
        self.pool = HeadsPool(self.inputs)
        self.pool.attach(network, self.target)
        self.kernels = DeviceHeads(self.inputs, len(KINDS), *([] if tuned is None else [tuned]))
        self.pool.kernels = self.kernels
        self.plain: dict[int, MedusaHeads] = {}
        self.bound: dict[int, SlotHeads] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, self.dtype)

    def put(self, *slots: int) -> None:
        for slot in slots:
            num_heads, num_blocks, is_own = KINDS[slot]
            shape = HeadsShape(num_heads, num_blocks, self.size, VOCAB if is_own else 0)
            made = [self.random(*size) / self.size**0.5 for size in shape.tensors()]
            sizes = [-(-tensor.nbytes // 64) * 64 for tensor in made]
            memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=DEVICE)
            for piece, tensor in zip(memory.split(sizes), made, strict=True):
                piece[: tensor.nbytes].view(self.dtype).copy_(tensor.flatten())
            content = HeadsContent(shape, self.dtype, memory.numel(), torch.empty(0, dtype=torch.uint8))
            self.bound[slot] = content.on(memory)
            self.pool.put(slot, self.bound[slot])
            plain = MedusaHeads(Shape(num_heads, num_blocks, self.size, VOCAB if is_own else None)).to(DEVICE)
            for parameter, tensor in zip(
                [*[p for pair in zip(plain.weights, plain.biases, strict=True) for p in pair],
                 *([plain.matrices] if is_own else [])], made, strict=True,
            ):  # fmt: skip
                assert parameter is not None
                parameter.data.copy_(tensor)
            self.plain[slot] = plain

    def run(self, x: torch.Tensor, heads: Sequence[HeadsRow], slots: Sequence[int] = ()) -> torch.Tensor:
        """x: [S, H]. Returns [S + E, V]. slots: of the adapter of each row."""
        num_rows = x.shape[0]
        ids = torch.arange(num_rows, device=DEVICE)
        own = slots or [-1] * num_rows
        segments = [Segment(0, 1, range(1), slot) for slot in own]
        self.inputs.fill(segments, ids, ids, list(range(num_rows)), heads)
        self.inputs.send()
        self.pool.prepare()
        y: torch.Tensor = self.output(x[None])[0]
        return y

    def wanted(self, x: torch.Tensor, heads: Sequence[HeadsRow]) -> torch.Tensor:
        """[E, V] float32, by plain torch."""
        matrix = self.output.weight.float()
        rows = [torch.empty(0, VOCAB, device=DEVICE)]
        for row, slot, count in heads:
            rows.append(self.plain[slot].logits(x[row : row + 1].float(), lambda y: y @ matrix.t())[0, :count])
        return torch.cat(rows)


def asked(mix: str) -> list[HeadsRow]:
    """Rows of a mix with some of their heads, later rows first."""
    rows = [(row, slot) for row, slot in enumerate(MIXES[mix]) if slot >= 0]
    return [HeadsRow(row, slot, max(1, KINDS[slot][0] - row % 2)) for row, slot in reversed(rows)]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("mix", "dtype", "size"),
    [
        *((mix, dtype, 24) for mix in MIXES for dtype in (torch.float32, torch.bfloat16)),
        ("distinct", torch.float16, 24),
        ("some", torch.float32, 150),
        ("distinct", torch.bfloat16, 144),
        ("distinct", torch.bfloat16, 1024),
    ],
    ids=str,
)
def test_equals_the_specification(mix: str, dtype: torch.dtype, size: int) -> None:
    world = World(dtype, size)
    heads = asked(mix)
    world.put(*{slot for _, slot, _ in heads})
    x = world.random(len(MIXES[mix]), size)
    got = world.run(x, heads)
    # the base's rows by the same product: of another number of rows it may sum in another order
    others = x.new_zeros(len(got) - len(x), size)
    base = nn.functional.linear(torch.cat([x, others])[None], world.output.weight)[0, : len(x)]
    assert torch.equal(got[: len(x)], base)
    torch.testing.assert_close(
        got[len(x) :].float(), world.wanted(x, heads), rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
    )


@torch.inference_mode()
@pytest.mark.parametrize("slot", range(3))
def test_equals_one_product_after_the_other(slot: int) -> None:
    world = World(torch.float32)
    world.put(slot)
    x = world.random(5, 24)
    count = KINDS[slot][0]
    got = world.run(x, [HeadsRow(row, slot, count) for row in range(5)])[5:]
    expected = world.bound[slot].hidden(x).flatten(0, 1) @ world.output.weight.t()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@DTYPES
@pytest.mark.parametrize("slot", [1, 3], ids=["one", "three"])
def test_draft_rows_have_equal_bits_in_any_batch(slot: int, dtype: torch.dtype) -> None:
    world = World(dtype, 40)
    everyone = range(len(KINDS))
    world.put(*everyone)
    # an output is one of the inputs: the base's product, which may have other bits for other numbers of rows, is exact
    world.output.weight.data.copy_(torch.eye(40).repeat(-(-VOCAB // 40), 1)[:VOCAB])
    x = world.random(17, 40)
    count = KINDS[slot][0]
    alone = world.run(x[9:11], [HeadsRow(0, slot, count)])[2:]
    others = [HeadsRow(row, slot, count) for row in range(17)]
    together = world.run(x, others)[17 + 9 * count :][:count]
    assert torch.equal(alone, together)
    mixed = [HeadsRow(9, other, KINDS[other][0]) for other in everyone if other != slot]
    among = world.run(x, [*mixed, HeadsRow(9, slot, count)])[-count:]
    assert torch.equal(alone, among)


@torch.inference_mode()
def test_steps_of_equal_bounds_lie_at_equal_addresses_and_give_what_others_give() -> None:
    world = World(torch.float32)
    world.put(0, 1, 2, 3)
    plans = [
        [HeadsRow(0, 2, 4), HeadsRow(3, 1, 2)],
        [HeadsRow(row % 8, 3, 1) for row in range(20)],
        [],
        [HeadsRow(7, 0, 1)],
    ]
    world.inputs.pad(Always(Bounds(num_rows=8, max_kv_len=1, num_drafts=20)))
    actual = []
    for plan in plans:
        x = world.random(8, 24)
        got = world.run(x, plan)
        groups = world.inputs.head_groups
        assert groups is not None and got.shape == (28, VOCAB) and world.inputs.num_draft_rows == 20
        actual.append([(t.data_ptr(), t.shape) for t in (groups.tasks, groups.sources, groups.places)])
        expected = world.wanted(x, plan)
        torch.testing.assert_close(got[8 : 8 + len(expected)], expected, rtol=1e-4, atol=1e-4)
    assert all(entry == actual[0] for entry in actual)
    with pytest.raises(RuntimeError, match="21 draft tokens of heads"):
        world.run(x, [HeadsRow(row % 8, 3, 1) for row in range(21)])
    world.inputs.pad(Always(Bounds(num_rows=8, max_kv_len=1)))
    assert world.run(x, []).shape == (8, VOCAB)


@torch.inference_mode()
def test_draft_rows_use_the_adapter_of_the_output_head() -> None:
    world = World(torch.float32)
    world.put(0, 1)
    adapters = DeviceKernels([world.target], len(KINDS), DEVICE)
    rank = 3
    memory = world.random(rank * (24 + VOCAB))
    a, b = memory[: rank * 24].view(rank, 24), memory[rank * 24 :].view(rank, VOCAB)
    offsets = torch.tensor([[rank, 0, a.nbytes, -1, -1]]).numpy()
    adapters.bind(5, adapters.image([world.target], offsets), memory.view(torch.uint8))
    # before the pool's own hook, as modules of the base have theirs
    world.output._forward_hooks.clear()
    world.output.register_forward_hook(
        lambda _, args, y: adapt(world.target.rows, Product(world.target, args[0][0], y[0]))
    )
    world.output.register_forward_hook(world.pool._after)
    x = world.random(4, 24)
    heads = [HeadsRow(2, 1, 3), HeadsRow(0, 0, 1), HeadsRow(1, 1, 2)]
    weights = SlotWeights(a, b)
    assert weights.a is not None and weights.b is not None
    delta = (weights.a.t() @ weights.b).t()
    matrix, plain = world.output.weight.clone(), [world.wanted(x, heads)]
    world.output.weight += delta
    plain.append(world.wanted(x, heads))
    world.output.weight.copy_(matrix)
    expected = torch.cat([plain[1][:3], plain[0][3:]])
    for bounds in (None, Bounds(num_rows=4, max_kv_len=1, num_drafts=9)):
        world.inputs.pad(None if bounds is None else Always(bounds))
        got = world.run(x, heads, [-1, -1, 5, -1])
        torch.testing.assert_close(got[4:10], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got[2], x[2] @ (matrix + delta).t(), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_slot_holds_the_last_heads() -> None:
    world = World(torch.float32)
    world.put(2)
    x = world.random(2, 24)
    heads = [HeadsRow(1, 2, 4)]
    first = world.run(x, heads)
    world.put(2)
    second = world.run(x, heads)
    torch.testing.assert_close(second[2:], world.wanted(x, heads), rtol=1e-4, atol=1e-4)
    assert not torch.equal(first, second)
    with pytest.raises(RuntimeError, match="slot 2 has 4 heads, the step needs 5"):
        world.run(x, [HeadsRow(0, 2, 5)])
    world.pool.clear(2)
    assert not world.kernels.table.any()
    with pytest.raises(RuntimeError, match="slot 2 has no heads"):
        world.run(x, heads)


@torch.inference_mode()
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the model is on CPU")
def test_a_model_gives_what_it_gives_without_kernels(tmp_path: Path) -> None:
    """Through the network and its own output head, in steps of any size and padded ones."""
    world = test_heads.World(tmp_path, "llama", "float32")
    model, rows = world.model, list(range(11))
    one, two = small.heads(Shape(3, 2, 64)), small.heads(Shape(2, 1, 64, tiny.VOCAB), seed=3)
    heads = [HeadsRow(9, 4, 2), HeadsRow(0, 2, 2), HeadsRow(9, 2, 1)]
    actual = []
    for has_kernels in (False, True):
        if has_kernels:
            model.enable_device_kernels(8, max_rows=16, max_drafts=16)
        for slot, entry in ((4, one), (2, two)):
            world.put(slot, entry, is_for_device=True)
        actual.append(test_heads.run(model, rows, heads))
    model.inputs.pad(Always(Bounds(num_rows=11, max_kv_len=16, num_drafts=8, has_adapters=True)))
    plain, eager, padded = [*actual, test_heads.run(model, rows, heads)]
    assert plain.shape == eager.shape == padded.shape == (16, tiny.VOCAB)
    torch.testing.assert_close(eager, plain, rtol=1e-4, atol=1e-4)
    assert torch.equal(padded, eager)


@torch.inference_mode()
def test_other_tiles_give_the_same() -> None:
    key = {kernel: (kernel, 150, torch.float32) for kernel in ("head_block", "head_logits")}
    tuned = Tuned({key["head_block"]: [64, 32, 2, 2], key["head_logits"]: [16, 256, 8, 4]}, is_file=True)
    world = World(torch.float32, 150, tuned)
    heads = asked("distinct")
    world.put(*range(len(KINDS)))
    x = world.random(len(MIXES["distinct"]), 150)
    got = world.run(x, heads)[len(x) :]
    torch.testing.assert_close(got, world.wanted(x, heads), rtol=1e-4, atol=2e-4)
