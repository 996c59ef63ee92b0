"""Moves a step's numbers by accepted drafts, by one launch for each array; inputs.py has the specification."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

BLOCK = 128
"""Numbers of a program."""


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
