"""Masks of logits on CUDA: one kernel for all constrained rows of a step. The specification is in masks.py."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernel's text, annotations too)

import torch
import triton
import triton.language as tl

WIDTH = 4096
"""Tokens of one program."""


@triton.jit(do_not_specialize=["vocab_size"])
def mask_tokens(logits, packed, vocab_size, logits_stride, packed_stride, WIDTH: tl.constexpr):
    """Tokens whose bit is not set become -inf. A row of `packed` is the row of the logits, then 32 tokens per word."""
    packed += tl.program_id(0) * packed_stride
    row = tl.load(packed).to(tl.int64)
    tokens = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    words = tl.load(packed + 1 + tokens // 32, mask=tokens < vocab_size, other=-1)
    is_refused = ((words >> (tokens % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + tokens, float("-inf"), mask=is_refused & (tokens < vocab_size))


def mask_rows(logits: torch.Tensor, packed: torch.Tensor) -> None:
    """logits: [S, V], changed in place. packed: [n, 1 + words] int32."""
    grid = (packed.shape[0], triton.cdiv(logits.shape[1], WIDTH))
    mask_tokens[grid](logits, packed, logits.shape[1], logits.stride(0), packed.stride(0), WIDTH)
