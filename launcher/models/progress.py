"""How far a download is, as log lines: for logs, where a moving bar would be noise. Looks at the cache's files only."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INTERVAL_S = 10.0


@contextmanager
def logged(folder: Path, total: int, log: logging.Logger, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Say from time to time how many of `total` bytes lie in `folder`, until the block ends."""
    ended = threading.Event()

    def say() -> None:
        while not ended.wait(interval_s):
            log.info("fetched %s of %s", size(_bytes_in(folder)), size(total))

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _bytes_in(folder: Path) -> int:
    """Bytes that the files of a folder take on disk; a file made large in advance counts only what was written."""
    total = 0
    if folder.is_dir():
        for path in folder.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:  # renamed since it was listed
                continue
            total += min(status.st_size, status.st_blocks * 512)
    return total
