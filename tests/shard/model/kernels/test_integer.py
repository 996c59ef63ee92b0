"""integer.c: the bits of the same arithmetic in torch, for every kind of vectors, alone and among other rows."""

import ctypes
import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from lorikeet.shard.model.kernels import integer
from lorikeet.shard.model.kernels.integer import BLOCK, IntegerWeight, PackedIntegers, plain_product, round_blocks

pytestmark = pytest.mark.skipif(not integer.available(), reason="needs a C compiler")

VARIANTS = {
    "as the processor can": (),
    "AVX2 alone": ("WITHOUT_AVX512",),
    **{f"{width} bytes": (f"WITHOUT_INSTRUCTIONS={width}",) for width in (16, 32, 64)},
}
COMPILED = [
    ("as the processor can", torch.float32),
    ("as the processor can", torch.bfloat16),
    *((name, torch.float32) for name in VARIANTS if name != "as the processor can"),
]
"""Kinds of vectors, and of numbers. Each pair is compiled, which takes seconds."""
KINDS = {
    "8 bits": (8, None, False),
    "8 bits, groups of 32": (8, 32, False),
    "8 bits, groups of 16, minimums": (8, 16, True),
    "8 bits, groups of 64": (8, 64, False),
    "4 bits, groups of 32": (4, 32, False),
    "4 bits, groups of 128": (4, 128, False),
    "4 bits, groups of 16, minimums": (4, 16, True),
    "4 bits, groups of 32, minimums": (4, 32, True),
    "4 bits, groups of 128, minimums": (4, 128, True),
    "4 bits, whole rows": (4, None, False),
}
RANGES = {
    "5 bits, groups of 32": (32, False, -16, 15),
    "5 bits, groups of 32, minimums": (32, True, 0, 31),
    "5 bits, groups of 16": (16, False, -16, 15),
    "5 bits, groups of 64": (64, False, -16, 15),
    "6 bits, groups of 16": (16, False, -32, 31),
    "6 bits, groups of 32, minimums": (32, True, 0, 63),
    "above zero": (32, False, 90, 121),
    "one more than 6 bits": (32, False, -32, 32),
}
"""Kinds of weights that are kept in 8 bits and have fewer: groups, minimums, least and largest value."""
SHAPES = ((100, 256), (64, 128), (16, 384), (1, 128))


@pytest.fixture(params=VARIANTS)
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library of one kind of vectors."""
    load: Any = integer._load
    monkeypatch.setattr(integer, "_load", lambda dtype: load(dtype, *VARIANTS[request.param]))
    yield


def drawn(kind: str, num_out: int, num_in: int, seed: int = 0) -> IntegerWeight:
    """With rows of the largest values, whose sums are the largest."""
    low, high = -128, 127
    if kind in RANGES:
        group, has_minimums, low, high = RANGES[kind]
        bits = 8
    else:
        bits, group, has_minimums = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    shape, groups = (num_out, num_in), num_in // (group or num_in)
    if bits == 8:
        values = torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)
        values[: num_out // 4], values[-1] = high, low
    else:
        values = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
        values[: num_out // 4] = 15
    scales = torch.rand(num_out, groups, generator=generator) + 0.1
    minimums = torch.randn(num_out, groups, generator=generator) if has_minimums else None
    return IntegerWeight(bits, values, scales, minimums)


def rows_of(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows and columns of many sizes; some rows are all largest values of one sign."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
    x[::3] *= 1e4
    x *= torch.logspace(-3, 3, width)
    x[1::4], x[2::4] = 1.5, -1.5
    return x.to(dtype)


@pytest.mark.parametrize(("code", "dtype"), COMPILED, ids=str, indirect=["code"])
@pytest.mark.parametrize("kind", [*KINDS, *RANGES])
@pytest.mark.usefixtures("code")
def test_the_bits_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        weight = drawn(kind, *shape)
        bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(1))
        packed = PackedIntegers(weight, bias)
        x = rows_of(13, shape[1], dtype)
        expected = plain_product(x, weight, bias)
        for count in (1, 2, 3, 4, 5, 6, 7, 13):
            assert torch.equal(packed.product(x[:count], with_bias=True), expected[:count])
        assert torch.equal(packed.product(x, with_bias=False), plain_product(x, weight, None))


@pytest.mark.parametrize(("code", "dtype"), COMPILED, ids=str, indirect=["code"])
@pytest.mark.parametrize("kind", [*KINDS, *RANGES])
@pytest.mark.usefixtures("code")
def test_scales_that_half_precision_holds(kind: str, dtype: torch.dtype) -> None:
    weight = drawn(kind, 100, 256)
    scales, minimums = weight.scales.half().float(), weight.minimums
    halves = IntegerWeight(weight.bits, weight.values, scales, None if minimums is None else minimums.half().float())
    packed, x = PackedIntegers(halves, None), rows_of(13, 256, dtype)
    for count in (1, 2, 7, 13):
        assert torch.equal(packed.product(x[:count], with_bias=False), plain_product(x[:count], halves, None))
    if integer._load(torch.float32).reads_halves():
        assert packed.nbytes < PackedIntegers(weight, None).nbytes


@pytest.mark.parametrize("changed", ["scales", "minimums"])
@pytest.mark.usefixtures("code")
def test_scales_of_which_half_precision_holds_the_first(changed: str) -> None:
    weight = drawn("4 bits, groups of 32, minimums", 100, 256)
    assert weight.minimums is not None
    values = {"scales": weight.scales.half().float(), "minimums": weight.minimums.half().float()}
    values[changed][-1, -1] = 0.1
    packed, x = PackedIntegers(IntegerWeight(4, weight.values, **values), None), rows_of(3, 256, torch.float32)
    expected = plain_product(x, IntegerWeight(4, weight.values, **values), None)
    assert torch.equal(packed.product(x, with_bias=False), expected)


def test_scales_and_minimums_may_lie_in_any_order() -> None:
    weight = drawn("4 bits, groups of 32, minimums", 40, 256)
    assert weight.minimums is not None
    scales, minimums = (entry.t().contiguous().t() for entry in (weight.scales, weight.minimums))
    x = rows_of(3, 256, torch.float32)
    for _ in range(20):  # memory that was given back too early may still hold its values
        packed = PackedIntegers(IntegerWeight(4, weight.values, scales, minimums), None)
        assert torch.equal(packed.product(x, with_bias=False), plain_product(x, weight, None))


@pytest.mark.usefixtures("code")
def test_rows_that_are_no_multiple_of_a_word() -> None:
    for kind in ("8 bits", "4 bits, whole rows"):
        for num_in in (1, 3, 33, 66, 130):
            weight = drawn(kind, 20, num_in)
            x = rows_of(9, num_in, torch.float32)
            assert torch.equal(PackedIntegers(weight, None).product(x, with_bias=False), plain_product(x, weight, None))


@pytest.mark.usefixtures("code")
def test_rows_that_are_no_multiple_of_a_block() -> None:
    for kind in ("8 bits, groups of 16, minimums", "4 bits, groups of 16, minimums"):
        weight, x = drawn(kind, 20, 48), rows_of(9, 48, torch.float32)
        assert torch.equal(PackedIntegers(weight, None).product(x, with_bias=False), plain_product(x, weight, None))


@pytest.mark.usefixtures("code")
def test_long_rows_of_the_largest_values() -> None:
    num_in = 2**17
    values = torch.full((3, num_in), 127, dtype=torch.int8)
    values[1], values[2, ::2] = -128, 0
    weight = IntegerWeight(8, values, torch.ones(3, 1))
    x = torch.ones(2, num_in) * torch.tensor([[1.0], [-1.0]])
    expected = torch.tensor([[127.0, -128.0, 63.5]]) * num_in
    product = PackedIntegers(weight, None).product(x, with_bias=False)
    torch.testing.assert_close(product, torch.cat([expected, -expected]))


@pytest.mark.parametrize(("num_in", "num_groups"), [(48, 2), (64, 8), (96, 4), (100, 3)])
def test_groups_that_have_no_kernel(num_in: int, num_groups: int) -> None:
    message = f"its rows of {num_in} weights have {num_groups} groups, which must have 16 weights or a multiple of 32"
    with pytest.raises(ValueError, match=message):
        IntegerWeight(8, torch.zeros(1, num_in, dtype=torch.int8), torch.ones(1, num_groups))


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_activation_rounds_its_own_block_alone(kind: str) -> None:
    """What the other blocks contribute has the accuracy that it has without the large value."""
    weight = drawn(kind, 100, 256)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(4))
    x[:, 64:96] = 0
    large = torch.zeros_like(x)
    large[:, 70] = 2.0**15  # it is a 127th times 127, exactly
    packed = PackedIntegers(weight, None)
    others = packed.product(x + large, with_bias=False).double() - (large @ weight.dense().T).double()
    # float32 rounds sums to a part of the largest term: of a weight's value times its scale, or of its minimum
    minimums = torch.zeros_like(weight.scales) if weight.minimums is None else weight.minimums
    terms = weight.dense().abs() + 2 * minimums.abs().repeat_interleave(weight.group, 1)
    tolerance = 2.0**-19 * (large @ terms.T)
    assert ((others - packed.product(x, with_bias=False)).abs() <= tolerance).all()


@pytest.mark.usefixtures("code")
def test_odd_rows() -> None:
    """Without a finite largest value a row has no result; other rows are not concerned."""
    weight = drawn("8 bits", 33, 67)
    x = torch.randn(6, 67, generator=torch.Generator().manual_seed(2))
    x[1, 3], x[2, 3], x[2, 40], x[3] = torch.nan, torch.inf, -torch.inf, 0
    x[4] *= 1e-33
    got = PackedIntegers(weight, None).product(x, with_bias=False)
    assert got[1:3].isnan().all() and (got[3:5] == 0).all()
    assert torch.equal(got[[0, 5]], plain_product(x[[0, 5]], weight, None))
    assert torch.equal(got.nan_to_num(9.0), plain_product(x, weight, None).nan_to_num(9.0))


def test_rounding_is_to_the_nearest_part_of_the_largest_of_a_block() -> None:
    x = rows_of(16, 72, torch.float32)
    values, scales = round_blocks(x)
    blocks = functional.pad(x, (0, 24)).unflatten(1, (-1, BLOCK))
    assert (values.abs().amax(2) == 127).all() and (values[:, 2, 8:] == 0).all()
    assert ((values * scales[:, :, None] - blocks).abs() <= 0.5001 * scales[:, :, None]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_is_near_that_of_the_dense_weight(kind: str) -> None:
    weight = drawn(kind, 100, 256)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3))
    expected = x @ weight.dense().T
    got = plain_product(x, weight, None)
    # per output: a large one hides no small one
    assert ((got - expected).square().mean(0).sqrt() <= 0.02 * expected.square().mean(0).sqrt()).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="counts what x86 stores")
@pytest.mark.parametrize("values", [[0, 1, 2, 3, 4, 5, 6, 7], [-127, 1, 2, 3, 4, 5, 6, 127]], ids=["narrow", "wide"])
def test_a_word_is_stored_per_row_of_a_panel(values: list[int]) -> None:
    """Without what is added to all weights of the panel, which depends on their span and on the processor."""
    weight = IntegerWeight(8, torch.tensor([values], dtype=torch.int8), torch.ones(1, 1))
    matrix = PackedIntegers(weight, None)
    least = int(matrix.of_panels[0].view(torch.int8)[0])
    panel = integer._load(torch.float32).outputs_of_a_panel()
    words = matrix.packed.view(torch.uint8)[-8 * panel * 4 :].view(8, panel, 4)  # a whole block, after the scales
    stored = [(value - least) % 256 for value in values]
    assert words[:2, 0].tolist() == [stored[:4], stored[4:]]
    assert (words[:, 1:] == -least % 256).all() and (words[2:] == -least % 256).all()


def test_two_threads_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = drawn("4 bits, groups of 32", 600, 512), rows_of(9, 512, torch.bfloat16)
    packed = PackedIntegers(weight, None)
    one = packed.product(x, with_bias=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(packed.product(x, with_bias=False), one)
    assert torch.equal(packed.product(x[:1], with_bias=False), one[:1])


def test_matrix_is_laid_out_as_in_c() -> None:
    assert ctypes.sizeof(integer._Matrix) == 10 * 8
