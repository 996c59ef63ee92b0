"""Adapters in folders of this machine, below the roots that the operator named and nowhere else. Imports no torch.

Every path is judged after its links are followed, folders and files alike, so neither `..` nor a link leaves a root.
"""

import asyncio
import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from lorikeet.adapters.errors import AdapterError, AdapterInvalid, AdapterNotFound, AdapterTooLarge
from lorikeet.adapters.pin import Pin
from lorikeet.adapters.refs import Ref, Source
from lorikeet.adapters.sources.base import (
    MAX_SMALL_BYTES,
    PEEK_BYTES,
    SMALL_NAMES,
    FileHead,
    Resolved,
    Within,
    choose,
    parts,
    unbounded,
)

_HUB_CACHE_FOLDERS = ("models--", "datasets--", "spaces--")
_MOST_FILES = 10_000


class LocalSource:
    """Folders below `roots`; never below `hidden` ones, such as the store of served adapters."""

    def __init__(self, roots: Sequence[str | Path], max_bytes: int, hidden: Iterable[str | Path] = ()) -> None:
        self._roots = [Path(os.path.realpath(root)) for root in roots]
        self._hidden = [Path(os.path.realpath(folder)) for folder in hidden]
        self._max_bytes = max_bytes

    async def resolve(self, ref: Ref, token: str | None) -> Resolved:
        """Everyone who reaches the server may use what lies below its roots."""
        return await asyncio.to_thread(self._resolve, ref)

    async def small_files(self, pin: Pin, token: str | None, names: frozenset[str] = SMALL_NAMES) -> dict[str, bytes]:
        return await asyncio.to_thread(self._small_files, pin, names)

    def fetch(self, pin: Pin, token: str | None, folder: Path, within: Within = unbounded) -> Path:
        """The folder itself: nothing is copied. A folder of links joins files that lie elsewhere below a root, and
        leaves out what links out of the roots or is no plain file.
        """
        found, files = self._listed(pin.id)
        sizes: dict[str, int | None] = {name: status.st_size for name, (_, status) in files.items()}
        wanted = choose(sizes, pin.id, self._max_bytes, lambda name: _head(files[name], PEEK_BYTES, pin).content)
        if _revision(files) != pin.revision:
            raise AdapterNotFound(f"{pin.id} has changed since it was looked up: ask again")
        if all(files[name][0] == found / name for name in wanted) and not _others(found) - files.keys():
            return found
        for name in wanted:
            (folder / name).symlink_to(files[name][0])
        return folder

    def heads(self, pin: Pin, token: str | None, num_bytes: int) -> dict[str, FileHead]:
        _, files = self._listed(pin.id)
        sizes: dict[str, int | None] = {name: status.st_size for name, (_, status) in files.items()}
        names = choose(sizes, pin.id, self._max_bytes, lambda name: _head(files[name], PEEK_BYTES, pin).content)
        return {name: _head(files[name], num_bytes, pin) for name in parts(names)}

    async def close(self) -> None:
        """Nothing is held open."""

    def _resolve(self, ref: Ref) -> Resolved:
        _, files = self._listed(ref.id)
        if not files:
            raise AdapterInvalid(f"the folder {ref.id} holds no files, so it is not an adapter")
        return Resolved(Pin(Source.LOCAL, ref.id, _revision(files)), is_public=True)

    def _small_files(self, pin: Pin, names: frozenset[str]) -> dict[str, bytes]:
        _, files = self._listed(pin.id)
        contents = {}
        for name in sorted(names & set(files)):
            path, _ = files[name]
            with path.open("rb") as file:
                content = file.read(MAX_SMALL_BYTES + 1)
            if len(content) > MAX_SMALL_BYTES:
                raise AdapterTooLarge(f"{name} of {pin.id} has more than {MAX_SMALL_BYTES} bytes")
            contents[name] = content
        return contents

    def _listed(self, id: str) -> tuple[Path, dict[str, tuple[Path, os.stat_result]]]:
        """The folder that `id` names, and its plain files by name with where each really lies."""
        try:
            folder = self._folder(id)
            files = {}
            with os.scandir(folder) as entries:
                for number, entry in enumerate(entries):
                    if number >= _MOST_FILES:
                        raise AdapterInvalid(f"the folder {id} holds more than {_MOST_FILES} entries")
                    path = Path(os.path.realpath(entry.path))
                    if not self._is_inside(path):
                        continue
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        files[entry.name] = (path, status)
            return folder, files
        except AdapterError:
            raise
        except (OSError, ValueError) as error:
            raise AdapterNotFound(f"the adapter {id!r} cannot be read: {_reason(error)}") from None

    def _folder(self, id: str) -> Path:
        """Raises AdapterNotFound in one wording whatever the reason: what lies outside of the roots is not told."""
        if id and "\0" not in id and ".." not in Path(id).parts:
            for root in self._roots:
                # An absolute id replaces the root here, and is judged like any other below.
                path = Path(os.path.realpath(root / id))
                if path != root and self._is_inside(path) and path.is_dir():
                    return path
        raise AdapterNotFound(f"there is no adapter {id!r} below the local roots of this server")

    def _is_inside(self, path: Path) -> bool:
        """Whether a real path lies below a root, and in no folder that is never addressable."""
        if any(path.is_relative_to(folder) for folder in self._hidden):
            return False
        return any(
            path.is_relative_to(root)
            and not any(part.startswith(_HUB_CACHE_FOLDERS) for part in path.relative_to(root).parts)
            for root in self._roots
        )


def _others(folder: Path) -> set[str]:
    """Names of all that is no folder."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if not entry.is_dir()}


def _head(file: tuple[Path, os.stat_result], num_bytes: int, pin: Pin) -> FileHead:
    path, status = file
    try:
        with path.open("rb") as opened:
            return FileHead(opened.read(num_bytes), status.st_size)
    except OSError as error:
        raise AdapterNotFound(f"{path.name} of {pin.id} cannot be read: {_reason(error)}") from None


def _revision(files: dict[str, tuple[Path, os.stat_result]]) -> str:
    """Changes whenever a file is written, replaced, added or taken away."""
    digest = hashlib.sha256()
    for name, (_, status) in sorted(files.items()):
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\n".encode(errors="replace"))
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else "it is no path"
