"""Memory that a process reserves at its start and may never use."""

import mmap


def mapped_zeros(num_bytes: int) -> mmap.mmap:
    """Zeros that take memory only when they are first written. Those of numpy and ctypes may take it at once: where the
    C library has freed memory of that size, it clears it.
    """
    return mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
