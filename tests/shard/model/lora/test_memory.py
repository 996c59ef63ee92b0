"""Pieces of the arena: never two at the same place, and all of it is free again in the end."""

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.shard.model.lora.memory import Arena, PinnedMemory


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
def test_blocks_keep_their_content_and_are_freed(steps: list[tuple[bool, int]]) -> None:
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
    assert arena.num_free == arena.num_bytes
    assert len(arena._free) == 1


def test_a_view_keeps_its_block() -> None:
    arena = Arena(4096)
    view = arena.take(4096)[64:128].view(torch.float32)
    assert arena.num_free == 0
    other = arena.take(64)  # memory of its own
    other.fill_(1)
    del view
    assert arena.num_free == arena.num_bytes


def test_arenas_are_allocated_as_needed_up_to_the_limit() -> None:
    memory = PinnedMemory(3 * 8192, stretch_bytes=8192, is_pinned=False)
    pieces = [memory.take(5000) for _ in range(3)]
    assert len(memory._arenas) == 3
    beyond = memory.take(5000)
    assert beyond.shape == (5000,) and len(memory._arenas) == 3
    small = memory.take(1000)
    assert [arena.num_free < 3000 for arena in memory._arenas] == [True, False, False]
    del pieces, small
    gc.collect()
    assert memory.take(8192).shape == (8192,) and len(memory._arenas) == 3
    assert all(arena.num_free == arena.num_bytes for arena in memory._arenas)


def test_a_block_larger_than_an_arena_gets_an_arena_of_its_size() -> None:
    memory = PinnedMemory(1 << 20, stretch_bytes=4096, is_pinned=False)
    piece = memory.take(100_000)
    assert memory._arenas[0].num_bytes == 1 << 17 and memory._arenas[0].num_free < 1 << 17
    assert piece.shape == (100_000,)
