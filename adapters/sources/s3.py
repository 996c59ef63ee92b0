"""Adapters in S3 and compatible stores, read with the server's own credentials. Imports no torch.

An id is `bucket/key` or `s3://bucket/key`; the objects directly below the key are the adapter's files. Where
PREDIBASE_MODEL_BUCKET names a bucket, as in LoRAX, ids without `s3://` are keys in it, below PREDIBASE_MODEL_FOLDER.
Everyone who may use this server may use what its credentials can read below the prefixes that the operator permits.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lorikeet.adapters import errors
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.refs import Pin, Ref, Source
from lorikeet.adapters.sources.base import FileHead, ListedFile, ListedSource, Within, unbounded
from lorikeet.adapters.sources.hub import MAX_FILE_BYTES

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
    """One account of one store; `environment` configures both."""

    source = Source.S3

    def __init__(self, max_bytes: int, environment: Mapping[str, str]) -> None:
        super().__init__(max_bytes)
        self._options = _options(environment)
        self._home = home(environment)
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
        return _nothing(ref.id)

    def _head(self, id: str, file: ListedFile, num_bytes: int) -> FileHead:
        store, length = self._store(id), min(num_bytes, file.size)

        def read() -> bytes:
            import obstore

            return bytes(obstore.get_range(store, file.handle["path"], start=0, length=length)) if length else b""

        return FileHead(_translated(read, id), file.size)

    def _listed(self, id: str) -> dict[str, ListedFile]:
        """The objects directly below the key, by name."""
        _, key = _parts(self._whole(id))
        store = self._store(id)
        prefix = f"{key}/" if key else ""

        def walk() -> list[Any]:
            import obstore

            objects = obstore.list_with_delimiter(store, prefix or None)["objects"]
            if len(objects) > _MAX_OBJECTS:
                raise errors.AdapterInvalid(f"{id} holds more than {_MAX_OBJECTS} objects")
            return list(objects)

        if not (objects := _translated(walk, id)):
            raise _nothing(id)
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
            done = part.stat().st_size if part.exists() else 0
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
        bucket, _ = _parts(self._whole(id))
        if (store := self._stores.get(bucket)) is None:
            from obstore.store import S3Store

            store = _translated(lambda: S3Store(bucket, **self._options), id)
            if len(self._stores) < 1024:  # names come from callers
                self._stores[bucket] = store
        return store


def _parts(id: str) -> tuple[str, str]:
    """Bucket and key. Raises errors.AdapterNotFound if `id` is not of this form."""
    bucket, _, key = id.removeprefix("s3://").strip("/").partition("/")
    if not _BUCKET.fullmatch(bucket) or ".." in id:
        raise errors.AdapterNotFound(f"{id!r} is not a bucket and a key: use `bucket/folder/adapter`")
    return bucket, key


def _options(environment: Mapping[str, str]) -> dict[str, Any]:
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
        raise _nothing(id) from None
    except exceptions.PreconditionError:
        raise errors.AdapterChanged(f"{id} has changed while it was read") from None
    except (exceptions.BaseError, OSError) as error:
        # For a listing the library gives no more than this, and also quotes the request.
        status = _STATUS.search(str(error))
        if status is not None and status[1] in ("401", "403"):
            raise _refused(id) from None
        if status is not None and status[1] == "404":
            raise _nothing(id) from None
        if isinstance(error, OSError) and errors.is_full(error):
            raise errors.not_stored(error) from None
        raise errors.SourceUnreachable(f"the store of {id} does not answer: {type(error).__name__}") from None
    except (ValueError, TypeError, LookupError) as error:
        raise errors.InvalidAnswer(
            f"the store of {id} sent something else than objects: {type(error).__name__}"
        ) from None


def _nothing(id: str) -> errors.AdapterNotFound:
    return errors.AdapterNotFound(f"there is no object below s3://{id.removeprefix('s3://')}")


def _refused(id: str) -> errors.AdapterNotFound:
    """What may not be read is as what does not exist; the operator finds the difference in the log."""
    log.warning("s3_access_denied", adapter=id[:256], reason="this server's credentials have no access to it")
    return _nothing(id)


def home(environment: Mapping[str, str]) -> str:
    """LoRAX's bucket and folder for ids without a bucket; "" if there is none."""
    bucket, folder = (environment.get(f"PREDIBASE_MODEL_{name}", "").strip("/") for name in ("BUCKET", "FOLDER"))
    return "/".join(part for part in (bucket, folder) if part) if bucket else ""


def is_below(id: str, prefixes: Sequence[str]) -> bool:
    """Whether a bucket and key, as `real_ids` gives them, are below one of these buckets or folders."""
    return any(id.startswith(prefix.removeprefix("s3://").strip("/") + "/") for prefix in prefixes)
