"""A process, its parent and the kernel: the end with the parent, the reason of a failure, open files, freed memory."""

import ctypes
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def signal_at_parent_death(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


MOST_FILES = 1 << 20
"""More are never needed, and some libraries go through all possible descriptors."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, for this process and its children; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def report_failure(path: str | None, reason: str) -> bool:
    """Leave the reason of a failure in the file at `path`, from which the launcher ends with it or logs it.

    Returns False without a path, or if it cannot be written: then the process itself must log the reason.
    """
    if path is None:
        return False
    try:
        Path(path).write_text(" ".join(reason.split()))
    except OSError:
        return False
    return True


MOST_KEPT = 16 << 20
"""Bytes that are freed before they are returned: to return them takes as long as to convert a quarter of them."""


def return_freed_memory() -> bool:
    """Return freed memory to the system, which the C library keeps where it lies between blocks in use. Takes
    milliseconds, without the GIL. Returns whether the library can.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
    return trim is not None


class FreedMemory:
    """Returns memory to the system while much is used and freed."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """So many bytes were freed. Returns freed memory after every MOST_KEPT of them."""
        self._num_bytes += num_bytes
        if self._num_bytes >= MOST_KEPT:
            self._num_bytes = 0
            return_freed_memory()
