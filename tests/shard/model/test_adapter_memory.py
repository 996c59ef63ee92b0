"""Pieces of the arena: never two at the same place, and all of it is free again in the end."""

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shard.model.adapter_memory import Arena


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
def test_pieces_keep_what_was_written_and_come_back(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(16384)
    held: list[tuple[int, torch.Tensor]] = []
    for number, (takes, size) in enumerate(steps):
        if takes:
            piece = arena.take(size)
            assert piece.shape == (size,) and piece.data_ptr() % 64 == 0
            held.append((number % 251, piece.fill_(number % 251)))
        elif held:
            held.pop(size % len(held))
        for mark, piece in held:
            assert bool((piece == mark).all())
    piece = torch.empty(0)
    held.clear()
    gc.collect()
    assert arena.num_free == arena.num_bytes
    assert len(arena._free) == 1


def test_a_view_keeps_its_piece() -> None:
    arena = Arena(4096)
    view = arena.take(4096)[64:128].view(torch.float32)
    assert arena.num_free == 0
    other = arena.take(64)  # memory of its own
    other.fill_(1)
    del view
    assert arena.num_free == arena.num_bytes
