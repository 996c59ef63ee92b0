"""The private folder of a run, and the removal of those whose launcher was killed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "launcher.lock"
"""A launcher holds a lock on this file in its folder; the kernel releases it however the launcher ends."""


@contextmanager
def run_folder(parent: str | None, prefix: str) -> Iterator[Path]:
    """A new folder that only this user can enter, removed at the end. Raises OSError if it cannot be made."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).resolve()
    try:
        # Locked under another name first, so that no other launcher finds it unlocked.
        descriptor = os.open(folder / f"{_LOCK}.new", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
            _remove_dead(folder, prefix)
            yield folder
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(own: Path, prefix: str) -> None:
    """Remove this user's folders next to `own` whose launcher has ended."""
    for folder in own.parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder != own and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    """Raises OSError for a folder without a lock, or whose launcher runs."""
    descriptor = os.open(folder / _LOCK, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
