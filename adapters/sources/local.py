"""Adapters in folders of this machine, only below the roots that the operator configured. Imports no torch.

Every path of a folder or file is checked after its links are resolved, so neither `..` nor a link leaves a root. One
exception: files of a snapshot in the layout of the hub's cache are links to its blobs.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lorikeet.adapters.errors import AdapterError, AdapterInvalid, AdapterNotFound
from lorikeet.adapters.refs import Pin, Ref, Source
from lorikeet.adapters.sources.base import SMALL_NAMES, FileHead, ListedFile, ListedSource, Within, unbounded

_HUB_CACHE_FOLDERS = ("models--", "datasets--", "spaces--")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAX_FILES = 10_000
_SAMPLE_BYTES = 64 << 10
_WEIGHTS = (".safetensors", ".bin", ".pt")


class LocalSource(ListedSource):
    """Folders below `roots`; never below `hidden` ones, such as the adapter store."""

    source = Source.LOCAL

    def __init__(
        self,
        roots: Sequence[str | Path],
        max_bytes: int,
        hidden: Iterable[str | Path] = (),
        folders: Iterable[str | Path] = (),
        strict: bool = False,
    ) -> None:
        """`folders` are single adapters outside the roots. `strict`: versions are distinguished by all bytes of their
        files, not by the file system's data on them and samples.
        """
        super().__init__(max_bytes)
        self._strict = strict
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self._roots = [Path(os.path.realpath(root)) for root in roots]
        self._hidden = [Path(os.path.realpath(folder)) for folder in hidden]

    def fetch(self, pin: Pin, token: str | None, folder: Path, within: Within = unbounded) -> Path:
        """The folder itself: nothing is copied. If it contains links to files elsewhere below a root, links out of the
        roots, or special files, `folder` is filled with links to the permitted files instead.
        """
        files = self.unchanged(pin)
        names, own_folder = self._chosen(pin.id, files), self._folder(pin.id)
        if all(files[name].handle == own_folder / name for name in names) and not _others(own_folder) - files.keys():
            return own_folder
        for name in names:
            (folder / name).symlink_to(files[name].handle)
        return folder

    def real_ids(self, id: str) -> frozenset[str]:
        """The real paths of `id` below each of the roots."""
        if "\0" in id:
            return frozenset()
        return frozenset(os.path.realpath(root / id) for root in self._roots)

    def missing(self, ref: Ref, token: str | None) -> AdapterNotFound:
        return _missing(ref.id)

    def _listed(self, id: str) -> dict[str, ListedFile]:
        """The plain files of the folder that `id` names, by name, with their real paths."""
        files = {}
        try:
            folder = self._folder(id)
            with os.scandir(folder) as entries:
                for number, entry in enumerate(entries):
                    if number >= _MAX_FILES:
                        raise AdapterInvalid(f"the folder {id} holds more than {_MAX_FILES} entries")
                    path = Path(os.path.realpath(entry.path))
                    if not self._is_inside(path) and not _is_blob(path, folder):
                        continue
                    if stat.S_ISREG((status := path.stat()).st_mode):
                        state = f"{status.st_mtime_ns}\0{status.st_ctime_ns}\0{status.st_ino}\0{status.st_dev}"
                        files[entry.name] = ListedFile(status.st_size, state, path)
        except AdapterError:
            raise
        except (OSError, ValueError) as error:
            raise AdapterNotFound(f"the adapter {id!r} cannot be read: {_reason(error)}") from None
        if not files:
            raise AdapterInvalid(f"the folder {id} holds no files, so it is not an adapter")
        return files

    def _revision(self, files: Mapping[str, ListedFile]) -> str:
        """A hash of the file system's data on the files and of an adapter's bytes: all, or samples."""
        content = hashlib.sha256(super()._revision(files).encode())
        for name in sorted(files):
            if name in SMALL_NAMES or name.endswith(_WEIGHTS):
                content.update(self._digest(files[name]))
        return content.hexdigest()

    def _digest(self, file: ListedFile) -> bytes:
        """A hash of the file, or of its beginning, which has the header, and its end."""
        try:
            with file.handle.open("rb") as opened:
                if self._strict:
                    return hashlib.file_digest(opened, "sha256").digest()
                sample = opened.read(_SAMPLE_BYTES)
                opened.seek(max(0, file.size - _SAMPLE_BYTES))
                return hashlib.sha256(sample + opened.read(_SAMPLE_BYTES)).digest()
        except OSError as error:
            raise AdapterNotFound(f"{file.handle.name} cannot be read: {_reason(error)}") from None

    def _folder(self, id: str) -> Path:
        """Raises AdapterNotFound with one text for every reason, so that nothing outside the roots is disclosed."""
        if id and "\0" not in id and ".." not in Path(id).parts:
            for root in self._roots:
                # An absolute id replaces the root here, and is checked like any other below.
                path = Path(os.path.realpath(root / id))
                if (path != root or path in self._folders) and self._is_inside(path) and path.is_dir():
                    return path
        raise _missing(id)

    def _is_inside(self, path: Path) -> bool:
        """Whether a real path is below a root and not in a hidden folder or a hub cache."""
        if any(path.is_relative_to(folder) for folder in self._hidden):
            return False
        if any(path.is_relative_to(folder) for folder in self._folders):
            return True
        return any(
            path.is_relative_to(root)
            and not any(part.startswith(_HUB_CACHE_FOLDERS) for part in path.relative_to(root).parts)
            for root in self._roots
        )

    def _head(self, id: str, file: ListedFile, num_bytes: int) -> FileHead:
        try:
            with file.handle.open("rb") as opened:
                return FileHead(opened.read(num_bytes), file.size)
        except OSError as error:
            raise AdapterNotFound(f"{file.handle.name} of {id} cannot be read: {_reason(error)}") from None


def _is_blob(path: Path, folder: Path) -> bool:
    """Whether a file of `folder`, REPOSITORY/snapshots/REVISION, is a link to one of the repository's blobs."""
    blobs = folder.parent.parent / "blobs"
    return folder.parent.name == "snapshots" and path.parent == blobs and _BLOB.fullmatch(path.name) is not None


def _missing(id: str) -> AdapterNotFound:
    return AdapterNotFound(f"there is no adapter {id!r} below the local roots of this server")


def _others(folder: Path) -> set[str]:
    """Names of everything but folders."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if not entry.is_dir()}


def _reason(error: Exception) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else "it is not a path"
