"""Adapters in S3 and stores that speak like it, read with the server's own credentials. Imports no torch.

An id is `bucket/key` or `s3://bucket/key`; the objects right below the key are the adapter's files. Whoever may ask
this server may have what its credentials open.
"""

import asyncio
import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from lorikeet.adapters.errors import (
    AdapterError,
    AdapterInvalid,
    AdapterNotAllowed,
    AdapterNotFound,
    AdapterTooLarge,
    SourceUnreachable,
    is_full,
    not_stored,
)
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

T = TypeVar("T")

_MOST_OBJECTS = 10_000
_CHUNK = 4 << 20
_STATUS = re.compile(r"non-2xx status code: (\d+)")


class S3Source:
    """One account of one store; `environment` names both."""

    def __init__(self, max_bytes: int, environment: Mapping[str, str]) -> None:
        self._max_bytes = max_bytes
        self._options = _options(environment)
        self._stores: dict[str, Any] = {}

    async def resolve(self, ref: Ref, token: str | None) -> Resolved:
        """One listing."""
        return await asyncio.to_thread(self._resolve, ref)

    async def small_files(self, pin: Pin, token: str | None, names: frozenset[str] = SMALL_NAMES) -> dict[str, bytes]:
        return await asyncio.to_thread(self._small_files, pin, names)

    def fetch(self, pin: Pin, token: str | None, folder: Path, within: Within = unbounded) -> Path:
        """Into `folder`, going on where an earlier attempt ended. The library has bounds of its own."""
        objects = self._listed(pin.id)
        if _revision(objects) != pin.revision:
            raise AdapterNotFound(f"{pin.id} has changed since it was looked up: ask again")
        for name in self._chosen(pin.id, objects):
            self._download(pin.id, objects[name], folder / name)
        return folder

    def heads(self, pin: Pin, token: str | None, num_bytes: int) -> dict[str, FileHead]:
        objects = self._listed(pin.id)
        found = {}
        for name in parts(self._chosen(pin.id, objects)):
            found[name] = FileHead(self._head(pin.id, objects[name], num_bytes), objects[name]["size"])
        return found

    async def close(self) -> None:
        """Connections go with the process."""

    def _chosen(self, id: str, objects: Mapping[str, Any]) -> list[str]:
        sizes = {name: meta["size"] for name, meta in objects.items()}
        return choose(sizes, id, self._max_bytes, lambda name: self._head(id, objects[name], PEEK_BYTES))

    def _head(self, id: str, meta: Any, num_bytes: int) -> bytes:
        return _told(functools.partial(_first, self._store(id), meta["path"], min(num_bytes, meta["size"])), id)

    def _resolve(self, ref: Ref) -> Resolved:
        return Resolved(Pin(Source.S3, ref.id, _revision(self._listed(ref.id))), is_public=True)

    def _small_files(self, pin: Pin, names: frozenset[str]) -> dict[str, bytes]:
        objects, contents = self._listed(pin.id), {}
        store = self._store(pin.id)
        for name in sorted(names & set(objects)):
            if objects[name]["size"] > MAX_SMALL_BYTES:
                raise AdapterTooLarge(f"{name} of {pin.id} has more than {MAX_SMALL_BYTES} bytes")
            read: Callable[[], bytes] = functools.partial(_whole, store, objects[name]["path"])
            contents[name] = _told(read, pin.id)
        return contents

    def _listed(self, id: str) -> dict[str, Any]:
        """What lies right below the key, by name."""
        _, key = _parts(id)
        store = self._store(id)
        prefix = f"{key}/" if key else ""

        def walk() -> dict[str, Any]:
            import obstore

            found = obstore.list_with_delimiter(store, prefix or None)["objects"]
            if len(found) > _MOST_OBJECTS:
                raise AdapterInvalid(f"{id} holds more than {_MOST_OBJECTS} objects")
            return {meta["path"].rpartition("/")[2]: meta for meta in found}

        objects = _told(walk, id)
        if not objects:
            raise _nothing(id)
        return objects

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
                            raise AdapterTooLarge(f"{path.name} of {id} is larger than its listing says")
                        file.write(chunk)
            if done != meta["size"]:
                raise SourceUnreachable(f"{path.name} of {id} ended early")

        _told(copy, id)
        part.replace(path)

    def _store(self, id: str) -> Any:
        bucket, _ = _parts(id)
        store = self._stores.get(bucket)
        if store is None:
            from obstore.store import S3Store

            store = _told(lambda: S3Store(bucket, **self._options), id)
            if len(self._stores) < 1024:  # names come from callers
                self._stores[bucket] = store
        return store


def _whole(store: Any, path: str) -> bytes:
    import obstore

    return bytes(obstore.get(store, path).bytes())


def _first(store: Any, path: str, num_bytes: int) -> bytes:
    import obstore

    return bytes(obstore.get_range(store, path, start=0, length=num_bytes)) if num_bytes else b""


def _parts(id: str) -> tuple[str, str]:
    """Bucket and key. Raises AdapterNotFound for what can be neither."""
    bucket, _, key = id.removeprefix("s3://").strip("/").partition("/")
    if not bucket or not all(character.isalnum() or character in ".-_" for character in bucket) or ".." in id:
        raise AdapterNotFound(f"{id!r} is not a bucket and a key: one looks like `bucket/folder/adapter`")
    return bucket, key


def _revision(objects: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, meta in sorted(objects.items()):
        digest.update(f"{name}\0{meta['size']}\0{meta['e_tag']}\0{meta['last_modified']}\n".encode())
    return digest.hexdigest()


def _options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Another endpoint than Amazon's; credentials are found by the library, in the same environment."""
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


def _told(call: Callable[[], T], id: str) -> T:
    """What `call` gives; the library's errors as ours, without what they quote."""
    from obstore import exceptions

    try:
        return call()
    except AdapterError:
        raise
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise _not_allowed(id) from None
    except (exceptions.NotFoundError, FileNotFoundError):
        raise _nothing(id) from None
    except exceptions.PreconditionError:
        raise AdapterNotFound(f"{id} has changed while it was read: ask again") from None
    except (exceptions.BaseError, OSError) as error:
        # Of a listing the library says no more than this, and quotes what was sent besides.
        status = _STATUS.search(str(error))
        if status is not None and status[1] in ("401", "403"):
            raise _not_allowed(id) from None
        if status is not None and status[1] == "404":
            raise _nothing(id) from None
        if isinstance(error, OSError) and is_full(error):
            raise not_stored(error) from None
        raise SourceUnreachable(f"the store of {id} gives no answer: {type(error).__name__}") from None


def _nothing(id: str) -> AdapterNotFound:
    return AdapterNotFound(f"there is nothing at s3://{id.removeprefix('s3://')}")


def _not_allowed(id: str) -> AdapterNotAllowed:
    return AdapterNotAllowed(f"this server's credentials have no right to s3://{id.removeprefix('s3://')}")
