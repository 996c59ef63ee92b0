"""Tokens that only the device knows, by one launch; device_tokens.py has the specification."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

from lorikeet.shard.system.operators import operator

BLOCK = 128
"""Tokens of a program."""


@triton.jit(do_not_specialize=["num_tokens"])
def take_tokens(input_ids, places, tokens, num_tokens, BLOCK: tl.constexpr):
    """input_ids[i] = max(0, tokens[places[i]]), where that is no negative place."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < num_tokens, other=-1)
    is_taken = place >= 0
    token = tl.load(tokens + place, mask=is_taken, other=0)
    tl.store(input_ids + at, tl.maximum(token, 0), mask=is_taken)


@operator("put_device_tokens", mutates_args=("input_ids",))
def put_device_tokens(input_ids: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> None:
    """input_ids: [T] int64, changed in place; places: [T] int32; tokens: [N] int64."""
    num_tokens = input_ids.shape[0]
    take_tokens[(triton.cdiv(num_tokens, BLOCK),)](input_ids, places, tokens, num_tokens, BLOCK=BLOCK)


@put_device_tokens.register_fake
def _(*_args: object) -> None:
    return None
