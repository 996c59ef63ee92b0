"""Host memory for adapters: arenas in which blocks are allocated and freed.

On CPU there is one arena in huge pages: in small pages the same factors are read at two thirds of the speed. Blocks of
many sizes leave gaps, so the arena reserves more address space than memory: a block that fits no gap goes behind the
others, and huge pages without a block are returned to the system. For a device there are arenas of pinned memory,
allocated as needed. An adapter for which no block is large enough gets ordinary memory.
"""

import mmap
import threading
import weakref
from bisect import bisect_left
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import structlog
import torch

from lorikeet.shard.model.kernels.cpu import huge_pages

log = structlog.get_logger()

ALIGNMENT = 64
ADDRESSES = 2
"""Reserved address space of an arena in huge pages, over its memory. With blocks of 1.6 to 30 MB, 1.5 is enough."""
HUGE_PAGE = 2 << 20
ARENA_BYTES = 256 * 2**20
"""Bytes of an arena of pinned memory; torch rounds pinned memory up to a power of two."""


class HostMemory(Protocol):
    """An allocator for adapters in host memory. Thread-safe."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, freed with the last reference to it or to a view of it."""
        ...


class Arena:
    """A region of addresses, in which blocks are allocated and freed. Thread-safe."""

    def __init__(self, num_bytes: int, addresses: int = ADDRESSES, is_pinned: bool = False) -> None:
        """For blocks of `num_bytes` in all, with `addresses` times as much address space. For a time the blocks may be
        more, since an adapter is read before another one is evicted. `is_pinned`: page-locked, for asynchronous copies
        to a CUDA device; all of the address space has memory then.
        """
        self.num_bytes = max(mmap.PAGESIZE, num_bytes // ALIGNMENT * ALIGNMENT)
        self._num_used = 0
        self._memory: mmap.mmap | memoryview = (
            _pinned(self.num_bytes) if is_pinned else _addresses(addresses * self.num_bytes, self.num_bytes)
        )
        self._start = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self._gaps = [(0, len(self._memory))]  # (offset, length) in order, never touching
        self._freed: deque[tuple[int, int]] = deque()
        """Blocks that are not yet among the gaps: they may be freed while their thread allocates another one."""
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, freed with the last reference to it or to a view of it."""
        block = self.block(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8) if block is None else block

    def block(self, num_bytes: int) -> torch.Tensor | None:
        """The same, None where no block is large enough."""
        length = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        self._merge_freed()
        with self._lock:
            offset = self._allocate(length)
        self._merge_freed()
        if offset is None:
            return None
        block = np.frombuffer(self._memory, np.uint8, num_bytes, offset)
        # torch holds the array for as long as a tensor of its memory lives
        weakref.finalize(block, self._free, offset, length).atexit = False
        return torch.from_numpy(block)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a block of so many bytes fits now."""
        self._merge_freed()
        with self._lock:
            return any(gap >= num_bytes for _, gap in self._gaps)

    @property
    def num_used(self) -> int:
        """Bytes of all blocks."""
        self._merge_freed()
        return self._num_used

    def _allocate(self, length: int) -> int | None:
        """The offset of a block in the gap that leaves least."""
        fitting = [(gap, index) for index, (_, gap) in enumerate(self._gaps) if gap >= length]
        if not fitting:
            return None
        gap, index = min(fitting)
        offset, _ = self._gaps[index]
        self._gaps[index : index + 1] = [(offset + length, gap - length)] if gap > length else []
        self._num_used += length
        return offset

    def _free(self, offset: int, length: int) -> None:
        self._freed.append((offset, length))
        self._merge_freed()

    def _merge_freed(self) -> None:
        """Unless a thread, this one maybe, holds the lock: it does so afterwards."""
        while self._freed and self._lock.acquire(blocking=False):
            try:
                while self._freed:
                    self._merge(*self._freed.popleft())
            finally:
                self._lock.release()

    def _merge(self, offset: int, length: int) -> None:
        """Make the block a part of a gap, and return the huge pages in which it was the last one."""
        at = bisect_left(self._gaps, (offset, length))
        first, end = offset, offset + length
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == offset:
            at -= 1
            first = self._gaps.pop(at)[0]
        self._gaps.insert(at, (first, end - first))
        self._num_used -= length
        if isinstance(self._memory, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            low = max(-(-(self._start + first) // HUGE_PAGE), (self._start + offset) // HUGE_PAGE)
            high = min((self._start + end) // HUGE_PAGE, -(-(self._start + offset + length) // HUGE_PAGE))
            if low < high:
                self._memory.madvise(mmap.MADV_DONTNEED, low * HUGE_PAGE - self._start, (high - low) * HUGE_PAGE)


class PinnedMemory:
    """Arenas of pinned memory, up to a limit in all; they are kept until the process ends. To pin one takes longer than
    to read an adapter, so the next one is pinned, by a thread of its own, as soon as another block would not fit.
    """

    def __init__(self, num_bytes: int, arena_bytes: int = ARENA_BYTES, is_pinned: bool = True) -> None:
        """`is_pinned`: False without a device."""
        self._left = num_bytes
        self._arena_bytes, self._is_pinned = arena_bytes, is_pinned
        self._arenas: list[Arena] = []
        self._thread = ThreadPoolExecutor(1, "pinned memory")
        self._next: Future[Arena] | None = None
        self._begin_arena(0)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Allocate as `Arena.take` does. One thread allocates; any thread frees."""
        block = self._block(num_bytes)
        while block is None and (self._next is not None or self._begin_arena(num_bytes)):
            self._end_arena()
            block = self._block(num_bytes)
        if self._next is None and not any(arena.has_room(num_bytes) for arena in self._arenas):
            self._begin_arena(num_bytes)
        # without a block, the driver copies it through a buffer
        return torch.empty(num_bytes, dtype=torch.uint8) if block is None else block

    def _block(self, num_bytes: int) -> torch.Tensor | None:
        for arena in self._arenas:
            block = arena.block(num_bytes)
            if block is not None:
                return block
        return None

    def _begin_arena(self, num_bytes: int) -> bool:
        """Whether another arena may be pinned, in which so many bytes fit."""
        size = max(self._arena_bytes, 1 << (num_bytes + ALIGNMENT).bit_length())
        if size > self._left:
            return False
        self._left -= size
        self._next = self._thread.submit(Arena, size, 1, self._is_pinned)
        return True

    def _end_arena(self) -> None:
        """Wait for the arena that is being pinned."""
        assert self._next is not None
        pinned, self._next = self._next, None
        try:
            self._arenas.append(pinned.result())
        except RuntimeError as refused:
            self._left = 0
            log.warning("pinned_memory_refused", reason=str(refused), effect="further adapters are copied more slowly")


def _addresses(num_bytes: int, num_needed: int) -> mmap.mmap:
    """Memory in huge pages; `num_needed` bytes where the system does not reserve address space without memory."""
    try:
        return huge_pages(num_bytes)
    except OSError:
        return huge_pages(num_needed)


def _pinned(num_bytes: int) -> memoryview:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
