"""No large value hides a difference of a small one, and another order of roundings counts as none."""

import pytest
import torch

from lorikeet.shard.system import comparison

DTYPES = pytest.mark.parametrize("dtype", comparison.LARGEST, ids=str)
SIZES = torch.logspace(-2, 3, 48)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@DTYPES
@pytest.mark.parametrize("channel", [0, 20, 47])
def test_every_channel_counts(channel: int, dtype: torch.dtype) -> None:
    expected = drawn(32, 48) * SIZES
    other = expected.clone()
    other[:, channel] *= 1.1
    for compare in (comparison.relative, comparison.per_channel):
        assert comparison.is_near(compare(expected.to(dtype), expected.to(dtype)), dtype)
        shares = compare(expected.to(dtype), other.to(dtype))
        assert not comparison.is_near(shares, dtype) and not comparison.has_same_roundings(shares, dtype)
        assert set(shares.nonzero()[:, 1].tolist()) == {channel}


@DTYPES
def test_one_element_counts_if_it_is_small(dtype: torch.dtype) -> None:
    expected = drawn(32, 48) * SIZES
    expected[3, 5] = 1e-3
    other = expected.clone()
    other[3, 5] = 1.2e-3
    assert not comparison.is_near(comparison.relative(expected.to(dtype), other.to(dtype)), dtype)


@DTYPES
def test_products_of_another_order_of_sums_are_near(dtype: torch.dtype) -> None:
    """But not products without one of the terms."""
    x, weight = drawn(32, 700).to(dtype), (drawn(48, 700, seed=1) * SIZES[:, None]).to(dtype)
    exact = (x.double() @ weight.double().T).to(dtype)
    halves = (x.float()[:, :350] @ weight.float()[:, :350].T) + (x.float()[:, 350:] @ weight.float()[:, 350:].T)
    assert comparison.is_near(comparison.per_channel(exact, halves.to(dtype)), dtype)
    missing = exact.double() - x[:, :1].double() * weight[:, :1].double().T
    assert not comparison.is_near(comparison.per_channel(exact, missing.to(dtype)), dtype)


def test_values_that_are_not_finite_equal_only_themselves() -> None:
    infinite, nan = float("inf"), float("nan")
    expected = torch.tensor([[infinite, -infinite, nan, 1.0, 0.0]])
    for compare in (comparison.relative, comparison.per_channel):
        assert compare(expected, expected).tolist() == [[0.0] * 5]
    actual = torch.tensor([[-infinite, 1.0, 1.0, nan, 1e-3]])
    assert not any(comparison.relative(expected, actual)[0] <= 1.0)


def test_numbers_too_small_to_round_in_proportion_may_differ_by_their_unit() -> None:
    smallest = torch.tensor([[torch.finfo(torch.float16).smallest_normal]], dtype=torch.float16)
    unit = torch.tensor([[2.0**-24]], dtype=torch.float16)
    assert comparison.is_near(comparison.relative(unit, 2 * unit), torch.float16)
    assert not comparison.is_near(comparison.relative(smallest, 2 * smallest), torch.float16)
