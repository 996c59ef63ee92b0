"""What survives a restart: which heads each pair has adopted, and the decisions. One file per pair, in the adapter
store.

Files are written by a thread, so that no step waits for a disk. Heads in use are locked in the store, from which the
least recently used files are removed.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from lorikeet.shard.learning.rings import Pair

log = structlog.get_logger()

FOLDER = "learning"
MAX_FILES = 4096
"""The newest files, which are read at start."""


@dataclass(frozen=True)
class HeadsDecision:
    """What became of trained heads, and why. Tokens per step are those of a replay of the newest outputs."""

    time: float
    """Seconds since 1970."""
    decision: str
    """adopted | rejected | reverted | failed."""
    reason: str
    heads_digest: str = ""
    tokens_per_step: float = 0.0
    tokens_per_step_before: float = 0.0
    num_rows: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Record:
    """Record of one pair."""

    pair: Pair
    given_digest: str
    """The heads that requests came with, "" for none. They are an adapter like any other, and never deleted here."""
    digest: str
    """The adopted heads, "" for none."""
    replaced: str
    """Heads that drafted before them. They may be the given heads."""
    replaced_acceptance: float
    decisions: tuple[HeadsDecision, ...]

    @property
    def heads(self) -> set[str]:
        """All heads that it names, given ones among them."""
        return {self.digest, self.replaced, *(decision.heads_digest for decision in self.decisions)} - {""}


class Records:
    """The files of one base model in the store at `root`."""

    def __init__(self, root: Path, base: tuple[str, str, str]) -> None:
        """`base`: hashes of configuration and weights, and the data type."""
        self._root, self._folder, self._base = root, root / FOLDER, list(base)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._held: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1, "learning records")

    def read(self) -> list[Record]:
        """The newest records of this base, the most recently written last."""
        return self._read_all(MAX_FILES)

    def write(self, record: Record) -> None:
        """Write the record of a pair, soon."""
        text = json.dumps({"base": self._base, **asdict(record)})
        self._soon(lambda: _write(self._path(record.pair), text))

    def hold(self, digest: str) -> bool:
        """Keep heads in the store; whether they are there."""
        if digest in self._held:
            return True
        try:
            descriptor = os.open(self._root / f"{digest}.safetensors", os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError:
            return False
        self._held[digest] = descriptor
        return True

    def release(self, digest: str) -> None:
        """Heads may leave the store."""
        if (descriptor := self._held.pop(digest, None)) is not None:
            os.close(descriptor)

    def remove(self, digest: str) -> None:
        """Delete heads from the store, soon."""
        self.release(digest)
        self._soon(lambda: (self._root / f"{digest}.safetensors").unlink(missing_ok=True))

    def flush(self) -> None:
        """Wait until everything is written."""
        self._thread.submit(lambda: None).result()

    def purge(self) -> None:
        """Delete all records of this base, and the learned heads that they name. Waits for it."""
        self.flush()
        records = self._read_all()
        given_digests = {record.given_digest for record in records}
        for digest in set[str]().union(*(record.heads for record in records)) - given_digests:
            self.release(digest)
            (self._root / f"{digest}.safetensors").unlink(missing_ok=True)
        for record in records:
            self._path(record.pair).unlink(missing_ok=True)

    def _read_all(self, max_files: int | None = None) -> list[Record]:
        """All records of this base in the `max_files` newest files, or in all, the most recently written last."""
        paths = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        newest = paths if max_files is None else paths[-max_files:]
        return [record for path in newest if (record := self._read(path)) is not None]

    def _read(self, path: Path) -> Record | None:
        try:
            values: dict[str, Any] = json.loads(path.read_bytes())
            if values.pop("base") != self._base:
                return None
            tenant, adapter = values["pair"]
            decisions = tuple(HeadsDecision(**fields) for fields in values["decisions"])
            return Record(**values | {"pair": (tenant, adapter), "decisions": decisions})
        except (OSError, ValueError, KeyError, TypeError) as failure:
            log.warning("learning_record_not_read", file=path.name, reason=str(failure))
            return None

    def _path(self, pair: Pair) -> Path:
        name = hashlib.sha256(json.dumps([*self._base, *pair]).encode()).hexdigest()
        return self._folder / f"{name}.json"

    def _soon(self, task: Callable[[], None]) -> None:
        def run() -> None:
            try:
                task()
            except OSError as failure:
                log.warning("learning_record_not_written", reason=str(failure))

        self._thread.submit(run)


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.chmod(0o600)
    draft.replace(path)
