"""Reads adapter files into host memory in one thread, in parallel with the step loop, in the order of the requests.

A file may be damaged on its disk: `CheckedFiles` reads those whose bytes match their checksum, and no others.
"""

import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import structlog

from lorikeet.proto import digest
from lorikeet.shard.grpc.inbox import AdapterRead, Inbox
from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.adapters.loading import (
    NICENESS,
    AdapterContent,
    AdapterFiles,
    HostLayout,
    Opened,
    RowParallelSum,
    reading_threads,
)
from lorikeet.shard.model.lora.served_file import header_end, map_file
from lorikeet.shard.model.medusa.heads import HeadsPool
from lorikeet.shard.scheduler.adapter_slots import DAMAGED, NOT_HERE, Content


class CheckedFiles(AdapterFiles):
    """`AdapterFiles` of a store. All bytes of a file are compared with its checksum before the adapter is used, in
    parallel with steps.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        destination: HostLayout,
        heads: HeadsPool | None = None,
        sum_over_ranks: RowParallelSum | None = None,
    ) -> None:
        super().__init__(targets, destination, heads, sum_over_ranks)
        # threads of their own: they hold the interpreter lock for moments only, so that they may run at low priority
        self._threads = ThreadPoolExecutor(reading_threads(), "adapter checksum", _step_back)

    def read(self, path: Path) -> AdapterContent:
        """Read an adapter's file; its factors are copied while it is compared. Raises ValueError with a reason, also
        for a damaged file, and FileNotFoundError.
        """
        content = map_file(path)
        with self._compared(content):
            return self.lay_out(self.plan(content))

    def open(self, path: Path) -> Opened:
        """Raises ValueError with a reason, also for a damaged file, and FileNotFoundError."""
        content = map_file(path)
        with self._compared(content):
            return self.plan(content)

    @contextmanager
    def _compared(self, content: mmap.mmap) -> Iterator[None]:
        """Compares a file with its checksum while the body runs. Raises ValueError at the end where they differ,
        in place of any other one: the reason may be a damaged byte.
        """
        is_intact = self._begin(content)
        try:
            yield
        except Exception as error:
            if is_intact() or not isinstance(error, ValueError):
                raise
            raise ValueError(DAMAGED) from None
        if not is_intact():
            raise ValueError(DAMAGED)

    def _begin(self, content: mmap.mmap) -> Callable[[], bool]:
        """Starts to compare; the result waits for all of it."""
        view, begin = memoryview(content), header_end(content)
        pieces = (view[at : at + digest.PIECE_BYTES] for at in range(begin, len(view), digest.PIECE_BYTES))
        digests = self._threads.map(digest.of_piece, pieces)
        return lambda: digest.matches_pieces(content[:begin], list(digests))


def _step_back() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


log = structlog.get_logger()


class AdapterReader:
    """Reads the requested adapters and puts them into the inbox."""

    def __init__(self, store: Path, read: Callable[[Path], Content], inbox: Inbox) -> None:
        """`store`: folder of files named by digest; `read` raises ValueError with a reason, or FileNotFoundError."""
        self._store = store
        self._read = read
        self._inbox = inbox
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="adapter reader", daemon=True).start()

    def request(self, digest: str) -> None:
        """Request an adapter. Any thread may call this."""
        self._requests.put(digest)

    def _run(self) -> None:
        while True:
            digest = self._requests.get()
            path = self._store / f"{digest}.safetensors"
            try:
                item = AdapterRead(digest, self._read(path))
            except Exception as error:  # only this adapter fails
                item = AdapterRead(digest, None, reason_of(error, digest))
            self._inbox.put(item)


def reason_of(error: Exception, digest: str) -> str:
    """The error message for an adapter that was not read. Unexpected errors are logged."""
    if isinstance(error, FileNotFoundError):
        return NOT_HERE
    if isinstance(error, ValueError):
        return str(error)
    log.error("adapter_read_failed", digest=digest, exc_info=error)
    return f"the adapter could not be read: {type(error).__name__}"
