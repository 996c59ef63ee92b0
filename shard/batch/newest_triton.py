"""Tokens that only the device knows, by one launch; newest.py has the specification."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

from lorikeet.shard.system.operators import operator

BLOCK = 128
"""Tokens of a program."""


@triton.jit(do_not_specialize=["num_tokens"])
def take_newest(input_ids, token_rows, last_tokens, num_tokens, BLOCK: tl.constexpr):
    """input_ids[token] = last_tokens[token_rows[token]], where that is no negative row."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(token_rows + places, mask=places < num_tokens, other=-1)
    is_newest = rows >= 0
    tl.store(input_ids + places, tl.load(last_tokens + rows, mask=is_newest, other=0), mask=is_newest)


@operator("put_newest_tokens", mutates_args=("input_ids",))
def put_newest_tokens(input_ids: torch.Tensor, token_rows: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """input_ids: [T] int64, changed in place; token_rows: [T] int32; last_tokens: [max_rows] int64."""
    num_tokens = input_ids.shape[0]
    take_newest[(triton.cdiv(num_tokens, BLOCK),)](input_ids, token_rows, last_tokens, num_tokens, BLOCK=BLOCK)


@put_newest_tokens.register_fake
def _(*_args: object) -> None:
    return None
