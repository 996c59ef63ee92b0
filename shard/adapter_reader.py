"""Brings adapters from their files into host memory, beside the step loop: one thread, first asked, first read."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from shard.inbox import AdapterRead, Inbox
from shard.slots import Content

log = structlog.get_logger()

NOT_HERE = (
    "the adapter is not in this shard's store: shards on another machine than their router share its --adapter-store"
)


class AdapterReader:
    """Reads what it is asked for and puts it into the inbox."""

    def __init__(self, store: Path, read: Callable[[Path], Content], inbox: Inbox) -> None:
        """`store`: the folder of files named by digest; `read` raises ValueError with a reason."""
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
                item = AdapterRead(digest, self._read(path)) if path.exists() else AdapterRead(digest, None, NOT_HERE)
            except ValueError as error:
                item = AdapterRead(digest, None, str(error))
            except Exception as error:  # this adapter fails; the next may not
                log.exception("adapter not read", digest=digest)
                item = AdapterRead(digest, None, f"the adapter could not be read: {type(error).__name__}")
            self._inbox.put(item)
