"""Appending lines to files, and usage records as lines of JSON."""

import os

import orjson

from lorikeet.router.usage.record import Unwritten, UsageRecord


class LineFile:
    """Lines at the end of a file that only its owner can read.

    Each line is one write to a file opened for appending, so several routers may share one.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.path = path
        self._descriptor = _open(path)
        self._is_torn = False
        """Whether the file ends within a line that could not be written whole."""

    def append(self, line: bytes) -> None:
        """Write `line`, which ends with a newline. Raises OSError."""
        if self._is_torn:
            line = b"\n" + line
        num_written = os.write(self._descriptor, line)
        self._is_torn = num_written < len(line) and (num_written > 0 or self._is_torn)
        if num_written < len(line):
            raise OSError(0, "only a part of a line was written")

    def reopen(self) -> None:
        """Start a new file where this one was moved away; on failure the old one stays open. Raises OSError."""
        descriptor = _open(self.path)
        os.close(self._descriptor)
        self._descriptor, self._is_torn = descriptor, False

    def close(self) -> None:
        os.close(self._descriptor)


class UsageFile(LineFile):
    """`--usage-log`."""

    def __init__(self, path: str) -> None:
        """Raises OSError with one sentence."""
        try:
            super().__init__(path)
        except OSError as error:
            raise OSError(f"--usage-log {path} cannot be opened: {error.strerror}") from None

    def write(self, record: UsageRecord) -> None:
        """Raises Unwritten."""
        try:
            self.append(orjson.dumps(record) + b"\n")
        except OSError as error:
            raise Unwritten(f"{self.path}: {error.strerror}") from None

    def reopen(self) -> None:
        """Raises Unwritten."""
        try:
            super().reopen()
        except OSError as error:
            raise Unwritten(f"{self.path} cannot be opened again: {error.strerror}") from None


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
