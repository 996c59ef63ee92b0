"""The disk tier: served layouts by digest in one folder of bounded size, shared by processes. Imports no torch.

A file appears complete, by a rename under a lock, and never changes. The least recently used file is removed first, but
none that a process holds or used in the last minutes; a removed file stays mapped where it was mapped. If that is
not enough, a new file is refused. Files that are being written count too. Merges can be made again from files that are
here, so they go first, and those that one caller asked for have a part of the folder.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import structlog

from lorikeet.adapters.errors import AdapterError, AdapterTooLarge, LoaderFailed, StoreFull, is_full, not_stored
from lorikeet.adapters.formats import header
from lorikeet.adapters.refs import Pin
from lorikeet.proto.config_file import is_number
from lorikeet.proto.digest import CHECKSUM_FIELD, PIECE_BYTES, matches_checksum

T = TypeVar("T")
log = structlog.get_logger()

RECENT_S = 180.0
"""A file that was used this recently is not removed: a shard may be about to map it."""
RECENT_MERGE_S = 30.0
"""The same for a merge; a shard that finds it gone has it made again."""
MERGES_PART = 4
"""The merges of one caller have at most this part of the folder."""
_ABANDONED_S = 86_400.0
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ENDING = ".safetensors"


@dataclass(frozen=True, slots=True)
class Entry:
    """One adapter in the store."""

    digest: str
    num_bytes: int
    rank: int
    """The largest of its modules, 0 if it changes none."""
    num_heads: int = 0
    """Medusa heads in it."""
    invocation_ids: tuple[int, ...] = ()
    """Token ids that activate the adapter, if it is an activated LoRA."""
    changes_nothing: bool = False
    """Whether it computes what the base does."""
    scaling: float | None = None
    """Of all its modules, 0 where their scalings or ranks differ; None for an adapter that has more than factors of
    linear layers and embeddings, which can be part of a merge only as a new file, if at all.
    """
    num_virtual: int = 0
    """Virtual tokens that it puts before the prompt."""

    def as_dict(self) -> dict[str, Any]:
        """What `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Raises ValueError."""
        digest, *numbers = (values.get(name) for name in ("digest", "num_bytes", "rank", "num_heads"))
        # older versions wrote no number of heads and ignored them: such an adapter is read again
        if not isinstance(digest, str) or not all(isinstance(number, int) for number in numbers):
            raise ValueError("not an entry of the store")
        ids = values.get("invocation_ids", ())
        if not isinstance(ids, list | tuple) or not all(isinstance(token, int) for token in ids):
            raise ValueError("not an entry of the store")
        num_bytes, rank, num_heads = (number for number in numbers if isinstance(number, int))
        scaling = values.get("scaling")  # older versions wrote none
        if scaling is not None and not is_number(scaling, math.inf):
            raise ValueError("not an entry of the store")
        num_virtual = values.get("num_virtual", 0)
        if type(num_virtual) is not int or num_virtual < 0:
            raise ValueError("not an entry of the store")
        changes_nothing = values.get("changes_nothing") is True
        return cls(digest, num_bytes, rank, num_heads, tuple(ids), changes_nothing, scaling, num_virtual)


class Store:
    """The folder at `root`, of at most `capacity` bytes. `base` holds the hashes of the base's configuration and
    weights, and the dtype.
    """

    def __init__(self, root: str | Path, capacity: int, base: tuple[str, str, str]) -> None:
        self.root = Path(root)
        self._capacity, self._base = capacity, base
        self._held: dict[str, int] = {}
        self._valid: dict[str, tuple[int, int]] = {}
        """Files with a valid header, and their identities at that time."""
        self._intact: dict[str, tuple[int, int]] = {}
        """Files whose bytes matched their checksum, and their identities at that time."""
        self.num_evicted = 0
        self.lock = self.root / ".lock"
        self._folders = tuple(self.root / name for name in ("pins", "work", "merges"))
        self._make_folders()

    def _make_folders(self) -> None:
        for folder in (self.root, *self._folders):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _renew_folders(self) -> None:
        """Make folders again that somebody has deleted while the server uses them."""
        if not all(folder.is_dir() for folder in self._folders):
            log.error("adapter_store_deleted", folder=str(self.root), reason="its folders were deleted: made again")
            self._make_folders()

    def path(self, digest: str) -> Path:
        """Where the file of a digest is, or would be."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest[:80]!r} is not a digest")
        return self.root / f"{digest}{_ENDING}"

    def work(self, name: str) -> Path:
        """A private folder for a download, the same for equal names, so that an earlier attempt may be resumed. Raises
        LoaderFailed if the disk is full.
        """
        folder = self.root / "work" / hashlib.sha256(name.encode()).hexdigest()
        self._renew_folders()
        self.retried(lambda: folder.mkdir(mode=0o700, exist_ok=True))
        return folder

    def retried(self, write: Callable[[], T]) -> T:
        """The result of `write`, which is called again after each removal of a file while the disk is full. Raises
        LoaderFailed.
        """
        while True:
            try:
                return write()
            except StoreFull:
                if not self._evict_one():
                    raise
            except OSError as error:
                if not is_full(error) or not self._evict_one():
                    raise not_stored(error) from None

    def of_pin(self, pin: Pin) -> Entry | None:
        """The recorded entry of a pin, if its file still exists."""
        try:
            entry = Entry.from_dict(json.loads(self._note(pin).read_bytes()))
        except (OSError, ValueError, AttributeError):
            return None
        return entry if self.touch(entry.digest) else None

    def note(self, pin: Pin, entry: Entry) -> None:
        """Record the entry of a pin. If the disk is full, the pin is read again next time."""
        note = self._note(pin)
        draft = note.with_suffix(f".{os.getpid()}.draft")
        try:
            draft.write_text(json.dumps(entry.as_dict()))
            draft.replace(note)
        except OSError:
            draft.unlink(missing_ok=True)

    def touch(self, digest: str) -> bool:
        """Mark as used now; whether the file exists, is valid, and is for this base."""
        path = self.path(digest)
        try:
            status = path.stat()
            if self._valid.get(digest) != _identity(status):
                if not self._is_valid(path):
                    return False
                self._valid[digest] = _identity(status)
            os.utime(path)
        except OSError:
            return False
        return True

    def entry(self, digest: str) -> Entry:
        """The entry of a digest. Raises LoaderFailed if its file no longer exists."""
        path = self.path(digest)
        try:
            metadata, size = _metadata(path)
            num_heads = json.loads(metadata["heads"])["count"] if "heads" in metadata else 0
            ids = tuple(map(int, json.loads(metadata.get("invocation_ids", "[]"))))
            changes_nothing = "changes_nothing" in metadata
            scaling = float(metadata["scaling"]) if "scaling" in metadata else None
            numbers = size, int(metadata["rank"]), int(num_heads)
            num_virtual = int(metadata.get("num_virtual", 0))
            return Entry(digest, *numbers, ids, changes_nothing, scaling, num_virtual)
        except (OSError, ValueError, KeyError, TypeError, AdapterError):
            raise LoaderFailed("the adapter was removed from the store right after it was added", status=503) from None

    def is_intact(self, digest: str) -> bool:
        """Whether this process has found the file's bytes to match their checksum."""
        try:
            return self._intact.get(digest) == _identity(self.path(digest).stat())
        except OSError:
            return False

    def verify(self, digest: str) -> bool:
        """Read all of a file and compare it with its checksum. One that does not match is removed, even if it is held:
        it was never served correctly. Returns whether it is there and matches.
        """
        path = self.path(digest)
        try:
            identity, is_intact = _compared(path)
        except OSError as error:
            log.warning("stored_adapter_not_read", digest=digest[:16], reason=str(error))
            return False
        if is_intact:
            self._intact[digest] = identity
            return True
        with self._locked():
            if path.exists() and _identity(path.stat()) == identity:  # nobody has replaced it
                path.unlink()
        log.error("stored_adapter_damaged", digest=digest[:16], reason="its bytes do not match their checksum")
        return False

    def add(
        self, digest: str, num_bytes: int, write: Callable[[BinaryIO], object], merged_for: str | None = None
    ) -> int:
        """Let `write` write a file of `num_bytes` bytes, which it may have to do again, then move it into place.
        `merged_for`: the caller, for a merge.

        Returns the size. Raises AdapterTooLarge for a file above the capacity, and StoreFull if there is no room now.
        """
        draft = self.root / "work" / f"{digest}.{os.getpid()}.draft"
        try:
            self._renew_folders()
            with self._reserved(draft, num_bytes, merged_for):
                self.retried(lambda: _fill(draft, write))
                with self._locked():
                    if merged_for is not None:
                        (self.root / "merges" / digest).write_text(_opaque(merged_for))
                    draft.replace(self.path(digest))
                self._intact[digest] = _identity(self.path(digest).stat())
        except OSError as error:
            raise not_stored(error) from None
        finally:
            draft.unlink(missing_ok=True)
        self._valid.pop(digest, None)
        self.renew_hold(digest)
        return num_bytes

    def renew_hold(self, digest: str) -> None:
        """Hold the new file of a digest whose old one is held."""
        if digest in self._held:
            self.release(digest)
            self.hold(digest)

    def hold(self, digest: str) -> bool:
        """Prevent a file from being removed while this process lives; whether it exists."""
        if digest in self._held:
            return True
        try:
            descriptor = os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        self._held[digest] = descriptor
        return True

    def release(self, digest: str) -> None:
        """Allow the file to be removed again."""
        if (descriptor := self._held.pop(digest, None)) is not None:
            os.close(descriptor)

    def remove(self, digest: str) -> bool:
        """Remove a file now, unless a process holds it; whether it no longer exists."""
        self.release(digest)
        with self._locked():
            path = self.path(digest)
            if path.exists() and _is_held(path):
                return False
            path.unlink(missing_ok=True)
            (self.root / "merges" / digest).unlink(missing_ok=True)
        self._valid.pop(digest, None)
        return True

    def sweep(self) -> None:
        """Delete what earlier processes did not delete: partial files, and records of files that no longer exist."""
        old = time.time() - _ABANDONED_S
        for path in (self.root / "work").iterdir():
            if path.stat().st_mtime < old:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        for note in (self.root / "pins").iterdir():
            try:
                is_kept = self.path(Entry.from_dict(json.loads(note.read_bytes())).digest).exists()
            except (OSError, ValueError, AttributeError):
                is_kept = False
            if not is_kept:
                note.unlink(missing_ok=True)
        for note in (self.root / "merges").iterdir():
            if not (self.root / f"{note.name}{_ENDING}").exists():
                note.unlink(missing_ok=True)

    def usage(self) -> tuple[int, int]:
        """Number of files, and their bytes."""
        self._renew_folders()
        sizes = [status.st_size for _, status in self._files()]
        return len(sizes), sum(sizes)

    def _note(self, pin: Pin) -> Path:
        name = json.dumps([pin.as_dict(), self._base], sort_keys=True)
        return self.root / "pins" / f"{hashlib.sha256(name.encode()).hexdigest()}.json"

    def _is_valid(self, path: Path) -> bool:
        """Complete according to its header, and made for this base."""
        try:
            metadata, _ = _metadata(path)
        except (OSError, ValueError, AdapterError):
            return False
        # older versions wrote no checksum, or one that several threads cannot compute: such an adapter is read again
        known = (metadata.get("base"), metadata.get("weights"), metadata.get("dtype"))
        return CHECKSUM_FIELD in metadata and known == self._base

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with os.scandir(self.root) as entries:
            for entry in entries:
                if entry.name.endswith(_ENDING):
                    try:
                        yield Path(entry.path), entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue

    @contextmanager
    def _reserved(self, draft: Path, num_bytes: int, merged_for: str | None = None) -> Iterator[None]:
        """A file of that size, which counts for every process for as long as this one writes it."""
        if num_bytes > self._capacity:
            problem = f"it takes {num_bytes} bytes as it is served, the adapter cache has {self._capacity}"
            raise AdapterTooLarge(f"{problem}; --adapter-disk-cache sets its size")
        with ExitStack() as held:
            with self._locked():
                if merged_for is not None:
                    self._make_room_among_merges(num_bytes, merged_for)
                self._make_room(num_bytes)
                file = held.enter_context(draft.open("wb"))
                os.chmod(draft, 0o600)
                fcntl.flock(file, fcntl.LOCK_EX)
                file.truncate(num_bytes)
            yield

    def _make_room(self, num_bytes: int) -> None:
        files = [*self._files(), *self._drafts()]
        excess = sum(status.st_size for _, status in files) + num_bytes - self._capacity
        chosen, removable = [], self._removable()
        while excess > 0:
            path, status = next(removable, (None, None))
            if path is None or status is None:
                problem = f"the adapter cache of {self._capacity} bytes is full of adapters in use"
                raise StoreFull(f"{problem}; --adapter-disk-cache sets its size")
            chosen.append(path)
            excess -= status.st_size
        for path in chosen:
            self._evict(path)

    def _make_room_among_merges(self, num_bytes: int, caller: str) -> None:
        """Remove the caller's least recently used merges, so that they keep to their part. Raises StoreFull."""
        merges, most = self._merges(), max(num_bytes, self._capacity // MERGES_PART)
        own = [(path, status) for path, status in self._files() if merges.get(path.stem) == _opaque(caller)]
        excess, now = sum(status.st_size for _, status in own) + num_bytes - most, time.time()
        for path, status in sorted(own, key=lambda item: item[1].st_mtime):
            if excess > 0 and now - status.st_mtime >= RECENT_MERGE_S and not _is_held(path):
                self._evict(path)
                excess -= status.st_size
        if excess > 0:
            raise StoreFull(
                f"merges of one caller may take {most} bytes of the adapter cache, and these are in use: repeat the"
                " request later, or with weights that were merged before"
            )

    def _merges(self) -> dict[str, str]:
        """The caller of each merge, by digest."""
        with os.scandir(self.root / "merges") as notes:
            return {note.name: Path(note.path).read_text() for note in notes}

    def _evict_one(self) -> bool:
        """Remove the least recently used file; whether there was one to remove."""
        with self._locked():
            path = next((path for path, _ in self._removable()), None)
            if path is not None:
                self._evict(path)
        return path is not None

    def _removable(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Files that may be removed: merges first, and of each kind the least recently used."""
        now, merges = time.time(), self._merges()
        for path, status in sorted(self._files(), key=lambda item: (item[0].stem not in merges, item[1].st_mtime)):
            recent_s = RECENT_MERGE_S if path.stem in merges else RECENT_S
            if now - status.st_mtime >= recent_s and not _is_held(path):
                yield path, status

    def _evict(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        (self.root / "merges" / path.stem).unlink(missing_ok=True)
        self._valid.pop(path.stem, None)
        self.num_evicted += 1

    def _drafts(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Files that processes are writing. Those of processes that ended while they wrote are deleted."""
        for path in (self.root / "work").glob("*.draft"):
            try:
                if _is_held(path):
                    yield path, path.stat()
                else:
                    path.unlink()
            except FileNotFoundError:
                continue

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._renew_folders()
        with self.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _opaque(caller: str) -> str:
    return hashlib.sha256(caller.encode(errors="surrogatepass")).hexdigest()


def _fill(draft: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write over a file, whose size stays reserved."""
    with draft.open("r+b") as file:
        write(file)


def _compared(path: Path) -> tuple[tuple[int, int], bool]:
    """A file's identity, and whether its bytes match its checksum. Raises OSError."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        prefix = file.read(header.PREFIX)
        try:
            head = prefix + file.read(header.header_len(prefix, status.st_size, path.name))
        except AdapterError:
            return _identity(status), False
        return _identity(status), matches_checksum(head, iter(partial(file.read, PIECE_BYTES), b""))


def _is_held(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _metadata(path: Path) -> tuple[dict[str, str], int]:
    """The metadata of a complete file, and its size. Raises OSError, ValueError or AdapterError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(header.PREFIX)
        head = file.read(header.header_len(prefix, size, path.name))
    header.parse(prefix + head, size, path.name)
    metadata = json.loads(head).get("__metadata__")
    if not isinstance(metadata, dict):
        raise ValueError(f"{path.name} is not in the served layout")
    return metadata, size


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_size
