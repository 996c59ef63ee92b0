"""A way out for records: a bounded backlog that never lets anybody wait, and threads that work it off.

What does not fit, or cannot be written, is counted; a log line says so the first time. Knows records and no place.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import structlog

from lorikeet.router.metrics.histogram import Counter
from lorikeet.router.usage.record import Record

log = structlog.get_logger()

MAX_RECORDS = 4096
MAX_CHARACTERS = 64 * 1024 * 1024
"""Of texts, in all records that wait."""


class Writer(Protocol):
    """Where records go. Each has a thread of its own, so it may take its time."""

    def write(self, record: Record) -> None:
        """Raises Unwritten."""

    def reopen(self) -> None:
        """The operator has put something else in its place. Raises Unwritten."""

    def close(self) -> None:
        """Nothing follows."""


class Unwritten(Exception):
    """Why a record was lost, in words that may stand in a log."""


class BackgroundWriter:
    """One backlog for all of `writers`."""

    def __init__(self, name: str, writers: Sequence[Writer], dropped: Counter) -> None:
        """`dropped` counts by `name` what was lost."""
        self._name = name
        self._dropped = dropped
        self._dropped.add(0, name)  # from here on no new key: it is read while threads count
        self._waiting: deque[tuple[Record, int]] = deque()
        self._num_characters = 0
        self._num_to_reopen = 0
        self._is_closed = False
        self._has_said = False
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(writer,), name=f"usage {name}", daemon=True) for writer in writers
        ]
        for thread in self._threads:
            thread.start()

    def put(self, record: Record) -> None:
        """Take a record, or count it as lost; returns at once."""
        size = _num_characters(record)
        with self._news:
            if len(self._waiting) < MAX_RECORDS and self._num_characters + size <= MAX_CHARACTERS:
                self._waiting.append((record, size))
                self._num_characters += size
                self._news.notify()
                return
        self._drop("more requests end than can be written")

    def reopen(self) -> None:
        """Every writer begins anew, before its next record."""
        with self._news:
            self._num_to_reopen += 1
            self._news.notify_all()

    def close(self, seconds: float) -> None:
        """Wait so long for what is still to be written."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._news:
            num_left = len(self._waiting)
            self._waiting.clear()
        if num_left:
            self._drop("the server ended before they were written", num_left)

    def _work(self, writer: Writer) -> None:
        num_reopened = 0
        while True:
            with self._news:
                while not self._waiting and not self._is_closed and num_reopened == self._num_to_reopen:
                    self._news.wait()
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

    def _write(self, writer: Writer, record: Record) -> None:
        try:
            writer.write(record)
        except Unwritten as error:
            self._drop(str(error))
        except Exception as error:
            # Its text may hold what was to be written.
            self._drop(type(error).__name__)

    def _drop(self, reason: str, number: int = 1) -> None:
        with self._news:
            self._dropped.add(number, self._name)
            is_first, self._has_said = not self._has_said, True
        if is_first:
            log.warning("usage_dropped", to=self._name, reason=reason)


def _num_characters(record: Record) -> int:
    texts = (record.input, record.output)
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts if text is not None)
