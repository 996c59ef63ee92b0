"""Weights in 8 and 4 bits on devices against the reference. test_eight_bits.py runs these cases in a process of its
own, on CUDA or, with TRITON_INTERPRET=1, on CPU.
"""

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from lorikeet.shard.model.kernels import device_integers, integers_triton
from lorikeet.shard.model.kernels.device_integers import DeviceIntegers, split_scales
from lorikeet.shard.model.kernels.integer import IntegerWeight
from lorikeet.shard.model.kernels.integers_triton import MOST_ROWS
from lorikeet.shard.model.quantization.integers import IntegerLinear, IntegerMatrix
from lorikeet.shard.model.quantization.layers import check_batch_invariance
from lorikeet.shard.system import comparison, gpu
from tests.shard.near import worst_share_of_product

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def _has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_triton", lambda device: True)


def drawn(num_in: int, num_out: int, bits: int, group: int, has_minimums: bool) -> IntegerWeight:
    generator = torch.Generator().manual_seed(num_in + group)
    low, high, kind = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    values = torch.randint(low, high, (num_out, num_in), generator=generator).to(DEVICE, kind)
    # products are about one, which float16 holds in full
    scales = ((1 + torch.rand(num_out, num_in // group, generator=generator)) / (num_in**0.5 * 2**bits)).to(DEVICE)
    minimums = -scales * torch.randint(0, 16, scales.shape, generator=generator).to(DEVICE) if has_minimums else None
    return IntegerWeight(bits, values, scales, minimums)


def rows_of(count: int, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, num_in, generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)


def dequantised(weight: IntegerWeight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] the weight that products of few rows have: in groups it is rounded to `dtype`."""
    is_rounded = weight.bits == 4 or weight.scales.shape[1] > 1
    return (weight.dense().to(dtype) if is_rounded else weight.dense()).double()


KINDS = [(8, 192, False), (8, 32, True), (8, 16, False), (4, 96, True), (4, 64, False), (4, 32, True), (4, 16, False)]
"""Bits, group, minimums; 192 inputs."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("bits", "group", "has_minimums"), KINDS)
@pytest.mark.parametrize("num_out", [33, 130])
def test_products_are_those_of_the_dequantised_weight(
    num_out: int, bits: int, group: int, has_minimums: bool, dtype: torch.dtype
) -> None:
    weight = drawn(192, num_out, bits, group, has_minimums)
    bias = torch.randn(num_out, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    held = DeviceIntegers(weight, bias, dtype)
    assert held.has_kernel
    assert torch.equal(held.dense(torch.float32), weight.dense())
    for count, with_bias in ((1, True), (17, False), (MOST_ROWS + 1, True)):
        x = rows_of(count, 192, dtype)
        dense = dequantised(weight, dtype)
        expected = x.double() @ dense.t() + (bias.double() if with_bias else 0)
        actual = held.product(x, with_bias)
        assert actual.dtype == dtype and actual.shape == expected.shape and actual.is_contiguous()
        assert worst_share_of_product(actual, expected, x, dense) <= TOLERANCE[dtype], count


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("bits", "group", "has_minimums"), [(8, 2048, False), *KINDS])
@pytest.mark.parametrize("has_bias", [False, True])
def test_prompts_are_multiplied_by_the_weight_of_decoding(
    bits: int, group: int, has_minimums: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    """They differ by the roundings of their own sums, not by those of weights."""
    num_in = max(group, 192)
    bias = torch.randn(80, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype) if has_bias else None
    held, x = (
        DeviceIntegers(drawn(num_in, 80, bits, group, has_minimums), bias, dtype),
        rows_of(MOST_ROWS, num_in, dtype),
    )
    few = held.product(x, has_bias)
    many = held.product(torch.cat([x, x[:1]]), has_bias)[:MOST_ROWS]
    assert float(comparison.of_sums(few, many, num_in).max()) <= 1


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float32])
def test_scales_are_split_without_loss(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn_scales = 10.0 ** (-12 * torch.rand(1, 500, generator=generator) + 4)
    scales = torch.cat([drawn_scales, torch.tensor([[0.0, 1.0, 2.0**-24, 2.0**-30]])], 1)
    powers, factors = split_scales(scales, dtype)
    assert torch.equal(powers[0] * factors, scales[0])
    values = torch.arange(-127, 128)[:, None] * powers
    assert torch.equal(values.to(dtype).float(), values)
    is_usual = (scales[0] >= 2.0**-24) & (scales[0] < 2)
    assert bool(((factors >= 1) & (factors < 2))[is_usual].all())


def test_other_weights_for_prompts_are_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight rounded to the dtype of activations, as it would be if a prompt were multiplied by it."""
    monkeypatch.setattr(IntegerLinear, "is_on_device", True)
    monkeypatch.setattr(device_integers, "split_scales", lambda scales, dtype: (scales, torch.ones_like(scales[0])))
    matrix = IntegerMatrix(IntegerLinear(drawn(192, 40, 8, 192, False), None, False, DTYPE), DTYPE)
    matrix.copy_from_mmap()
    with pytest.raises(ValueError, match="products of 65 rows differ from those of two rows by"):
        check_batch_invariance([matrix], DEVICE)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_product_of_a_real_size(bits: int, dtype: torch.dtype) -> None:
    weight = drawn(4096, 1024, bits, 4096 if bits == 8 else 128, False)
    x = rows_of(2, 4096, dtype)
    dense = dequantised(weight, dtype)
    actual = DeviceIntegers(weight, None, dtype).product(x, with_bias=False)
    assert worst_share_of_product(actual, x.double() @ dense.t(), x, dense) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("bits", "group", "has_minimums"), KINDS)
def test_a_row_has_equal_bits_in_any_batch(bits: int, group: int, has_minimums: bool) -> None:
    held, x = DeviceIntegers(drawn(192, 80, bits, group, has_minimums), None, DTYPE), rows_of(40, 192, torch.bfloat16)
    together = held.product(x, with_bias=False)
    for rows in (slice(0, 1), slice(5, 9), slice(13, 38)):
        assert torch.equal(held.product(x[rows], with_bias=False), together[rows])


def test_neither_tiles_nor_splits_change_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits, group in ((4, 128), (8, 2048)):
        weight = drawn(2048, 80, bits, group, False)
        held, x = DeviceIntegers(weight, None, DTYPE), rows_of(MOST_ROWS, 2048, DTYPE)
        num_blocks = held.words.shape[0]
        assert integers_triton.num_splits_of(num_blocks, 80, bits) == 2
        together = held.product(x, with_bias=False)
        for rows in (slice(0, 1), slice(3, 11), slice(20, 36)):
            assert torch.equal(held.product(x[rows], with_bias=False), together[rows]), (bits, rows)
        monkeypatch.setattr(integers_triton, "LEAST_WIDE", 1)
        assert integers_triton.tile_of(MOST_ROWS, 80, 2, bits, DEVICE) == integers_triton.WIDE
        assert torch.equal(held.product(x, with_bias=False), together)
        with gpu.assumed((7, 5)):  # several tiles of rows
            assert torch.equal(held.product(x, with_bias=False), together)
        monkeypatch.undo()
        monkeypatch.setattr(gpu, "has_triton", lambda device: True)
        assert not held._counters.any()


def test_parts_of_the_inputs_depend_on_the_shape_of_a_weight_alone() -> None:
    """4096 inputs are 32 blocks, 14336 are 112; enough programs for a card, and few parts to sum."""
    outputs = 1024, 4096, 6144, 28672, 128256
    assert [integers_triton.num_splits_of(32, size, 4) for size in outputs] == [4, 4, 4, 1, 1]
    assert [integers_triton.num_splits_of(112, size, bits) for size in (4096, 28672) for bits in (4, 8)] == [8, 4, 1, 1]
    assert integers_triton.num_splits_of(1, 16, 4) == 1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("bits", "group", "has_minimums"), [(4, 96, True), (4, 64, False), (4, 16, False), (8, 32, False)]
)
def test_scales_that_are_numbers_of_the_dtype_need_no_float32(
    bits: int, group: int, has_minimums: bool, dtype: torch.dtype
) -> None:
    plain = drawn(192, 40, bits, group, has_minimums)
    scales = (plain.scales * 64).to(dtype).float()
    weight = replace(plain, scales=scales, minimums=-2 * scales if has_minimums else None)
    held, x = DeviceIntegers(weight, None, dtype), rows_of(3, 192, dtype)
    assert held.is_exact and not DeviceIntegers(plain, None, dtype).is_exact
    assert torch.equal(held.dense(dtype), weight.dense().to(dtype))
    expected = x.double() @ dequantised(weight, dtype).t()
    assert float((held.product(x, False).double() - expected).abs().max()) <= TOLERANCE[dtype] * float(
        expected.abs().max()
    )


def test_extreme_scales_are_decoded_in_float32() -> None:
    for scale in (2.0**10, 2.0**-100):
        plain = drawn(64, 40, 4, 32, False)
        weight = replace(plain, scales=torch.full_like(plain.scales, scale))
        held = DeviceIntegers(weight, None, DTYPE)
        assert not held.is_exact and torch.equal(held.dense(DTYPE), weight.dense().to(DTYPE))


def test_every_kernel_is_compiled_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IntegerLinear, "is_on_device", True)
    bias = torch.randn(40, generator=torch.Generator().manual_seed(1)).to(DEVICE, DTYPE)
    matrix = IntegerMatrix(IntegerLinear(drawn(128, 40, 4, 32, False), bias, False, DTYPE), DTYPE)
    matrix.copy_from_mmap()
    launched = Counter[tuple[object, ...]]()
    for name in ("multiply_integers", "dequantise_integers"):
        kernel = getattr(integers_triton, name)

        class Recorded:
            def __init__(self, name: str, kernel: Any) -> None:
                self.name, self.kernel = name, kernel

            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                def launch(*args: Any, **named: Any) -> None:
                    launched[self.name, named.get("ROWS"), named.get("HAS_BIAS")] += 1
                    self.kernel[grid](*args, **named)

                return launch

        monkeypatch.setattr(integers_triton, name, Recorded(name, kernel))
    check_batch_invariance([matrix], DEVICE)
    rows = {tile.rows for tile in integers_triton.TILES[4]}
    products = {("multiply_integers", count, has) for count in rows for has in (False, True)}
    assert set(launched) == products | {("dequantise_integers", None, None)}


def test_many_rows_dequantise_a_chunk_of_the_outputs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = drawn(64, 80, 4, 32, True), rows_of(MOST_ROWS + 1, 64, torch.bfloat16)
    bias = torch.randn(80, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    whole = DeviceIntegers(weight, bias, DTYPE).product(x, with_bias=True)
    monkeypatch.setattr(device_integers, "CHUNK_ELEMENTS", 64 * 33)
    assert len(DeviceIntegers(weight, bias, DTYPE)._chunks()) == 3
    assert torch.equal(DeviceIntegers(weight, bias, DTYPE).product(x, with_bias=True), whole)


@pytest.mark.parametrize(("bits", "has_minimums"), [(4, False), (8, True), (8, False)])
def test_one_group_may_have_any_length(bits: int, has_minimums: bool) -> None:
    weight, x = drawn(24, 80, bits, 24, has_minimums), rows_of(3, 24, torch.bfloat16)
    held = DeviceIntegers(weight, None, DTYPE)
    assert held.has_kernel and torch.equal(held.dense(torch.float32), weight.dense())
    expected = x.double() @ dequantised(weight, torch.bfloat16).t()
    actual = held.product(x, with_bias=False)
    assert float((actual.double() - expected).abs().max()) <= TOLERANCE[torch.bfloat16] * float(expected.abs().max())


def test_float32_is_dequantised() -> None:
    weight, x = drawn(64, 80, 4, 32, False), rows_of(3, 64, torch.float32)
    held = DeviceIntegers(weight, None, torch.float32)
    assert not held.has_kernel
    assert torch.allclose(held.product(x, with_bias=False), x @ weight.dense().t(), atol=1e-6)


def test_a_rounded_layer_multiplies_few_rows_by_its_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IntegerLinear, "is_on_device", True)
    weight, x = drawn(128, 40, 4, 32, False), rows_of(5, 128, torch.bfloat16)
    layer = IntegerLinear(weight, None, False, torch.bfloat16)
    matrix = IntegerMatrix(layer, torch.bfloat16)
    matrix.copy_from_mmap()
    expected = DeviceIntegers(weight, None, DTYPE).product(x, with_bias=False)
    assert torch.equal(matrix(x), expected) and torch.equal(layer(x[None]), expected[None])
    assert matrix.reads_few_bytes(DEVICE) and matrix.nbytes == 128 * 40 // 2 + 4 * 40 * 4
    assert torch.equal(matrix.dense(), weight.dense().bfloat16())
