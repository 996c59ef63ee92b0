"""Records as lines of JSON at the end of a file. Knows files; not who reads them."""

import os

import orjson

from lorikeet.router.usage.record import Record
from lorikeet.router.usage.writer import Unwritten


class UsageFile:
    """Each line is one write to a file that is only ever appended to, so several routers may share one."""

    def __init__(self, path: str) -> None:
        """Raises OSError with one sentence."""
        self._path = path
        self._is_torn = False
        """Whether the file ends within a line that could not be written whole."""
        try:
            self._descriptor = _open(path)
        except OSError as error:
            raise OSError(f"--usage-log {path} cannot be opened: {error.strerror}") from None

    def write(self, record: Record) -> None:
        """Raises Unwritten."""
        line = orjson.dumps(record) + b"\n"
        if self._is_torn:
            line = b"\n" + line
        try:
            num_written = os.write(self._descriptor, line)
        except OSError as error:
            raise Unwritten(f"{self._path}: {error.strerror}") from None
        self._is_torn = num_written < len(line) and (num_written > 0 or self._is_torn)
        if num_written < len(line):
            raise Unwritten(f"{self._path} took a part of a line only")

    def reopen(self) -> None:
        """For a file that was moved away. Where there can be no new one the old one goes on. Raises Unwritten."""
        try:
            descriptor = _open(self._path)
        except OSError as error:
            raise Unwritten(f"{self._path} cannot be opened again: {error.strerror}") from None
        os.close(self._descriptor)
        self._descriptor, self._is_torn = descriptor, False

    def close(self) -> None:
        os.close(self._descriptor)


def _open(path: str) -> int:
    """A new file is for this user alone."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
