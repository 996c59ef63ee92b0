"""KV memory is populated before it is written, a bounded amount ahead, and keeps its content."""

import ctypes
import mmap
import os
import sys
import threading
import time
from unittest.mock import Mock

import pytest
import torch

from lorikeet.shard.attention.base import LayerKV, Region
from lorikeet.shard.attention.cpu import fresh_zeros
from lorikeet.shard.requests.request import Request
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.startup import prefault
from lorikeet.shard.startup.prefault import Prefault

PAGE_BYTES, NUM_PAGES = 64 << 10, 512

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


class Kept(LayerKV):
    """One region of pages."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def fresh_regions(self) -> list[Region]:
        return [Region(self.memory.data_ptr(), PAGE_BYTES)]


def num_resident(memory: torch.Tensor) -> int:
    """KV pages whose memory is resident."""
    num_small = memory.nbytes // mmap.PAGESIZE
    flags = (ctypes.c_ubyte * num_small)()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), flags)
    each = PAGE_BYTES // mmap.PAGESIZE
    return sum(all(flag & 1 for flag in flags[i : i + each]) for i in range(0, num_small, each))


def made(monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], KvCache, Prefault]:
    monkeypatch.setattr(prefault, "AHEAD_BYTES", 100 * 2 * PAGE_BYTES)
    memories = [fresh_zeros((NUM_PAGES, PAGE_BYTES), torch.uint8) for _ in range(2)]
    cache = KvCache(NUM_PAGES, 4)
    return memories, cache, Prefault([Kept(memory) for memory in memories], cache)


def test_the_first_pages_are_populated_when_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    memories, _, ahead = made(monkeypatch)
    monkeypatch.setattr(threading, "Thread", Mock())
    ahead.start()
    assert all(100 <= num_resident(memory) < 200 for memory in memories)  # pages of the system may be larger
    assert ahead._done == 100  # though one call populates more


def test_few_pages_ahead_populate_no_huge_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has two regions per layer, and most servers use little of each."""
    memories, _, ahead = made(monkeypatch)
    ahead._num_ahead = 3
    ahead.catch_up()
    assert [num_resident(memory) for memory in memories] == [3, 3]


def test_pages_are_populated_a_bounded_amount_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    memories, cache, ahead = made(monkeypatch)
    while ahead.advance():
        pass
    assert all(100 <= num_resident(memory) < 200 for memory in memories)
    for memory in memories:
        memory[:100] = 7
    cache.admit(Request((1, 1), [5] * 400, 400, 1), num_spare=0)  # takes 100 pages
    while ahead.advance():
        pass
    assert all(200 <= num_resident(memory) < 300 for memory in memories)
    assert all(bool((memory[:100] == 7).all()) and not memory[100:].any() for memory in memories)


def test_populated_memory_needs_no_thread() -> None:
    ahead = Prefault([LayerKV()], KvCache(8, 4))
    num_threads = threading.active_count()
    ahead.start()
    assert threading.active_count() == num_threads


def test_the_thread_ends_with_the_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    memories, cache, ahead = made(monkeypatch)
    cache.admit(Request((1, 1), [5] * 4 * NUM_PAGES, 4 * NUM_PAGES, 1), num_spare=0)
    thread = threading.Thread(target=ahead._run)  # a separate thread, because its priority cannot be raised again
    thread.start()
    thread.join()
    assert [num_resident(memory) for memory in memories] == [NUM_PAGES] * 2


def test_the_thread_has_low_but_not_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lowest priority it kept the address space locked for seconds while steps used both cores."""
    memories, cache, ahead = made(monkeypatch)
    ahead.start()
    (thread,) = [each for each in threading.enumerate() if each.name == "prefault" and each.is_alive()][-1:]
    end = time.monotonic() + 20.0
    while (niceness := os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)) == os.getpriority(os.PRIO_PROCESS, 0):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + prefault.NICENESS)
    cache.admit(Request((1, 1), [5] * 4 * NUM_PAGES, 4 * NUM_PAGES, 1), num_spare=0)
    thread.join()  # before its memory is freed
    del memories
