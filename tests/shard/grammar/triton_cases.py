"""The kernel of masks against plain torch and numpy: run by test_triton.py in a process of its own, on CUDA or, with
TRITON_INTERPRET=1, on CPU.
"""

import os

import numpy as np
import pytest
import torch

from lorikeet.shard.grammar import masks, triton

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 257, 5000, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [[0], [6, 2, 3], list(range(7))], ids=["first", "some", "all"])
def test_the_kernel_masks_like_the_specification(vocab_size: int, dtype: torch.dtype, rows: list[int]) -> None:
    draw = np.random.default_rng(vocab_size)
    num_words = -(-vocab_size // 32)
    bitmask = draw.integers(-(2**31), 2**31, (len(rows), num_words), dtype=np.int64).astype(np.int32)
    bitmask[-1] = -1 if len(rows) > 1 else 0
    # [7, V], rows apart as those of a larger tensor are
    logits = torch.from_numpy(draw.standard_normal((7, vocab_size + 3))).to(DEVICE, dtype)[:, :vocab_size]
    packed = torch.from_numpy(np.concatenate((np.array(rows, dtype=np.int32)[:, None], bitmask), axis=1)).to(DEVICE)
    plain, found = logits.clone(), logits.clone()
    masks.mask_rows(plain, packed)
    triton.mask_rows(found, packed)
    assert torch.equal(found, plain)
    bits = np.unpackbits(bitmask.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    expected = logits.cpu().clone()
    expected[rows] = expected[rows].masked_fill(torch.from_numpy(bits) == 0, float("-inf"))
    assert torch.equal(found.cpu(), expected)
