"""Host memory for adapters: arenas in which blocks are allocated and freed.

On CPU there is one arena in huge pages: in small pages the same factors are read at two thirds of the speed. For a
device there are arenas of pinned memory, allocated as needed. An adapter for which no block is large enough gets
ordinary memory.
"""

import mmap
import threading
import weakref
from bisect import insort
from typing import Protocol

import numpy as np
import torch

from lorikeet.shard.model.kernels.cpu import huge_pages

ALIGNMENT = 64
ARENA_BYTES = 256 * 2**20
"""Of an arena of pinned memory; torch rounds pinned memory up to a power of two."""


class HostMemory(Protocol):
    """An allocator for adapters in host memory. Thread-safe."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, freed with the last reference to it or to a view of it."""
        ...


class Arena:
    """A region of memory and its free blocks. Thread-safe."""

    def __init__(self, num_bytes: int, is_pinned: bool = False) -> None:
        """`is_pinned`: page-locked, for asynchronous copies to a CUDA device."""
        self.num_bytes = max(mmap.PAGESIZE, num_bytes // ALIGNMENT * ALIGNMENT)
        memory: mmap.mmap | memoryview = _pinned(self.num_bytes) if is_pinned else huge_pages(self.num_bytes)
        self._memory = memory
        self._free = [(0, self.num_bytes)]  # (offset, length) in order, never touching
        self._lock = threading.RLock()  # a block may be freed while this thread allocates another

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, freed with the last reference to it or to a view of it."""
        block = self.block(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8) if block is None else block

    def block(self, num_bytes: int) -> torch.Tensor | None:
        """The same, None where no block is large enough."""
        length = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            index = next((i for i, (_, free) in enumerate(self._free) if free >= length), None)
            if index is None:
                return None
            offset, free = self._free[index]
            self._free[index : index + 1] = [(offset + length, free - length)] if free > length else []
        block = np.frombuffer(self._memory, np.uint8, num_bytes, offset)
        # torch holds the array for as long as a tensor of its memory lives
        weakref.finalize(block, self._free_block, offset, length).atexit = False
        return torch.from_numpy(block)

    @property
    def num_free(self) -> int:
        """Bytes."""
        with self._lock:
            return sum(length for _, length in self._free)

    def _free_block(self, offset: int, length: int) -> None:
        with self._lock:
            insort(self._free, (offset, length))
            merged: list[tuple[int, int]] = []
            for start, size in self._free:
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((start, size))
            self._free = merged


class PinnedMemory:
    """Arenas of pinned memory, up to a limit in all; they are kept until the process ends."""

    def __init__(self, num_bytes: int, arena_bytes: int = ARENA_BYTES, is_pinned: bool = True) -> None:
        """`is_pinned`: False without a device."""
        self._left = num_bytes
        self._arena_bytes, self._is_pinned = arena_bytes, is_pinned
        self._arenas: list[Arena] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """As Arena's. One thread allocates; any thread frees."""
        for arena in self._arenas:
            block = arena.block(num_bytes)
            if block is not None:
                return block
        size = max(self._arena_bytes, 1 << (num_bytes + ALIGNMENT).bit_length())
        if size > self._left:
            return torch.empty(num_bytes, dtype=torch.uint8)  # the driver copies it through a buffer
        self._left -= size
        self._arenas.append(Arena(size, self._is_pinned))
        return self._arenas[-1].take(num_bytes)


def _pinned(num_bytes: int) -> memoryview:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
