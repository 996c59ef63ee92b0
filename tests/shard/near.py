"""How far results are from what is expected, element by element."""

import torch

from lorikeet.shard.system import comparison

ENOUGH_ROWS = 8
"""Rows from which on the size of a channel is known."""


def worst_share(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of its element and of its channel's size, the last axis; with few rows of the
    row's median instead. actual, expected: [..., C].
    """
    assert actual.shape == expected.shape
    if expected[..., 0].numel() >= ENOUGH_ROWS:
        return float(comparison.per_channel(expected, actual).max())
    return float(((actual.float() - expected.float()).abs() / comparison.sizes_in_rows(expected)).max())


def worst_share_of_product(
    actual: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> float:
    """The same of `x weightᵀ`, against the element and the root of its squared terms. x: [n, in]; weight: [out, in]."""
    assert actual.shape == expected.shape
    sizes = (x.double().square() @ weight.double().square().t()).sqrt()
    return float(((actual.double() - expected.double()).abs() / (expected.double().abs() + sizes)).max())
