"""The files that a model is loaded from, and the digest of what they hold. Knows their names, not what is in them."""

import json
import os
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import structlog

from lorikeet.proto import digest

log = structlog.get_logger()

NICENESS = 10
"""Steps go before the reading of files."""
CONFIGURATION = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""One file or, with `.index.json` behind its name, several; the first that is there is what is loaded."""


class ModelFiles:
    """Of one model, as they are when this is made: before it is loaded."""

    def __init__(self, folder: str | Path, *, has_code: bool = False) -> None:
        """`has_code`: the model may bring code of its own, which is as good as weights then."""
        self._folder = Path(folder)
        self.names = loaded_names(self._folder, has_code)
        self._found = self._states()
        self._digest: Future[str] | None = None

    def digest(self) -> "Future[str]":
        """Of the content, which is read once, in a thread of its own, when it is first asked for.

        Gives ValueError where the files are no longer those that were found, and OSError where they cannot be read.
        """
        if self._digest is None:
            self._digest = Future()
            threading.Thread(target=self._read, args=(self._digest,), name="digest", daemon=True).start()
        return self._digest

    def _read(self, told: "Future[str]") -> None:
        if sys.platform == "linux":
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(own + NICENESS, 19))
        began = time.monotonic()
        try:
            found = digest.of_files(self._folder, self.names)
            if self._states() != self._found:
                raise ValueError("the model's files have changed since they were loaded")
        except (OSError, ValueError) as error:
            told.set_exception(error)
            return
        log.info("model files are read", digest=found, seconds=round(time.monotonic() - began, 1))
        told.set_result(found)

    def _states(self) -> list[tuple[int, int, int]]:
        """What changes with a file's content: its inode, size and time of writing."""
        paths = [self._folder / name for name in self.names]
        found = [path.stat() for path in paths if path.exists()]  # what is missing, loading says
        return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in found]


def loaded_names(folder: Path, has_code: bool) -> list[str]:
    """Configuration and weights, and Python's files where the model may bring some."""
    names = {CONFIGURATION} if (folder / CONFIGURATION).is_file() else set()
    for weights in WEIGHTS:
        index = f"{weights}.index.json"
        if (folder / weights).is_file():
            names.add(weights)
            break
        if (folder / index).is_file():
            names |= {index, *_parts(folder / index)}
            break
    if has_code:
        names |= {path.name for path in folder.glob("*.py")}
    return sorted(names)


def _parts(index: Path) -> set[str]:
    """The files that hold the weights; none where the index is broken, which loading says."""
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()
