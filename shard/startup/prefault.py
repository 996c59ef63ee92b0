"""Has the system give memory for KV pages a little before they are first written: else the first step that writes to
new ones waits for it, 0.1 s and more where a page of 2 MiB in every layer has to be cleared at once.
"""

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence

from lorikeet.shard.attention.base import LayerKV
from lorikeet.shard.scheduler.kv_cache import KvCache

AHEAD_BYTES = 256 << 20
"""So much of all layers together is there before it is needed."""
CHUNK_BYTES = 2 << 20
"""Asked for at once."""
POLL_S = 0.05
NICENESS = 9
"""Added to the process's own. More would hold up who is to give way to nobody: the system keeps the process's address
space locked meanwhile, and a thread of the lowest priority may be put off for seconds in the middle of that.
"""
MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; what is there already keeps its content."""


class Prefault:
    """Keeps the pages that come next in memory."""

    def __init__(self, layers: Sequence[LayerKV], cache: KvCache) -> None:
        """layers: all of them; kept, so that their memory stays theirs."""
        self._layers = layers
        self._regions = [region for kv in layers for region in kv.fresh_regions()]
        self._cache = cache
        self._done = 0  # pages from the first one that are there
        sizes = [region.page_bytes for region in self._regions]
        self._num_ahead = AHEAD_BYTES // max(1, sum(sizes))
        self._num_at_once = max(1, CHUNK_BYTES // max(sizes, default=1))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def start(self) -> None:
        """Go on in a thread that gives way to all others, as long as the process lives. Does nothing where all memory
        is there from the start.
        """
        if not self._regions:
            return
        threading.Thread(target=self._run, name="prefault", daemon=True).start()

    def advance(self) -> bool:
        """Bring the next few pages in; False if enough are there. Raises OSError where the system can't."""
        target = min(self._cache.num_pages, self._cache.num_touched + self._num_ahead)
        if self._done >= target:
            return False
        end = min(self._done + self._num_at_once, self._cache.num_pages)
        for region in self._regions:
            self._populate(region.address + self._done * region.page_bytes, (end - self._done) * region.page_bytes)
        self._done = end
        return True

    def _populate(self, address: int, num_bytes: int) -> None:
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        if self._libc.madvise(start, address + num_bytes - start, MADV_POPULATE_WRITE):  # lets others run meanwhile
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _run(self) -> None:
        if sys.platform == "linux":
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + NICENESS)
        while self._done < self._cache.num_pages:
            try:
                if not self.advance():
                    time.sleep(POLL_S)
            except OSError as error:
                if error.errno != errno.EINVAL:  # an older system
                    raise
                return
