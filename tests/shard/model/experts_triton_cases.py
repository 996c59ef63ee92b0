"""The kernels for experts on devices against their specification: run by test_experts_triton.py in a process of its
own, on CUDA or, with TRITON_INTERPRET=1, on CPU.
"""

import os

import pytest
import torch

from shard.model.expert_pairs import SortedPairs, sort_pairs
from shard.model.grouped import multiply_plainly
from shard.model.grouped_triton import multiply_tiles

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).to(DEVICE, dtype)


def pairs_of(*counts: int) -> SortedPairs:
    """So many pairs of each expert, one expert per token."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(DEVICE)
    return sort_pairs(ids[:, None], len(counts))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("counts", "shape", "dtype"),
    [
        ((3, 0, 19), (33, 37), torch.float32),
        ((1, 2, 0, 1), (96, 130), torch.bfloat16),
        ((70, 1), (48, 24), torch.float16),
        ((0, 20, 16), (144, 64), torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_products_equal_the_specification(
    counts: tuple[int, ...], shape: tuple[int, int], dtype: torch.dtype, is_transposed: bool
) -> None:
    pairs, (num_in, num_out) = pairs_of(*counts), shape
    x = random(sum(counts), num_in, dtype=dtype)
    matrices = random(len(counts), num_out, num_in, dtype=dtype).mT / num_in**0.5
    matrices = matrices.contiguous() if is_transposed else matrices
    wanted = multiply_plainly(x, matrices, pairs)
    got = multiply_tiles(x, matrices, pairs)
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_equal_bits_beside_any_others(dtype: torch.dtype) -> None:
    x, matrices = random(18, 70, dtype=dtype), random(3, 70, 40, dtype=dtype)
    together = multiply_tiles(x, matrices, pairs_of(0, 18, 0))
    among = multiply_tiles(torch.cat([x[:3], x[17:], x[:7]]), matrices, pairs_of(3, 1, 7))
    assert torch.equal(among[3], together[17])
