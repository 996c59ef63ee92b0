"""Memory for adapters on CPU: one stretch in large pages from which each takes a piece and gives it back.

Scattered over small pages the same factors are read at two thirds of the speed. Where no piece is large enough an
adapter gets memory of its own.
"""

import mmap
import threading
import weakref
from bisect import insort

import numpy as np
import torch

ALIGNMENT = 64


class Arena:
    """A stretch of memory and which parts of it are free. Any thread may take and give back."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(mmap.PAGESIZE, num_bytes // ALIGNMENT * ALIGNMENT)
        self._memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._free = [(0, self.num_bytes)]  # (offset, length) in order, never touching
        self._lock = threading.RLock()  # a piece may be given back while this thread takes another

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8. The piece is free again when nothing refers to it or to a view of it any more."""
        length = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            index = next((i for i, (_, free) in enumerate(self._free) if free >= length), None)
            if index is None:
                return torch.empty(num_bytes, dtype=torch.uint8)
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
