"""Host memory for adapters: stretches from which each takes a piece and gives it back.

On CPU one in large pages: scattered over small ones the same factors are read at two thirds of the speed. For a device
stretches that it can copy from by itself, taken as they are needed. Where no piece is large enough an adapter gets
memory of its own.
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
STRETCH_BYTES = 256 * 2**20
"""Of pinned memory at a time; torch rounds what it pins up to a power of two."""


class HostMemory(Protocol):
    """Where adapters lie in host memory. Any thread."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8. The piece is free again when nothing refers to it or to a view of it any more."""
        ...


class Arena:
    """A stretch of memory and which parts of it are free. Any thread may take and give back."""

    def __init__(self, num_bytes: int, is_pinned: bool = False) -> None:
        """`is_pinned`: in memory that a CUDA device copies from by itself."""
        self.num_bytes = max(mmap.PAGESIZE, num_bytes // ALIGNMENT * ALIGNMENT)
        memory: mmap.mmap | memoryview = _pinned(self.num_bytes) if is_pinned else huge_pages(self.num_bytes)
        self._memory = memory
        self._free = [(0, self.num_bytes)]  # (offset, length) in order, never touching
        self._lock = threading.RLock()  # a piece may be given back while this thread takes another

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8. The piece is free again when nothing refers to it or to a view of it any more."""
        piece = self.piece(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8) if piece is None else piece

    def piece(self, num_bytes: int) -> torch.Tensor | None:
        """The same, None where no piece is large enough."""
        length = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            index = next((i for i, (_, free) in enumerate(self._free) if free >= length), None)
            if index is None:
                return None
            offset, free = self._free[index]
            self._free[index : index + 1] = [(offset + length, free - length)] if free > length else []
        piece = np.frombuffer(self._memory, np.uint8, num_bytes, offset)
        # torch holds the array for as long as a tensor of its memory lives
        weakref.finalize(piece, self._give_back, offset, length).atexit = False
        return torch.from_numpy(piece)

    @property
    def num_free(self) -> int:
        """Bytes."""
        with self._lock:
            return sum(length for _, length in self._free)

    def _give_back(self, offset: int, length: int) -> None:
        with self._lock:
            insort(self._free, (offset, length))
            joined: list[tuple[int, int]] = []
            for start, size in self._free:
                if joined and sum(joined[-1]) == start:
                    joined[-1] = (joined[-1][0], joined[-1][1] + size)
                else:
                    joined.append((start, size))
            self._free = joined


class PinnedMemory:
    """HugePagePool of pinned memory, up to so many bytes in all; they are kept for as long as the process lives."""

    def __init__(self, num_bytes: int, stretch_bytes: int = STRETCH_BYTES, is_pinned: bool = True) -> None:
        """`is_pinned`: False where there is no device to pin for."""
        self._left = num_bytes
        self._stretch_bytes, self._is_pinned = stretch_bytes, is_pinned
        self._arenas: list[Arena] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """As Arena's. One thread takes; any gives back."""
        for arena in self._arenas:
            piece = arena.piece(num_bytes)
            if piece is not None:
                return piece
        size = max(self._stretch_bytes, 1 << (num_bytes + ALIGNMENT).bit_length())
        if size > self._left:
            return torch.empty(num_bytes, dtype=torch.uint8)  # is copied by way of the driver's own buffer
        self._left -= size
        self._arenas.append(Arena(size, self._is_pinned))
        return self._arenas[-1].take(num_bytes)


def _pinned(num_bytes: int) -> memoryview:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
