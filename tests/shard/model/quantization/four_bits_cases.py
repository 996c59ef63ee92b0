"""The kernel for weights in four bits against the reference. test_eight_bits.py runs these cases in a process of its
own, on CUDA or, with TRITON_INTERPRET=1, on CPU.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorikeet.shard.model.kernels import four_bits_triton as kernel
from lorikeet.shard.model.quantization.matrices import GROUP, GroupedMatrix
from lorikeet.shard.system import gpu
from tests.shard.near import worst_share_of_product

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


class Held:
    """A layer in hqq's layout: [out, in] numbers below 16, of which a byte has two half of the outputs apart."""

    def __init__(self, num_in: int, num_out: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(num_in)
        self.in_features, self.out_features, self.dtype = num_in, num_out, dtype
        quarters = torch.randint(0, 16, (num_out * num_in // GROUP, GROUP), generator=generator).to(DEVICE, torch.uint8)
        self._quarters, half = quarters, len(quarters) // 2
        self.W_q = (quarters[:half] << 4) | quarters[half:]
        zero = 15 * torch.rand(len(quarters), 1, generator=generator)
        scale = torch.rand(len(quarters), 1, generator=generator) / num_in
        self.bias = torch.randn(num_out, generator=generator).to(DEVICE, dtype)
        self.meta: dict[str, Any] = {
            "packing": "4bit_u8", "axis": 1, "group_size": GROUP, "shape": (num_out, num_in),
            "zero": zero.to(DEVICE, dtype), "scale": scale.to(DEVICE, dtype),
        }  # fmt: skip

    def dequantize(self) -> torch.Tensor:
        shifted = self._quarters.to(self.dtype) - self.meta["zero"]
        return (shifted * self.meta["scale"]).view(self.meta["shape"])


def multiplied(held: Held, x: torch.Tensor, has_bias: bool = True) -> torch.Tensor:
    zeros, scales = (held.meta[name].view(held.out_features, -1) for name in ("zero", "scale"))
    weight = held.W_q.view(held.out_features // 2, -1)
    return kernel.multiply(x, weight, zeros, scales, held.bias if has_bias else None)


def rows_of(count: int, held: Held) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, held.in_features, generator=generator).to(DEVICE, held.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 64, 32), (3, 192, 50), (17, 128, 130), (2, 4096, 1024)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_dequantised_weight(
    shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool
) -> None:
    num_rows, *sizes = shape
    held = Held(*sizes, dtype)
    x = rows_of(num_rows, held)
    expected = x.double() @ held.dequantize().double().t() + (held.bias.double() if has_bias else 0)
    actual = multiplied(held, x, has_bias)
    assert actual.dtype == dtype and actual.shape == expected.shape
    assert worst_share_of_product(actual, expected, x, held.dequantize()) <= TOLERANCE[dtype]


def test_a_row_has_equal_bits_in_any_batch() -> None:
    held = Held(128, 80, torch.bfloat16)
    x = rows_of(40, held)
    together = multiplied(held, x)
    for rows in (slice(0, 1), slice(5, 9), slice(13, 38)):
        assert torch.equal(multiplied(held, x[rows]), together[rows])


def test_a_matrix_of_hqq_multiplies_few_rows_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_triton", lambda device: True)
    held = Held(128, 40, torch.bfloat16)
    matrix = GroupedMatrix(held, torch.bfloat16)
    x = rows_of(5, held)
    assert torch.equal(matrix.product(x, held.bias), multiplied(held, x)) and matrix.reads_few_bytes(DEVICE)
    for name, other in (("axis", 0), ("packing", "2bit_u8"), ("group_size", 32)):
        monkeypatch.setitem(held.meta, name, other)
        assert not matrix.reads_few_bytes(DEVICE), name
        monkeypatch.undo()
        monkeypatch.setattr(gpu, "has_triton", lambda device: True)
    many = SimpleNamespace(shape=(kernel.MOST_ROWS + 1, 128), dtype=torch.bfloat16)
    assert not kernel.supports(many)  # type: ignore[arg-type]
