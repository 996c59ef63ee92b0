"""float32.c: equal to torch, and equal bits whatever other rows there are."""

import pytest
import torch
from torch.nn import functional

from lorikeet.shard.model.kernels import float32
from lorikeet.shard.model.kernels.packing import Float32Matrix
from tests.shard.near import worst_share, worst_share_of_product

pytestmark = pytest.mark.skipif(not float32.available(), reason="needs a C compiler")
SHAPES = ((1, 1), (16, 7), (40, 33), (65, 400), (384, 1536))
"""Outputs and inputs: whole and partial blocks, one pass and several."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_that_of_torch(shape: tuple[int, int], with_bias: bool) -> None:
    num_out, num_in = shape
    x, weight = random(101, num_in), random(num_out, num_in, seed=1)
    bias = random(num_out, seed=2) if with_bias else None
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = Float32Matrix(weight, bias)(x[None])[0]
    assert got.shape == expected.shape
    assert worst_share_of_product(got, expected, x, weight) <= 2**-18


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_other_rows_or_threads(shape: tuple[int, int]) -> None:
    matrix, x = Float32Matrix(random(*shape, seed=1), random(shape[0], seed=2)), random(150, shape[1])
    together, num_threads = matrix(x), torch.get_num_threads()
    for first in (0, 7, 50):
        for count in (*range(15), 48, 49, 97, 100):
            assert torch.equal(matrix(x[first : first + count]), together[first : first + count])
    torch.set_num_threads(3)
    try:
        assert torch.equal(matrix(x), together)
    finally:
        torch.set_num_threads(num_threads)


def test_rows_may_lie_apart() -> None:
    matrix, wide = Float32Matrix(random(70, 32), None), random(9, 64, seed=1)
    assert torch.equal(matrix(wide[:, :32]), matrix(wide[:, :32].contiguous()))
    assert torch.equal(matrix(wide.T[:32].T), matrix(wide[:, :32].contiguous()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_with_a_product_has_the_bits_of_gelu_after_it(shape: tuple[int, int]) -> None:
    matrix, x = Float32Matrix(random(*shape, seed=1), random(shape[0], seed=2)), random(31, shape[1])
    assert torch.equal(matrix.gelu(x), float32.gelu(matrix(x)))


def test_gelu_is_that_of_torch() -> None:
    x = torch.cat([torch.linspace(-12, 12, 10_001), random(7)])
    assert (float32.gelu(x) - functional.gelu(x.double())).abs().max() <= 1e-6
    assert float32.gelu(torch.full((3,), torch.nan)).isnan().all()


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_norm_is_that_of_torch(with_bias: bool) -> None:
    width = 3 * float32.block_size()
    x, added = random(40, width) + 3, random(40, width, seed=1)
    weight, bias = random(width, seed=2), random(width, seed=3) if with_bias else None
    sizes = (width,)
    expected = functional.layer_norm(
        (x + added).double(), sizes, weight.double(), None if bias is None else bias.double()
    )
    got = float32.layer_norm(x, added, weight, bias, 1e-5)
    assert worst_share(got, expected) <= 2**-18
    assert torch.equal(float32.layer_norm(x[5:6], added[5:6], weight, bias, 1e-5), got[5:6])
    assert torch.equal(float32.layer_norm(x + added, None, weight, bias, 1e-5), got)
