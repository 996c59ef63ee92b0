"""Populates the memory of KV pages shortly before they are first written.

Otherwise the first step that writes to new pages waits until the system has cleared them: 0.1 s and more with a page of
2 MiB in every layer.
"""

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Sequence

from lorikeet.shard.attention.base import LayerKV
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.system.process import lower_priority

AHEAD_BYTES = 16 << 20
"""Memory of all layers together that is populated ahead of use: more than the prompts of two polls fill."""
CHUNK_BYTES = 2 << 20
"""Memory populated by one system call."""
POLL_S = 0.05
NICENESS = 9
"""Added to the process's own. More would stall other threads: the system keeps the process's address space locked
during the call, and a thread of the lowest priority may be descheduled for seconds inside it.
"""
MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; memory that is already populated keeps its content."""


class Prefault:
    """Populates the memory of the pages that will be used next."""

    def __init__(self, layers: Sequence[LayerKV], cache: KvCache) -> None:
        """layers: all of them; referenced, so that their memory is not freed."""
        self._layers = layers
        self._regions = [region for kv in layers for region in kv.fresh_regions()]
        self._cache = cache
        self._done = 0  # pages, from the first on, that are populated
        sizes = [region.page_bytes for region in self._regions]
        self._num_ahead = AHEAD_BYTES // max(1, sum(sizes))
        self._num_at_once = max(1, CHUNK_BYTES // max(sizes, default=1))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def start(self) -> None:
        """Populate the first pages now, since no request waits yet, and the next ones in a thread of low priority as
        long as the process lives. Does nothing if all memory is populated from the start.
        """
        if self._regions and self.catch_up():
            threading.Thread(target=self._run, name="prefault", daemon=True).start()

    def catch_up(self) -> bool:
        """Populate pages until enough are; False if the system cannot."""
        try:
            while self.advance():
                pass
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel
                raise
            return False
        return True

    def advance(self) -> bool:
        """Populate the next few pages; False if enough are. Raises OSError if the system cannot."""
        target = min(self._cache.num_pages, self._cache.num_touched + self._num_ahead)
        if self._done >= target:
            return False
        end = min(self._done + self._num_at_once, target)
        for region in self._regions:
            self._populate(region.address + self._done * region.page_bytes, (end - self._done) * region.page_bytes)
        self._done = end
        return True

    def _populate(self, address: int, num_bytes: int) -> None:
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        if self._libc.madvise(start, address + num_bytes - start, MADV_POPULATE_WRITE):  # releases the GIL
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _run(self) -> None:
        lower_priority(NICENESS)
        while self._done < self._cache.num_pages and self.catch_up():
            time.sleep(POLL_S)
