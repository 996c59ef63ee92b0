"""Names the files that a model is loaded from, and computes the digest of their content."""

import json
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import structlog

from lorikeet.proto import digest
from lorikeet.proto.quantization import GGUF_NAME
from lorikeet.shard.system.process import lower_priority

log = structlog.get_logger()

NICENESS = 10
"""Reading files gives way to steps."""
CONFIGURATION = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Each is one file or, with `.index.json` appended, several; the first that exists is loaded."""


class ModelFiles:
    """The files of one model, in their state before it is loaded."""

    def __init__(self, folder: str | Path, *, has_code: bool = False) -> None:
        """`has_code`: the folder's Python files are part of the model."""
        self._folder = Path(folder)
        self.names = loaded_names(self._folder, has_code)
        self._found = self._states()
        self._digest: Future[str] | None = None

    def digest(self) -> "Future[str]":
        """The digest of the content, which is read once, in its own thread, at the first call.

        The future raises ValueError if the files have changed since they were loaded, OSError if they cannot be read.
        """
        if self._digest is None:
            self._digest = Future()
            threading.Thread(target=self._read, args=(self._digest,), name="digest", daemon=True).start()
        return self._digest

    def _read(self, result: "Future[str]") -> None:
        lower_priority(NICENESS)
        began = time.monotonic()
        try:
            digests = digest.of_files(self._folder, self.names)
            if self._states() != self._found:
                raise ValueError("the model's files have changed since they were loaded")
        except (OSError, ValueError) as error:
            result.set_exception(error)
            return
        log.info("model_files_digested", digest=digests, seconds=round(time.monotonic() - began, 1))
        result.set_result(digests)

    def _states(self) -> list[tuple[int, int, int]]:
        """What changes with a file's content: its inode, size and modification time."""
        paths = [self._folder / name for name in self.names]
        states = [path.stat() for path in paths if path.exists()]  # loading reports a missing file
        return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in states]


def loaded_names(folder: Path, has_code: bool) -> list[str]:
    """Names of the configuration, the weights and, with `has_code`, Python files."""
    names = {CONFIGURATION} if (folder / CONFIGURATION).is_file() else set()
    for weights in (*WEIGHTS, GGUF_NAME):
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
    """The files that hold the weights; none if the index is broken, which loading reports."""
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()
