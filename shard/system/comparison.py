"""How far two computations of the same values are apart: element by element, so that no large value hides a small one.

A difference counts against the element itself, and in sums, which may cancel, against the size of their channel too:
the elements of one output over all rows. Rows must be of similar size.
"""

import torch
from torch import Tensor

LARGEST = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2.0**-16}
"""The most that another order of roundings to the format may change an element: two roundings of either side."""
MEAN = {torch.bfloat16: 2.0**-12, torch.float16: 2.0**-15, torch.float32: 2.0**-18}
"""The most that it may change all elements on average, where both round the same intermediate values: few elements
round to another value.
"""


def relative(expected: Tensor, actual: Tensor) -> Tensor:
    """Differences as shares of the elements themselves, for outputs of one product each: [...] float32 of the inputs'
    shape. Infinite where only one is finite or not a number.
    """
    return _shares(expected, actual, torch.zeros_like(expected[..., :1], dtype=torch.float32))


def per_channel(expected: Tensor, actual: Tensor) -> Tensor:
    """Differences as shares of the elements plus the root mean square of their channel, the last axis, over all rows:
    [...] float32 of the inputs' shape. Infinite where only one is finite or not a number.
    """
    return _shares(expected, actual, channel_sizes(expected))


def of_sums(expected: Tensor, actual: Tensor, num_terms: int, rounds_parts: bool = False) -> Tensor:
    """Differences of sums of as many products of the same values, as shares of what another order of the sum in float32
    and one rounding of either side may change: [rows, C] float32, above 1 where the values are others. rounds_parts:
    parts of a sum are rounded too.
    """
    finfo = torch.finfo(expected.dtype)
    sizes = torch.maximum(expected.float().abs(), actual.float().abs())
    of_channels = num_terms * 2.0**-24 + (finfo.eps if rounds_parts else 0.0)
    allowed = finfo.eps * sizes + of_channels * channel_sizes(expected) + finfo.smallest_normal
    shares = (expected.float() - actual.float()).abs() / allowed
    equal = (expected == actual) | (expected.isnan() & actual.isnan())
    return torch.where(equal, 0.0, torch.where(shares.isfinite(), shares, float("inf")))


def channel_sizes(x: Tensor) -> Tensor:
    """x: [..., C]. Returns [C] float32, the root mean square of each channel."""
    return x.float().reshape(-1, x.shape[-1]).square().mean(0).sqrt()


def sizes_in_rows(x: Tensor) -> Tensor:
    """x: [..., C], of too few rows for the sizes of channels. Returns [..., C] float32, each element's size plus the
    median size of its row.
    """
    sizes = x.float().abs()
    return sizes + sizes.median(-1, keepdim=True).values.clamp(min=torch.finfo(torch.float32).tiny)


def is_near(shares: Tensor, dtype: torch.dtype) -> bool:
    """Whether no difference exceeds what another order of roundings to `dtype` may change."""
    return bool((shares <= LARGEST[dtype]).all())


def has_same_roundings(shares: Tensor, dtype: torch.dtype) -> bool:
    """`is_near`, and whether both round the same intermediate values."""
    return is_near(shares, dtype) and bool(shares.mean() <= MEAN[dtype])


def _shares(expected: Tensor, actual: Tensor, channels: Tensor) -> Tensor:
    """channels: [C], added to the size of each element, which is at least the smallest that rounds in proportion."""
    sizes = channels + expected.float().abs().clamp(min=torch.finfo(expected.dtype).tiny)
    shares = (expected.float() - actual.float()).abs() / sizes
    equal = (expected == actual) | (expected.isnan() & actual.isnan())
    return torch.where(equal, 0.0, torch.where(shares.isfinite(), shares, float("inf")))
