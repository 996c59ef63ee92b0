"""What a step takes from the device, by one launch each: tokens, and the numbers of accepted drafts. The specifications
are in device_tokens.py and in `Moves` of inputs.py.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

from lorikeet.shard.system.operators import operator

BLOCK = 128
"""Tokens, or numbers, of a program."""


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


@triton.jit(do_not_specialize=["num_moved"])
def move_numbers(numbers, table, accepted, num_moved, CHOOSES: tl.constexpr, BLOCK: tl.constexpr):
    """numbers[places[i]] += accepted[rows[i]], or with CHOOSES the choice of that index."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_moved = at < num_moved
    place = tl.load(table + at, mask=is_moved, other=0)
    row = tl.load(table + num_moved + at, mask=is_moved, other=0)
    num_accepted = tl.load(accepted + row, mask=is_moved, other=0)
    if CHOOSES:
        moved = tl.load(table + (2 + num_accepted) * num_moved + at, mask=is_moved, other=0)
    else:
        moved = tl.load(numbers + place, mask=is_moved, other=0) + num_accepted
    tl.store(numbers + place, moved, mask=is_moved)


def move(numbers: torch.Tensor, table: torch.Tensor, num_accepted: torch.Tensor, num_moved: int, chooses: bool) -> None:
    """numbers: changed in place; table: [(2 + choices) * num_moved] int64 places, rows and choices.

    num_accepted: [rows] int64.
    """
    grid = (triton.cdiv(num_moved, BLOCK),)
    move_numbers[grid](numbers, table, num_accepted, num_moved, CHOOSES=chooses, BLOCK=BLOCK)
