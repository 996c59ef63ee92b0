"""The adapters' part of a product: compiled code against its specification, for every mix of adapters in a step."""

from collections.abc import Iterator

import pytest
import torch

from lorikeet.proto.params import Composition
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model.lora import targets as lora
from lorikeet.shard.model.lora.targets import (
    NO_SUMS,
    ComposedSlots,
    LoraTarget,
    Product,
    SlotWeights,
    adapt,
    adapt_embedding,
    adapt_row,
)
from tests.shard.levels import LEVELS, compiled_for
from tests.shard.model.lora.layout import packed

NUM_SLOTS = 12
SHAPES = [(64, 64), (96, 33), (130, 200), (1024, 256)]
RANKS = (1, 2, 8, 16, 17, 64, 320)

# slot of each request, -1 for none
MIXES = {
    "distinct": [0, 1, 2, 3, 4, 5, 6, 7],
    "uniform": [3, 1, 3, 0, 2, 1, 0, 2],
    "zipf": [0, 0, 0, 0, 1, 1, 2, 3],
    "identical": [5] * 8,
    "none": [-1] * 8,
    "some": [-1, 4, -1, -1, 4, 9, -1, 11],
}
COUNTS = [1, 1, 40, 3, 1, 17, 16, 2]
Plain = dict[int, SlotWeights | None]


@pytest.fixture(autouse=True, params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels compiled for this processor, and for processors with fewer instructions."""
    with compiled_for(request.param, lora, lora.compiled, lora.library_for):
        yield


def make_target(
    num_in: int, num_out: int, dtype: torch.dtype, inputs: StepInputs, seed: int = 0, sums: ComposedSlots = NO_SUMS
) -> tuple[LoraTarget, Plain]:
    """A target, and its slots before packing: every rank, DoRA's scale, a bias, a bias alone, nothing."""
    generator = torch.Generator().manual_seed(seed)
    target = LoraTarget("module", num_in, num_out, inputs)
    target.base_bias = torch.randn(num_out, generator=generator)
    target.allocate(NUM_SLOTS, sums)
    plain: Plain = {}
    for slot in range(NUM_SLOTS):
        rank = RANKS[slot % len(RANKS)]
        a = (torch.randn(rank, num_in, generator=generator) / num_in**0.5).to(dtype)
        b = (torch.randn(rank, num_out, generator=generator) / rank**0.5).to(dtype)
        scale = 1 + 0.1 * torch.randn(num_out, generator=generator) if slot % 3 == 1 else None
        bias = torch.randn(num_out, generator=generator) if slot % 4 == 2 else None
        plain[slot] = SlotWeights(a, b, scale, bias)
    plain[9] = SlotWeights(bias=torch.randn(num_out, generator=generator))
    plain[11] = None
    for slot, weights in plain.items():
        target.put(slot, None if weights is None else packed(weights))
    return target, plain


def fill(inputs: StepInputs, slots: list[int], counts: list[int]) -> int:
    """Describe a step of requests with these slots and numbers of tokens; the number of tokens."""
    segments = [Segment(0, count, range(8), slot) for slot, count in zip(slots, counts, strict=True)]
    ids = torch.arange(sum(counts))
    inputs.fill(segments, ids, ids)
    return len(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_equals_the_specification(mix: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = StepInputs(16, torch.device("cpu"))
    target, plain = make_target(*shape, dtype, inputs)
    num_rows = fill(inputs, MIXES[mix], COUNTS)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, shape[0], generator=generator).to(dtype)
    base = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
    expected, got = base.clone(), base.clone()
    row = 0
    for slot, count in zip(MIXES[mix], COUNTS, strict=True):
        for index in range(row, row + count):
            weights = plain[slot] if slot >= 0 else None
            if weights is not None:
                adapt_row(weights, target.base_bias, x[index], expected[index])
        row += count
    adapt(target.rows, Product(target, x, got))
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    untouched = torch.tensor([slot in (-1, 11) for slot, n in zip(MIXES[mix], COUNTS, strict=True) for _ in range(n)])
    assert torch.equal(got[untouched], base[untouched])
    changed = ~untouched
    assert not changed.any() or not torch.equal(got[changed], base[changed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_has_equal_bits_in_any_batch(dtype: torch.dtype) -> None:
    inputs = StepInputs(16, torch.device("cpu"))
    target, _ = make_target(130, 200, dtype, inputs)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 130, generator=generator).to(dtype)
    base = torch.randn(40, 200, generator=generator).to(dtype)
    fill(inputs, [4], [40])
    together = base.clone()
    adapt(target.rows, Product(target, x, together))
    for index in (0, 7, 16, 39):
        fill(inputs, [2, 4, -1], [5, 1, 1])
        alone = base[index].repeat(7, 1)
        adapt(target.rows, Product(target, x[index].repeat(7, 1), alone))
        assert torch.equal(alone[5], together[index])
        assert torch.equal(alone[6], base[index])


def test_several_products_of_one_step_and_strided_outputs() -> None:
    inputs = StepInputs(16, torch.device("cpu"))
    targets = [make_target(64, width, torch.bfloat16, inputs, seed=width)[0] for width in (48, 32, 16)]
    num_rows = fill(inputs, [0, -1, 3], [3, 2, 18])
    x = torch.randn(num_rows, 64).bfloat16()
    fused = torch.randn(num_rows, 96).bfloat16()
    expected = []
    for target, part in zip(targets, fused.split([48, 32, 16], dim=1), strict=True):
        alone = part.contiguous()
        adapt(target.rows, Product(target, x, alone))
        expected.append(alone)
    parts = fused.split([48, 32, 16], dim=1)
    adapt(inputs.adapter_rows, *(Product(target, x, part) for target, part in zip(targets, parts, strict=True)))
    assert torch.equal(fused, torch.cat(expected, dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_embeddings_add_the_column_of_the_token(dtype: torch.dtype) -> None:
    inputs = StepInputs(16, torch.device("cpu"))
    target = LoraTarget("embedding", 50, 24, inputs)
    target.allocate(2)
    a, b = torch.randn(4, 50).to(dtype), torch.randn(4, 24).to(dtype)
    target.put(1, packed(SlotWeights(a, b), is_embedding=True))
    fill(inputs, [-1, 1], [3, 20])
    ids = torch.randint(0, 50, (23,))
    base = torch.randn(23, 24).to(dtype)
    got = base.clone()
    adapt_embedding(target.rows, target, ids, got)
    assert torch.equal(got[:3], base[:3])
    expected = base[3:].float() + a[:, ids[3:]].float().t() @ b.float()
    torch.testing.assert_close(got[3:].float(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_without_a_compiler_the_specification_itself_runs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = StepInputs(16, torch.device("cpu"))
    target, unpacked = make_target(64, 64, dtype, inputs)
    num_rows = fill(inputs, MIXES["some"], COUNTS)
    x, base = torch.randn(num_rows, 64).to(dtype), torch.randn(num_rows, 64).to(dtype)
    fast, plain = base.clone(), base.clone()
    adapt(target.rows, Product(target, x, fast))
    monkeypatch.setattr(lora, "compiled", lambda dtype: None)
    for slot, weights in unpacked.items():
        target.put(slot, weights)
    adapt(target.rows, Product(target, x, plain))
    torch.testing.assert_close(fast, plain, rtol=2**-7, atol=2**-7)


def test_the_rows_of_the_head_are_those_whose_logits_are_wanted() -> None:
    inputs = StepInputs(16, torch.device("cpu"))
    segments = [Segment(0, 3, range(1), 1), Segment(0, 2, range(1)), Segment(0, 40, range(3), 7)]
    inputs.fill(segments, torch.arange(45), torch.tensor([2, 4, *range(5, 45)]))
    assert inputs.adapter_rows.tasks.tolist() == [[1, 0, 3], [7, 5, 16], [7, 21, 16], [7, 37, 8]]
    assert inputs.head_adapter_rows.tasks.tolist() == [[1, 0, 1], [7, 2, 16], [7, 18, 16], [7, 34, 8]]
    inputs.fill([Segment(0, 3, range(1))], torch.arange(3), torch.tensor([2]))
    assert not len(inputs.adapter_rows) and not len(inputs.head_adapter_rows)


def digests(count: int) -> tuple[str, ...]:
    return tuple(f"{index:064x}" for index in range(count))


SUMS = {
    "cat": (Composition(digests(3), (0.5, -2.0, 0.1), (1.0, 1.0, 1.0)), (0, 3, 4)),
    "linear": (Composition(digests(3), (0.7, -0.3, 1.5), (0.7, 0.3, 1.2), shares_factors=True), (3, 3, 10)),
    "with one that changes nothing": (Composition(digests(2), (1.0, 2.0), (1.0, 1.0)), (11, 4)),
    "of nothing": (Composition(digests(1), (1.0,), (1.0,)), (11,)),
}
"""A sum, and the slots of its adapters."""


def merged(composition: Composition, slots: tuple[int, ...], plain: Plain) -> SlotWeights | None:
    """The adapter that equals a sum, by the formulas of PEFT's `add_weighted_adapter`."""
    weights = [plain[slot] for slot in slots]
    pairs = zip(weights, composition.shrink_weights, composition.expand_weights, strict=True)
    parts = [(w.a.double() * s, w.b.double() * e) for w, s, e in pairs if w is not None and w.a is not None]
    if not parts:
        return None
    every_a, every_b = zip(*parts, strict=True)
    if composition.shares_factors:
        return SlotWeights(sum(every_a), sum(every_b))
    return SlotWeights(torch.cat(every_a), torch.cat(every_b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("with_code", [True, False], ids=["compiled", "specification"])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_equals_the_merged_adapter_in_any_batch(
    name: str, with_code: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    composition, slots = SUMS[name]
    inputs, sums = StepInputs(16, torch.device("cpu")), ComposedSlots(NUM_SLOTS, 2)
    target, plain = make_target(130, 200, dtype, inputs, sums=sums)
    ranks = {0: 1, 3: 16, 4: 16, 10: 16}
    for slot, rank in ranks.items():
        generator = torch.Generator().manual_seed(slot)
        a, b = torch.randn(rank, 130, generator=generator).to(dtype), torch.randn(rank, 200, generator=generator)
        plain[slot] = SlotWeights(a, b.to(dtype) / 8)
        target.put(slot, packed(plain[slot]))
    if not with_code:
        monkeypatch.setattr(lora, "compiled", lambda dtype: None)
        for slot, weights in plain.items():
            target.put(slot, weights)
    sums.put(NUM_SLOTS + 1, composition, slots)
    x, base = torch.randn(24, 130).to(dtype), torch.randn(24, 200).to(dtype)
    fill(inputs, [-1, NUM_SLOTS + 1, 4], [2, 19, 3])
    got = base.clone()
    adapt(target.rows, Product(target, x, got))
    wanted = base.clone()
    if (weights := merged(composition, slots, plain)) is not None:
        for row in range(2, 21):
            adapt_row(weights, None, x[row], wanted[row])
    tolerance = 1e-4 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got[:21], wanted[:21], rtol=tolerance, atol=tolerance)
    assert weights is None or not torch.equal(got[2:21], base[2:21])
    fill(inputs, [2, NUM_SLOTS + 1], [1, 1])
    alone = base[[0, 7]]
    adapt(target.rows, Product(target, x[[0, 7]], alone))
    assert torch.equal(alone[1], got[7])
    sums.clear(NUM_SLOTS + 1)
    adapt(target.rows, Product(target, x[[0, 7]], cleared := base[[0, 7]]))
    assert torch.equal(cleared[1], base[7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shares_factors", [False, True])
def test_a_sum_on_an_embedding(shares_factors: bool, dtype: torch.dtype) -> None:
    inputs, sums = StepInputs(16, torch.device("cpu")), ComposedSlots(2, 1)
    target = LoraTarget("embedding", 50, 24, inputs)
    target.is_embedding = True
    target.allocate(2, sums)
    plain: Plain = {slot: SlotWeights(torch.randn(4, 50).to(dtype), torch.randn(4, 24).to(dtype)) for slot in range(2)}
    for slot, weights in plain.items():
        assert weights is not None
        target.put(slot, packed(weights, is_embedding=True))
    composition = Composition(digests(2), (0.5, -1.0), (1.0, 2.0), shares_factors)
    sums.put(2, composition, (0, 1))
    fill(inputs, [2], [20])
    ids = torch.randint(0, 50, (20,))
    got = torch.zeros(20, 24, dtype=dtype)
    adapt_embedding(target.rows, target, ids, got)
    weights = merged(composition, (0, 1), plain)
    assert weights is not None and weights.a is not None and weights.b is not None
    wanted = (weights.a[:, ids].t() @ weights.b).to(dtype)
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-6)
