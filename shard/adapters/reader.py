"""Brings adapters from their files into host memory, beside the step loop: one thread, first asked, first read."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from lorikeet.shard.grpc.inbox import AdapterRead, Inbox
from lorikeet.shard.scheduler.adapter_slots import Content

log = structlog.get_logger()

NOT_HERE = (
    "the adapter is not in this shard's store: shards on another machine than their router share its --adapter-store"
)


class AdapterReader:
    """Reads what it is asked for and puts it into the inbox."""

    def __init__(self, store: Path, read: Callable[[Path], Content], inbox: Inbox) -> None:
        """`store`: the folder of files named by digest; `read` raises ValueError with a reason, and
        FileNotFoundError.
        """
        self._store = store
        self._read = read
        self._inbox = inbox
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="adapter reader", daemon=True).start()

    def ask(self, digest: str) -> None:
        """Begin to read an adapter. Any thread."""
        self._asked.put(digest)

    def _run(self) -> None:
        while True:
            digest = self._asked.get()
            path = self._store / f"{digest}.safetensors"
            try:
                item = AdapterRead(digest, self._read(path))
            except Exception as error:  # this adapter fails; the next may not
                item = AdapterRead(digest, None, reason_of(error, digest))
            self._inbox.put(item)


def reason_of(error: Exception, digest: str) -> str:
    """Why an adapter was not read, for whoever asked for it. What should not happen goes into the log."""
    if isinstance(error, FileNotFoundError):
        return NOT_HERE
    if isinstance(error, ValueError):
        return str(error)
    log.error("adapter not read", digest=digest, exc_info=error)
    return f"the adapter could not be read: {type(error).__name__}"
