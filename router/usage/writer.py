"""Writes a record of every ended request to the operator's file, URL or both: a bounded backlog and background threads.

Requests never wait for it. Records that do not fit, or cannot be written, are counted, and the first one is logged.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
from starlette.requests import Request

from lorikeet.router.config import RouterConfig
from lorikeet.router.metrics.histogram import Counter
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.caller import Caller
from lorikeet.router.usage.file import UsageFile
from lorikeet.router.usage.post import UsagePost
from lorikeet.router.usage.record import Ending, Unwritten, UsageRecord, record

log = structlog.get_logger()

MAX_RECORDS = 4096
MAX_CHARACTERS = 64 * 1024 * 1024
"""Maximum characters of texts in all queued records."""
NUM_POSTERS = 4
"""Threads that post, each over its own connection: a single one would be limited by the round trip."""
CLOSE_S = 5.0
"""How long the router waits at its end for queued records."""


class UsageWriter(Protocol):
    """A destination of records. Each has its own thread, so it may block."""

    def write(self, record: UsageRecord) -> None:
        """Raises Unwritten."""

    def reopen(self) -> None:
        """Open the destination again, since the operator replaced it. Raises Unwritten."""

    def close(self) -> None:
        """Called once, after the last record."""


class BackgroundWriter:
    """One backlog for all of `writers`."""

    def __init__(self, name: str, writers: Sequence[UsageWriter], dropped: Counter) -> None:
        """`dropped` counts lost records by `name`."""
        self._name = name
        self._dropped = dropped
        self._dropped.add(0, name)  # adds the key now: the dictionary is read while threads count
        self._waiting: deque[tuple[UsageRecord, int]] = deque()
        self._num_characters = 0
        self._num_to_reopen = 0
        self._is_closed = False
        self._has_logged = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(writer,), name=f"usage {name}", daemon=True) for writer in writers
        ]
        for thread in self._threads:
            thread.start()

    def put(self, record: UsageRecord) -> None:
        """Queue a record, or count it as lost; returns at once."""
        size = _num_characters(record)
        with self._changed:
            if len(self._waiting) < MAX_RECORDS and self._num_characters + size <= MAX_CHARACTERS:
                self._waiting.append((record, size))
                self._num_characters += size
                self._changed.notify()
                return
        self._drop("requests end faster than their records can be written")

    def reopen(self) -> None:
        """Every writer reopens its destination before its next record."""
        with self._changed:
            self._num_to_reopen += 1
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` for queued records, then count the rest as lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            num_left = len(self._waiting)
            self._waiting.clear()
        if num_left:
            self._drop("the server ended before they were written", num_left)

    def _work(self, writer: UsageWriter) -> None:
        num_reopened = 0
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed and num_reopened == self._num_to_reopen:
                    self._changed.wait()
                is_to_reopen, num_reopened = num_reopened != self._num_to_reopen, self._num_to_reopen
                record, size = self._waiting.popleft() if self._waiting else (None, 0)
                self._num_characters -= size
            try:
                if is_to_reopen:
                    writer.reopen()
            except Unwritten as error:
                self._drop(str(error), 0)
            if record is not None:
                self._write(writer, record)
            elif self._is_closed:
                writer.close()
                return

    def _write(self, writer: UsageWriter, record: UsageRecord) -> None:
        try:
            writer.write(record)
        except Unwritten as error:
            self._drop(str(error))
        except Exception as error:
            # Its text may hold that of the record.
            self._drop(type(error).__name__)

    def _drop(self, reason: str, number: int = 1) -> None:
        with self._changed:
            self._dropped.add(number, self._name)
            is_first, self._has_logged = not self._has_logged, True
        if is_first:
            log.warning("usage_dropped", to=self._name, reason=reason)


class UsageLog:
    """The usage log of one router."""

    def __init__(self, config: RouterConfig, metrics: Metrics, caller: Callable[[Request], Caller]) -> None:
        """`caller` returns who sent a request. Raises OSError or ValueError where a destination is unusable."""
        url, path = config.request_logger_url, config.usage_log
        self._model = config.model_name
        self._caller = caller
        posters = [] if url is None else [UsagePost(url) for _ in range(NUM_POSTERS)]
        self._file = None if path is None else BackgroundWriter("file", [UsageFile(path)], metrics.usage_dropped)
        self._url = BackgroundWriter("url", posters, metrics.usage_dropped) if posters else None

    def ended(self, request: Request, ending: Ending) -> None:
        """Record a request that has ended, however it did."""
        if self._file is None and self._url is None:
            return
        entry = record(request.scope["state"], self._caller(request), ending, self._model)
        if self._file is not None:
            self._file.put(entry)
        if self._url is not None and entry.generated_tokens:
            self._url.put(entry)

    def reopen(self) -> None:
        """The operator has moved the file away."""
        if self._file is not None:
            self._file.reopen()

    def close(self) -> None:
        """Write what is queued; it may take `CLOSE_S` per destination."""
        for writer in (self._file, self._url):
            if writer is not None:
                writer.close(CLOSE_S)


def _num_characters(record: UsageRecord) -> int:
    texts = (record.input, record.output)
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts if text is not None)
