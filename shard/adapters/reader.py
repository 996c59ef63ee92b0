"""Reads adapter files into host memory in one thread, in parallel with the step loop, in the order of the requests."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from lorikeet.shard.grpc.inbox import AdapterRead, Inbox
from lorikeet.shard.scheduler.adapter_slots import NOT_HERE, Content

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
