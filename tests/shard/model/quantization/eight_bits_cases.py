"""The kernel for weights in eight bits against the reference. test_eight_bits.py runs these cases in a process of its
own, on CUDA or, with TRITON_INTERPRET=1, on CPU.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from lorikeet.shard.model.kernels import eight_bits_triton as kernel
from lorikeet.shard.model.quantization import matrices
from lorikeet.shard.model.quantization.matrices import Float8Matrix
from lorikeet.shard.system import comparison, gpu
from tests.shard.near import worst_share_of_product

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
FP8, INT8 = torch.float8_e4m3fn, torch.int8
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


def drawn(
    rows: int, num_in: int, num_out: int, dtype: torch.dtype, kind: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, scales, bias."""
    generator = torch.Generator().manual_seed(num_in)
    x = torch.randn(rows, num_in, generator=generator).to(dtype)
    weight = 100 * torch.randn(num_out, num_in, generator=generator)
    weight = weight.clamp(-127, 127).round().to(INT8) if kind == INT8 else weight.clamp(-448, 448).to(FP8)
    scales = torch.rand(num_out, generator=generator) / num_in
    bias = torch.randn(num_out, generator=generator).to(dtype)
    return x.to(DEVICE), weight.to(DEVICE), scales.to(DEVICE), bias.to(DEVICE)


@pytest.mark.parametrize("kind", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 128, 32), (3, 200, 50), (17, 96, 33), (2, 4096, 1024)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_dequantised_weight(
    shape: tuple[int, int, int], dtype: torch.dtype, kind: torch.dtype, has_bias: bool
) -> None:
    x, weight, scales, bias = drawn(*shape, dtype, kind)
    dense = weight.double() * scales.double()[:, None]
    expected = x.double() @ dense.t()
    if has_bias:
        expected += bias.double()
    actual = kernel.multiply(x, weight, scales, bias if has_bias else None)
    assert actual.dtype == dtype and actual.shape == expected.shape
    assert worst_share_of_product(actual, expected, x, dense) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", [FP8, INT8], ids=["fp8", "int8"])
def test_a_row_has_equal_bits_in_any_batch(kind: torch.dtype) -> None:
    x, weight, scales, _ = drawn(40, 160, 40, torch.bfloat16, kind)
    together = kernel.multiply(x, weight, scales, None)
    for rows in (slice(0, 1), slice(5, 9), slice(13, 38)):
        assert torch.equal(kernel.multiply(x[rows], weight, scales, None), together[rows])
    assert torch.equal(kernel.multiply(x.flip(0), weight, scales, None), together.flip(0))


def test_rows_may_be_columns_of_another_matrix() -> None:
    x, weight, scales, _ = drawn(4, 96, 40, torch.bfloat16, INT8)
    wide = torch.cat([x, x], dim=1)
    assert torch.equal(kernel.multiply(wide[:, :96], weight, scales, None), kernel.multiply(x, weight, scales, None))


def test_what_the_kernel_does_not_compute() -> None:
    x, weight, _, _ = drawn(kernel.MOST_ROWS, 96, 40, torch.bfloat16, FP8)
    assert kernel.supports(x, weight) and not kernel.supports(torch.cat([x, x]), weight)
    assert not kernel.supports(x.float(), weight) and not kernel.supports(x, weight.t())
    assert kernel.supports(x, weight.view(INT8)) and not kernel.supports(x, weight.view(torch.uint8))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("capability", [(8, 6), (8, 9)], ids=str)
def test_every_byte_of_fp8_has_its_value(capability: tuple[int, int], dtype: torch.dtype) -> None:
    """One product for each, on devices that convert FP8 and on those that do not."""
    weight = torch.arange(256, dtype=torch.uint8).view(FP8)
    weight = weight[~weight.float().isnan()].view(-1, 1)
    x, scales = torch.ones(1, 1, dtype=dtype, device=DEVICE), torch.ones(len(weight), device=DEVICE)
    with gpu.assumed(capability):
        actual = kernel.multiply(x, weight.to(DEVICE), scales, None)
    assert torch.equal(actual.float().cpu(), weight.float().t())


def test_a_matrix_in_fp8_multiplies_few_rows_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, scales, bias = drawn(5, 96, 40, torch.bfloat16, FP8)
    held = SimpleNamespace(qdata=weight, scale=scales[:, None], device=SimpleNamespace(type="cuda"))
    module = SimpleNamespace(in_features=96, out_features=40, bias=bias, weight=SimpleNamespace(detach=lambda: held))
    matrix = Float8Matrix(module, torch.bfloat16)
    monkeypatch.setattr(gpu, "has_triton", lambda device: True)
    asked = SimpleNamespace(reshape=x.reshape, shape=x.shape, device=SimpleNamespace(type="cuda"))
    assert torch.equal(matrix.product(asked, bias), kernel.multiply(x, weight, scales, bias))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_bias", [False, True])
def test_prompts_are_multiplied_by_the_weight_of_decoding(
    dtype: torch.dtype, kind: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "has_triton", lambda device: True)
    x, weight, scales, bias = drawn(kernel.MOST_ROWS, 192, 40, dtype, kind)
    added = bias if has_bias else None
    few = matrices._product_8bit(x, weight, scales, added)
    many = matrices._product_8bit(torch.cat([x, x[:1]]), weight, scales, added)[: kernel.MOST_ROWS]
    assert torch.equal(few, kernel.multiply(x, weight, scales, added))
    assert float(comparison.of_sums(few, many, 192).max()) <= 1
