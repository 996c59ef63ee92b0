"""Pieces of the arena: never two at the same place, and all of it is free again in the end."""

import gc
import mmap
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from lorikeet.shard.model.lora import memory as memory_module
from lorikeet.shard.model.lora.memory import HUGE_PAGE, Arena, PinnedMemory


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
def test_blocks_keep_their_content_and_are_freed(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(16384)
    held: list[tuple[int, torch.Tensor]] = []
    for number, (takes, size) in enumerate(steps):
        if takes:
            block = arena.take(size)
            assert block.shape == (size,) and block.data_ptr() % 64 == 0
            held.append((number % 251, block.fill_(number % 251)))
        elif held:
            held.pop(size % len(held))
        for mark, block in held:
            assert bool((block == mark).all())
    block = torch.empty(0)
    held.clear()
    assert arena.num_used == 0
    assert len(arena._gaps) == 1


def test_adapters_of_many_sizes_fill_the_memory_and_no_more() -> None:
    """Bytes of rank 8 to 64, attention alone or all linear layers, of a Llama with 200 M parameters. As in a shard, an
    adapter is read before others are evicted.
    """
    draw = random.Random(0)
    ranks = (8, 8, 8, 8, 16, 16, 16, 32, 32, 64)
    sizes = [rank * (197_000, 473_000)[number % 2] for number, rank in enumerate(ranks * 8)]
    weights = [1 / (place + 1) for place in range(len(sizes))]
    draw.shuffle(weights)
    arena = Arena(sum(sizes) // 2)
    held: dict[int, torch.Tensor] = {}
    most = 0
    for step in range(240):
        [number] = draw.choices(range(len(sizes)), weights)
        block = held.pop(number, None)
        if block is None:
            block = arena.block(sizes[number])
            assert block is not None, "the gaps are too small"
            block.fill_(1)
        held[number] = block
        while arena.num_used > arena.num_bytes:
            del held[next(iter(held))]
        most = max(most, resident(arena) if step % 20 == 0 else 0)
    assert 0.9 * arena.num_bytes < arena.num_used <= arena.num_bytes
    assert 0.9 * arena.num_bytes < most < 1.1 * arena.num_bytes
    del block
    held.clear()
    assert arena.num_used == 0 and resident(arena) < 2 * HUGE_PAGE


def resident(arena: Arena) -> int:
    """Bytes of memory behind its addresses: pages that the kernel's page map marks as present."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(arena._start // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(len(arena._memory) // mmap.PAGESIZE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


def test_a_view_keeps_its_block() -> None:
    arena = Arena(4096)
    view = arena.take(len(arena._memory))[64:128].view(torch.float32)
    assert arena.block(64) is None
    other = arena.take(64)  # memory of its own
    other.fill_(1)
    del view
    assert arena.num_used == 0


def test_arenas_are_allocated_as_needed_up_to_the_limit() -> None:
    memory = PinnedMemory(3 * 8192, arena_bytes=8192, is_pinned=False)
    blocks = [memory.take(5000) for _ in range(3)]
    assert len(memory._arenas) == 3
    beyond = memory.take(5000)
    assert beyond.shape == (5000,) and len(memory._arenas) == 3
    small = memory.take(1000)
    assert [arena.num_used > 8192 - 3000 for arena in memory._arenas] == [True, False, False]
    del blocks, small
    gc.collect()
    assert memory.take(8192).shape == (8192,) and len(memory._arenas) == 3
    assert all(arena.num_used == 0 for arena in memory._arenas)


def test_a_block_larger_than_an_arena_gets_an_arena_of_its_size() -> None:
    memory = PinnedMemory(1 << 20, arena_bytes=4096, is_pinned=False)
    block = memory.take(100_000)
    assert memory._arenas[-1].num_bytes == 1 << 17 and memory._arenas[-1].num_used > 0
    assert block.shape == (100_000,)


def test_the_next_arena_is_pinned_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def pinned(num_bytes: int) -> memoryview:
        threads.append(threading.current_thread().name)
        return torch.empty(num_bytes, dtype=torch.uint8).numpy().data

    monkeypatch.setattr(memory_module, "_pinned", pinned)
    memory = PinnedMemory(3 * 8192, arena_bytes=8192)
    blocks = [memory.take(4000)]
    assert memory._next is None and len(threads) == 1  # one more such block fits
    blocks.append(memory.take(4000))
    assert memory._next is not None
    memory._next.result()
    assert len(threads) == 2 and len(memory._arenas) == 1
    blocks += [memory.take(4000) for _ in range(2)]
    assert len(memory._arenas) == 2
    assert {name.rpartition("_")[0] for name in threads} == {"pinned memory"}


def test_adapters_get_ordinary_memory_where_pinning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> memoryview:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(memory_module, "_pinned", refuse)
    memory = PinnedMemory(3 * 8192, arena_bytes=8192)
    with capture_logs() as logs:
        assert all(memory.take(5000).shape == (5000,) for _ in range(3))
    [event] = logs
    assert event["event"] == "pinned_memory_refused" and "out of memory" in event["reason"]
