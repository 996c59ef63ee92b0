"""Progress of a download as log lines, where a progress bar cannot be shown. Reads sizes of the cache's files."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorikeet.proto.logs import readable_size

INTERVAL_S = 10.0


@contextmanager
def logged(folder: Path, total: int, log: logging.Logger, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Log the size of `folder`, out of `total` bytes, at intervals until the block ends."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(interval_s):
            log.info("download_progress: fetched %s of %s", readable_size(_bytes_in(folder)), readable_size(total))

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    """Disk usage of a folder's files; of a sparse file only what was written."""
    total = 0
    if folder.is_dir():
        for path in folder.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:  # renamed since it was listed
                continue
            total += min(status.st_size, status.st_blocks * 512)
    return total
