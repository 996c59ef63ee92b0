"""Sources whose pins are hashes of a file listing: folders of this machine, and S3 and compatible stores.

Both import no torch.
"""

import asyncio
import hashlib
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lorikeet.adapters import errors
from lorikeet.adapters.errors import AdapterChanged, AdapterError, AdapterInvalid, AdapterNotFound, AdapterTooLarge
from lorikeet.adapters.refs import Pin, Ref, SourceKind
from lorikeet.adapters.sources.base import (
    CONFIG,
    MAX_SMALL_BYTES,
    PEEK_BYTES,
    SMALL_NAMES,
    FileHead,
    Resolved,
    Within,
    choose,
    gguf_file,
    parts,
    unbounded,
)
from lorikeet.adapters.sources.hub import MAX_FILE_BYTES


@dataclass(frozen=True)
class ListedFile:
    """One file of a listing."""

    size: int
    state: str
    """Changes whenever the file does."""
    handle: Any
    """For the source: the real path, or the store's metadata."""
    written_at: float = 0.0
    """Seconds since 1970; 0 where the source does not say."""


class ListedSource(ABC):
    """A source whose pins are hashes of its file listing, and whose files anyone may use who reaches the server."""

    source: ClassVar[SourceKind]

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    async def resolve(self, ref: Ref, token: str | None) -> Resolved:
        files = await asyncio.to_thread(self._listed, ref.id)
        return Resolved(Pin(self.source, ref.id, self._revision(files)), is_public=True)

    async def small_files(
        self, pin: Pin, token: str | None, names: frozenset[str] = SMALL_NAMES, max_bytes: int = MAX_SMALL_BYTES
    ) -> dict[str, bytes]:
        return await asyncio.to_thread(self._small_files, pin.id, names, max_bytes)

    def heads(self, pin: Pin, token: str | None, num_bytes: int) -> dict[str, FileHead]:
        files = self._listed(pin.id)
        return {name: self._head(pin.id, files[name], num_bytes) for name in parts(self._chosen(pin.id, files))}

    async def close(self) -> None:  # noqa: B027 (nothing is kept open)
        """Nothing is kept open."""

    @abstractmethod
    def real_ids(self, id: str) -> frozenset[str]:
        """What `id` may name, as AdapterSource describes it."""

    @abstractmethod
    def missing(self, ref: Ref, token: str | None) -> AdapterNotFound:
        """The error for a name that does not exist."""

    @abstractmethod
    def _listed(self, id: str) -> dict[str, ListedFile]:
        """The files of an adapter by name."""

    @abstractmethod
    def _head(self, id: str, file: ListedFile, num_bytes: int) -> FileHead:
        """The first bytes of a file."""

    def _revision(self, files: Mapping[str, ListedFile]) -> str:
        """Changes whenever a file is written, replaced, added or removed."""
        lines = (f"{name}\0{files[name].size}\0{files[name].state}\n" for name in sorted(files))
        return hashlib.sha256("".join(lines).encode(errors="replace")).hexdigest()

    def _chosen(self, id: str, files: Mapping[str, ListedFile]) -> list[str]:
        sizes = {name: file.size for name, file in files.items()}
        return choose(sizes, id, self._max_bytes, lambda name: self._head(id, files[name], PEEK_BYTES).content)

    def unchanged(self, pin: Pin) -> dict[str, ListedFile]:
        """The files of a pin. Raises AdapterChanged if they are no longer those that were pinned. Blocks."""
        files = self._listed(pin.id)
        if self._revision(files) != pin.revision:
            raise AdapterChanged(f"{pin.id} has changed since it was looked up")
        return files

    def _small_files(self, id: str, names: frozenset[str], max_bytes: int) -> dict[str, bytes]:
        files, contents = self._listed(id), {}
        for name in sorted(names & set(files)):
            if files[name].size > max_bytes:
                raise AdapterTooLarge(f"{name} of {id} has more than {max_bytes} bytes")
            contents[name] = self._head(id, files[name], max_bytes).content
        return contents


ARRIVING = ".arriving-"
"""Before the name of an adapter in that of the folder that receives its files, until all of them are there."""
_NO_ADAPTERS = ("models--", "datasets--", "spaces--", ARRIVING)
"""Beginnings of the names of folders of a hub's cache, and of those that receive files."""
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAX_FILES = 10_000
_MAX_NAMES = 2_000
"""Folders of the roots that are listed."""
_CARD, _CARD_CHARACTERS, _DESCRIPTION = "README.md", 16 << 10, 200
_CARD_TEMPLATE = (
    "Users (both direct and downstream) should be made aware",
    "Use the code below to get started",
    "Carbon emissions can be estimated",
)
"""How paragraphs of huggingface_hub's template begin, which PEFT saves with each adapter."""
_SAMPLE_BYTES = 64 << 10
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def _has_gguf(folder: Path) -> bool:
    """Whether a folder holds an adapter of llama.cpp, which its metadata says at the beginning, and not a model."""
    try:
        if (name := gguf_file(os.listdir(folder))) is None:
            return False
        with (folder / name).open("rb") as file:
            return b"adapter.type" in file.read(_SAMPLE_BYTES)
    except (AdapterInvalid, OSError):
        return False


class LocalSource(ListedSource):
    """Folders below `roots`; never below `hidden` ones, such as the adapter store.

    Every path of a folder or file is checked after its links are resolved, so neither `..` nor a link leaves a root.
    One exception: files of a snapshot in the layout of the hub's cache are links to its blobs.
    """

    source = SourceKind.LOCAL

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
        if (
            all(files[name].handle == own_folder / name for name in names)
            and not _file_names(own_folder) - files.keys()
        ):
            return own_folder
        for name in names:
            (folder / name).symlink_to(files[name].handle)
        return folder

    def real_ids(self, id: str) -> frozenset[str]:
        """The real paths of `id` below each of the roots."""
        if "\0" in id:
            return frozenset()
        return frozenset(os.path.realpath(root / id) for root in self._roots)

    def names(self) -> dict[str, str]:
        """The folders directly below the roots that hold an adapter, at most _MAX_NAMES: name and description."""
        folders: dict[str, Path] = {}
        for root in self._roots:
            try:
                names = sorted(os.listdir(root))
            except OSError:
                continue
            for name in names:
                if len(folders) >= _MAX_NAMES:
                    break
                if not name.startswith(".") and name not in folders and (folder := self._found(name)) is not None:
                    folders[name] = folder
        return {name: self._description(folder) for name, folder in folders.items()}

    def _found(self, name: str) -> Path | None:
        """The folder of that name, if it holds an adapter."""
        try:
            folder = self._folder(name)
            return folder if (folder / CONFIG).is_file() or _has_gguf(folder) else None
        except (AdapterNotFound, OSError, ValueError):
            return None

    def _description(self, folder: Path) -> str:
        """What its model card says, unless that is a link out of the roots or a special file."""
        card = Path(os.path.realpath(folder / _CARD))
        is_readable = (self._is_inside(card) or _is_blob(card, folder)) and card.is_file()
        return _description(card) if is_readable else ""

    def missing(self, ref: Ref, token: str | None) -> AdapterNotFound:
        return _no_folder(ref.id)

    def has(self, name: str) -> bool:
        """Whether a folder of that name lies directly below a root. Blocks."""
        try:
            return "/" not in name and bool(self._folder(name))
        except (AdapterNotFound, OSError, ValueError):
            return False

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
                        files[entry.name] = ListedFile(status.st_size, state, path, status.st_mtime)
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
        raise _no_folder(id)

    def _is_inside(self, path: Path) -> bool:
        """Whether a real path is below a root, but not in a hidden folder, a hub cache or an unfinished upload."""
        if any(path.is_relative_to(folder) for folder in self._hidden):
            return False
        if any(path.is_relative_to(folder) for folder in self._folders):
            return True
        return any(
            path.is_relative_to(root)
            and not any(part.startswith(_NO_ADAPTERS) for part in path.relative_to(root).parts)
            for root in self._roots
        )

    def _head(self, id: str, file: ListedFile, num_bytes: int) -> FileHead:
        try:
            with file.handle.open("rb") as opened:
                return FileHead(opened.read(num_bytes), file.size)
        except OSError as error:
            raise AdapterNotFound(f"{file.handle.name} of {id} cannot be read: {_reason(error)}") from None


def _description(card: Path) -> str:
    """The first paragraph of a model card that its author wrote, without metadata; "" for none."""
    try:
        with card.open(errors="replace") as file:
            text = file.read(_CARD_CHARACTERS)
    except OSError:
        return ""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    written = (
        part for part in paragraphs if part and part[0] not in "#-*|`![<" and not part.startswith(_CARD_TEMPLATE)
    )
    return next((part[:_DESCRIPTION] for part in written), "")


def _is_blob(path: Path, folder: Path) -> bool:
    """Whether a file of `folder`, REPOSITORY/snapshots/REVISION, is a link to one of the repository's blobs."""
    blobs = folder.parent.parent / "blobs"
    return folder.parent.name == "snapshots" and path.parent == blobs and _BLOB.fullmatch(path.name) is not None


def _no_folder(id: str) -> AdapterNotFound:
    return AdapterNotFound(f"there is no adapter {id!r} below the local roots of this server")


def _file_names(folder: Path) -> set[str]:
    """Names of everything but folders."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if not entry.is_dir()}


def _reason(error: Exception) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else "it is not a path"


T = TypeVar("T")
log = structlog.get_logger()

_MAX_OBJECTS = 10_000
_CHUNK = 4 << 20
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STATUS = re.compile(r"non-2xx status code: (\d+)")


class StoredObject(BaseModel):
    """What a store may say of one object. Others of its fields are not used."""

    model_config = ConfigDict(strict=True, extra="ignore")

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    size: Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]
    e_tag: Annotated[str, Field(max_length=1024)] | None
    last_modified: datetime


class S3Source(ListedSource):
    """One account of one store; `environment` configures both, and has the server's own credentials.

    An id is `bucket/key` or `s3://bucket/key`; the objects directly below the key are the adapter's files. If
    PREDIBASE_MODEL_BUCKET names a bucket, as in LoRAX, ids without `s3://` are keys in it, below
    PREDIBASE_MODEL_FOLDER. Everyone who may use this server may use what its credentials can read below the prefixes
    that the operator permits.
    """

    source = SourceKind.S3

    def __init__(self, max_bytes: int, environment: Mapping[str, str]) -> None:
        super().__init__(max_bytes)
        self._options = _s3_options(environment)
        self._home = s3_home(environment)
        self._stores: dict[str, Any] = {}

    def fetch(self, pin: Pin, token: str | None, folder: Path, within: Within = unbounded) -> Path:
        """Into `folder`, resuming an earlier attempt. The library has time limits of its own."""
        objects = self.unchanged(pin)
        for name in self._chosen(pin.id, objects):
            self._download(pin.id, objects[name].handle, folder / name)
        return folder

    def real_ids(self, id: str) -> frozenset[str]:
        """Bucket and key without empty parts and dots, which stores may ignore."""
        parts = self._whole(id).removeprefix("s3://").split("/")
        return frozenset(("/".join(part for part in parts if part not in ("", ".")),))

    def missing(self, ref: Ref, token: str | None) -> errors.AdapterNotFound:
        return _no_object(ref.id)

    def _head(self, id: str, file: ListedFile, num_bytes: int) -> FileHead:
        store, length = self._store(id), min(num_bytes, file.size)

        def read() -> bytes:
            import obstore

            return bytes(obstore.get_range(store, file.handle["path"], start=0, length=length)) if length else b""

        return FileHead(_translated(read, id), file.size)

    def _listed(self, id: str) -> dict[str, ListedFile]:
        """The objects directly below the key, by name."""
        _, key = _bucket_and_key(self._whole(id))
        store = self._store(id)
        prefix = f"{key}/" if key else ""

        def walk() -> list[Any]:
            import obstore

            objects = obstore.list_with_delimiter(store, prefix or None)["objects"]
            if len(objects) > _MAX_OBJECTS:
                raise errors.AdapterInvalid(f"{id} holds more than {_MAX_OBJECTS} objects")
            return list(objects)

        if not (objects := _translated(walk, id)):
            raise _no_object(id)
        files = {}
        for meta in objects:
            try:
                listed = StoredObject.model_validate(meta)
            except ValidationError as error:
                field = ".".join(map(str, error.errors(include_url=False, include_input=False)[0]["loc"]))
                raise errors.InvalidAnswer(
                    f"the store's description of an object of {id} is invalid: `{field}`"
                ) from None
            state = f"{listed.e_tag}\0{listed.last_modified}"
            files[listed.path.rpartition("/")[2]] = ListedFile(listed.size, state, meta)
        return files

    def _download(self, id: str, meta: Any, path: Path) -> None:
        import obstore

        store = self._store(id)
        mark = hashlib.sha256(f"{meta['e_tag']}{meta['size']}".encode()).hexdigest()[:16]
        part = path.with_name(f"{path.name}.{mark}.part")

        def copy() -> None:
            part.touch()  # an object may be empty
            done = part.stat().st_size
            if done < meta["size"]:
                options: Any = {"range": {"offset": done}} if done else {}
                if meta["e_tag"]:
                    options["if_match"] = meta["e_tag"]
                with part.open("ab") as file:
                    for chunk in obstore.get(store, meta["path"], options=options).stream(min_chunk_size=_CHUNK):
                        done += len(chunk)
                        if done > meta["size"]:
                            raise errors.AdapterTooLarge(f"{path.name} of {id} is larger than its listing says")
                        file.write(chunk)
            if done != meta["size"]:
                raise errors.SourceUnreachable(f"{path.name} of {id} ended early")

        _translated(copy, id)
        part.replace(path)

    def _whole(self, id: str) -> str:
        """With its bucket."""
        return f"{self._home}/{id}" if self._home and not id.startswith("s3://") else id

    def _store(self, id: str) -> Any:
        bucket, _ = _bucket_and_key(self._whole(id))
        if (store := self._stores.get(bucket)) is None:
            from obstore.store import S3Store

            store = _translated(lambda: S3Store(bucket, **self._options), id)
            if len(self._stores) < 1024:  # names come from callers
                self._stores[bucket] = store
        return store


def _bucket_and_key(id: str) -> tuple[str, str]:
    """Bucket and key. Raises errors.AdapterNotFound if `id` is not of this form."""
    bucket, _, key = id.removeprefix("s3://").strip("/").partition("/")
    if not _BUCKET.fullmatch(bucket) or ".." in id:
        raise errors.AdapterNotFound(f"{id!r} is not a bucket and a key: use `bucket/folder/adapter`")
    return bucket, key


def _s3_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """A custom endpoint if configured; the library takes credentials from the same environment."""
    endpoint = environment.get("S3_ENDPOINT_URL")
    if not endpoint and environment.get("R2_ACCOUNT_ID"):
        endpoint = f"https://{environment['R2_ACCOUNT_ID']}.r2.cloudflarestorage.com"
    options: dict[str, Any] = {
        "client_options": {"timeout": "60s", "connect_timeout": "5s"},
        "retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=15)},
    }
    if endpoint:
        options["endpoint"] = endpoint
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
    if not any(environment.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION")):
        options["region"] = "auto" if environment.get("R2_ACCOUNT_ID") else "us-east-1"
    return options


def _translated(call: Callable[[], T], id: str) -> T:
    """The result of `call`; the library's errors are translated to ours, without the requests that they quote."""
    from obstore import exceptions

    try:
        return call()
    except AdapterError:
        raise
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise _refused(id) from None
    except (exceptions.NotFoundError, FileNotFoundError):
        raise _no_object(id) from None
    except exceptions.PreconditionError:
        raise errors.AdapterChanged(f"{id} has changed while it was read") from None
    except (exceptions.BaseError, OSError) as error:
        # For a listing the library gives no more than this, and also quotes the request.
        status = _STATUS.search(str(error))
        if status is not None and status[1] in ("401", "403"):
            raise _refused(id) from None
        if status is not None and status[1] == "404":
            raise _no_object(id) from None
        if isinstance(error, OSError) and errors.is_full(error):
            raise errors.not_stored(error) from None
        raise errors.SourceUnreachable(f"the store of {id} does not answer: {type(error).__name__}") from None
    except (ValueError, TypeError, LookupError) as error:
        raise errors.InvalidAnswer(
            f"the store of {id} sent something else than objects: {type(error).__name__}"
        ) from None


def _no_object(id: str) -> errors.AdapterNotFound:
    return errors.AdapterNotFound(f"there is no object below s3://{id.removeprefix('s3://')}")


def _refused(id: str) -> errors.AdapterNotFound:
    """What may not be read is as what does not exist; the operator finds the difference in the log."""
    log.warning("s3_access_denied", adapter=id[:256], reason="this server's credentials have no access to it")
    return _no_object(id)


def s3_home(environment: Mapping[str, str]) -> str:
    """LoRAX's bucket and folder for ids without a bucket; "" if there is none."""
    bucket, folder = (environment.get(f"PREDIBASE_MODEL_{name}", "").strip("/") for name in ("BUCKET", "FOLDER"))
    return "/".join(part for part in (bucket, folder) if part) if bucket else ""


def is_below(id: str, prefixes: Sequence[str]) -> bool:
    """Whether a bucket and key, as `real_ids` gives them, are below one of these buckets or folders."""
    return any(id.startswith(prefix.removeprefix("s3://").strip("/") + "/") for prefix in prefixes)
