"""Adapters from the Hugging Face hub, each with the caller's token. Imports no torch, and its library at first use.

What everybody may have goes through the library's cache, which operators may fill beforehand; what needs a token never
does. So with HF_HUB_OFFLINE all that lies in the cache is for every caller.
"""

import asyncio
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from lorikeet.adapters.errors import (
    AdapterError,
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
    CONFIG,
    HEADS,
    HEADS_CONFIG,
    MAX_SMALL_BYTES,
    PEEK_BYTES,
    SMALL_NAMES,
    WEIGHTS,
    FileHead,
    Peek,
    Resolved,
    Within,
    choose,
    find_heads,
    parts,
    unbounded,
)

T = TypeVar("T")

NUM_THREADS = 32
SILENCES = 3
"""So many times HF_HUB_DOWNLOAD_TIMEOUT an answer may take: a hub that says a byte now and then is never silent."""
LEAST_BYTES_PER_S = 1 << 17
"""Above that, what is as slow as a line of 1 Mbit/s is waited for."""


class HubSource:
    """The hub at `endpoint`, or that HF_ENDPOINT names. In `notes` public names are remembered beyond a restart."""

    def __init__(
        self, cache: str | None, max_bytes: int, notes: str | None = None, endpoint: str | None = None
    ) -> None:
        self._endpoint = endpoint
        self._cache = cache
        self._max_bytes = max_bytes
        self._notes = None if notes is None else Path(notes)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hub")

    async def resolve(self, ref: Ref, token: str | None) -> Resolved:
        """One question to the hub, which answers for private repositories only to whom they are open."""
        try:
            async with asyncio.timeout(_bound_s()):
                return await self._in_thread(lambda: self._resolve(ref, token))
        except TimeoutError:
            return self._without_hub(ref, SourceUnreachable(f"the hub cannot be asked for {ref}: it gives no answer"))

    async def small_files(self, pin: Pin, token: str | None, names: frozenset[str] = SMALL_NAMES) -> dict[str, bytes]:
        return await self._in_thread(lambda: self._small_files(pin, token, names))

    def fetch(self, pin: Pin, token: str | None, folder: Path, within: Within = unbounded) -> Path:
        """Through the cache what is public, else into `folder`. What the cache holds whole needs no hub."""
        cached = self._snapshot(pin.id, pin.revision)
        if cached is not None and _is_whole(cached):
            choose(_sizes(cached), pin.id, self._max_bytes, _peeking(cached))
            return cached
        within(_bound_s())
        info = self._ask(Ref(Source.HUB, pin.id, pin.revision), token, sizes=True)
        files = {file.rfilename: file for file in info.siblings or [] if "/" not in file.rfilename}
        sizes = {name: file.size for name, file in files.items()}
        wanted = choose(sizes, pin.id, self._max_bytes, self._peeking(pin, token))
        where: dict[str, Any] = {"local_dir": folder} if _needs_token(info) else {"cache_dir": self._cache}
        for name in wanted:
            size = sizes[name]
            within(_bound_s(self._max_bytes if size is None else size))
            path = self._download(pin, name, token, where)
            _check(path, files[name], pin)
        return path.parent

    def heads(self, pin: Pin, token: str | None, num_bytes: int) -> dict[str, FileHead]:
        """Out of the cache where that holds it whole, else by ranges."""
        cached = self._snapshot(pin.id, pin.revision)
        if cached is not None and _is_whole(cached):
            names = parts(choose(_sizes(cached), pin.id, self._max_bytes, _peeking(cached)))
            return {name: _head(cached / name, num_bytes) for name in names}
        info = self._ask(Ref(Source.HUB, pin.id, pin.revision), token, sizes=True)
        sizes = {file.rfilename: file.size for file in info.siblings or [] if "/" not in file.rfilename}
        names = parts(choose(sizes, pin.id, self._max_bytes, self._peeking(pin, token)))
        return {name: FileHead(self._range(pin, name, token, num_bytes), sizes[name] or 0) for name in names}

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _resolve(self, ref: Ref, token: str | None) -> Resolved:
        if _is_offline():
            cached = self._snapshot(ref.id, ref.revision)
            if cached is None:
                raise AdapterNotFound(f"{ref} is not in the hub's cache, and the hub is not asked (HF_HUB_OFFLINE)")
            return Resolved(Pin(Source.HUB, ref.id, cached.name), is_public=True)
        try:
            info = self._ask(ref, token)
        except SourceUnreachable as error:
            return self._without_hub(ref, error)
        if not info.sha:
            raise AdapterNotFound(f"the hub names no commit of {ref}")
        self._note(ref, None if _needs_token(info) else info.sha)
        return Resolved(Pin(Source.HUB, ref.id, info.sha), is_public=not _needs_token(info))

    def _without_hub(self, ref: Ref, error: SourceUnreachable) -> Resolved:
        noted = self._noted(ref)
        if noted is None:
            raise error
        return Resolved(Pin(Source.HUB, ref.id, noted), is_public=True)

    def _small_files(self, pin: Pin, token: str | None, names: frozenset[str]) -> dict[str, bytes]:
        cached = self._snapshot(pin.id, pin.revision)
        if cached is not None and _is_whole(cached):
            return {name: (cached / name).read_bytes() for name in names if (cached / name).is_file()}
        info = self._ask(Ref(Source.HUB, pin.id, pin.revision), token, sizes=True)
        sizes = {file.rfilename: file.size for file in info.siblings or []}
        contents = {}
        for name in sorted(names & set(sizes)):
            size = sizes[name]
            if size is not None and size > MAX_SMALL_BYTES:
                raise AdapterTooLarge(f"{name} of {pin.id} has {size} bytes, the most is {MAX_SMALL_BYTES}")
            # not through the cache: what a caller's token opened is not for others
            contents[name] = self._range(pin, name, token, MAX_SMALL_BYTES if size is None else size)
            if size not in (None, len(contents[name])):
                raise SourceUnreachable(_other(name, pin))
        return contents

    def _ask(self, ref: Ref, token: str | None, sizes: bool = False) -> Any:
        """What the hub says of a repository. Raises leaves of AdapterError."""
        import huggingface_hub

        # False: never the token of this machine's user, which the library takes where there is none.
        api = huggingface_hub.HfApi(endpoint=self._endpoint, token=token or False)
        return _told(
            lambda: api.model_info(ref.id, revision=ref.revision, timeout=_silence_s(), files_metadata=sizes),
            ref,
            token,
        )

    def _download(self, pin: Pin, name: str, token: str | None, where: dict[str, Any]) -> Path:
        import huggingface_hub

        ref = Ref(Source.HUB, pin.id, pin.revision)
        path = _told(
            lambda: huggingface_hub.hf_hub_download(
                pin.id,
                name,
                revision=pin.revision,
                token=token or False,
                etag_timeout=_silence_s(),
                endpoint=self._endpoint,
                **where,
            ),
            ref,
            token,
        )
        return Path(str(path))

    def _peeking(self, pin: Pin, token: str | None) -> Peek:
        return lambda name: self._range(pin, name, token, PEEK_BYTES)

    def _range(self, pin: Pin, name: str, token: str | None, num_bytes: int) -> bytes:
        """The first bytes of a file, and no more of it."""
        import huggingface_hub

        if num_bytes == 0:  # there is no such range
            return b""
        utils: Any = huggingface_hub.utils
        url = huggingface_hub.hf_hub_url(pin.id, name, revision=pin.revision, endpoint=self._endpoint)
        headers = {**utils.build_hf_headers(token=token or False), "Range": f"bytes=0-{num_bytes - 1}"}
        headers["Accept-Encoding"] = "identity"  # a part of what is packed cannot be read
        end = time.monotonic() + _bound_s(num_bytes)

        def read() -> bytes:
            session = huggingface_hub.get_session()
            with session.stream("GET", url, headers=headers, follow_redirects=True, timeout=_silence_s()) as response:
                utils.hf_raise_for_status(response)
                content = bytearray()
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) >= num_bytes:
                        break
                    if time.monotonic() > end:
                        raise TimeoutError
                return bytes(content[:num_bytes])

        return _told(read, Ref(Source.HUB, pin.id, pin.revision), token)

    def _snapshot(self, id: str, revision: str | None) -> Path | None:
        """The folder in the cache, if there is one."""
        import huggingface_hub

        for name in (CONFIG, *HEADS, HEADS_CONFIG):
            found = huggingface_hub.try_to_load_from_cache(id, name, cache_dir=self._cache, revision=revision)
            if isinstance(found, str):
                return Path(found).parent
        return None

    def _note(self, ref: Ref, commit: str | None) -> None:
        """Remember that everybody may have that commit, or that it is no longer so."""
        if self._notes is None or commit == self._noted(ref):
            return
        path = self._notes / _file_name(ref)
        with suppress(OSError):  # it serves only while the hub gives no answer
            if commit is None:
                path.unlink(missing_ok=True)
                return
            self._notes.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._notes, delete=False) as file:
                json.dump({"id": str(ref), "commit": commit}, file)
            os.replace(file.name, path)

    def _noted(self, ref: Ref) -> str | None:
        if self._notes is None:
            return None
        try:
            commit = json.loads((self._notes / _file_name(ref)).read_bytes())["commit"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return commit if isinstance(commit, str) else None


def _file_name(ref: Ref) -> str:
    return hashlib.sha256(str(ref).encode()).hexdigest() + ".json"


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _silence_s() -> float:
    """So long the hub may say nothing: what the library allows its own downloads."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def _bound_s(num_bytes: int = 0) -> float:
    """So long it may take to answer with so many bytes, however it spends the time."""
    return SILENCES * _silence_s() + num_bytes / LEAST_BYTES_PER_S


def _check(path: Path, file: Any, pin: Pin) -> None:
    """Whether what was sent is what the hub says of that file. If not, nothing of it stays: it would be taken for good
    by whoever finds it in the cache.
    """
    is_right = file.size in (None, path.stat().st_size)
    if is_right and file.lfs is not None:
        with path.open("rb") as content:
            is_right = hashlib.file_digest(content, "sha256").hexdigest() == file.lfs.sha256
    if not is_right:
        path.resolve().unlink(missing_ok=True)  # in the cache a name is a link
        path.unlink(missing_ok=True)
        raise SourceUnreachable(_other(file.rfilename, pin))


def _other(name: str, pin: Pin) -> str:
    return f"the hub sent something else for {name} of {pin.id} than it says that it has"


def _needs_token(info: Any) -> bool:
    return bool(info.private) or bool(info.gated)


def _sizes(folder: Path) -> dict[str, int | None]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def _head(path: Path, num_bytes: int) -> FileHead:
    with path.open("rb") as file:
        return FileHead(file.read(num_bytes), path.stat().st_size)


def _peeking(folder: Path) -> Peek:
    return lambda name: _head(folder / name, PEEK_BYTES).content


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot holds the weights that belong to its configurations: an interrupted one may not."""
    names = {path.name for path in folder.iterdir()}
    has_heads = find_heads(names, _peeking(folder)) is not None
    if CONFIG not in names:
        return has_heads
    return _has_weights(folder) and (has_heads or not _names_heads(folder / HEADS_CONFIG))


def _names_heads(config: Path) -> bool:
    """Whether a configuration speaks of Medusa heads."""
    try:
        return config.stat().st_size <= MAX_SMALL_BYTES and b'"medusa_num_heads"' in config.read_bytes()
    except OSError:
        return False


def _has_weights(folder: Path) -> bool:
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return True
        if index.is_file():
            with suppress(ValueError, KeyError, AttributeError, OSError):
                return all(
                    (folder / part).is_file() for part in set(json.loads(index.read_bytes())["weight_map"].values())
                )
    return False


def _told(call: Callable[[], T], ref: Ref, token: str | None) -> T:
    """What `call` gives; the library's errors as ours."""
    from huggingface_hub import errors

    try:
        return call()
    except AdapterError:
        raise
    except errors.GatedRepoError:
        status = 403 if token else 401
        raise AdapterNotAllowed(f"{ref.id} is gated, and {_shown(token)} has no right to it", status=status) from None
    except errors.RevisionNotFoundError:
        raise AdapterNotFound(f"{ref.id} has no revision {ref.revision} at the hub") from None
    except errors.LocalEntryNotFoundError as error:  # of a file that the hub was asked for in vain
        raise SourceUnreachable(f"the hub cannot be asked for {ref}: {type(error.__cause__).__name__}") from None
    except errors.EntryNotFoundError:
        raise AdapterNotFound(f"a file of {ref} is gone from the hub") from None
    except (errors.RepositoryNotFoundError, errors.DisabledRepoError):
        sentence = f"{ref.id} was not found at the hub, or is private and {_shown(token)} has no right to it"
        raise AdapterNotFound(sentence) from None
    except errors.HfHubHTTPError as error:
        raise _by_status(error, ref, token) from None
    except errors.HFValidationError:
        raise AdapterNotFound(f"{ref} is not a name at the hub") from None
    except OSError as error:
        if is_full(error):
            raise not_stored(error) from None
        raise SourceUnreachable(f"the hub cannot be asked for {ref}: {type(error).__name__}") from None
    except Exception as error:  # the library lets errors of whichever HTTP client it is built on through
        raise SourceUnreachable(f"the hub cannot be asked for {ref}: {type(error).__name__}") from None


def _by_status(error: Any, ref: Ref, token: str | None) -> AdapterError:
    status = getattr(error.response, "status_code", 0)
    if status == 401:
        return AdapterNotAllowed(f"the hub does not accept {_shown(token)} for {ref.id}", status=401)
    if status == 403:
        return AdapterNotAllowed(f"{_shown(token)} has no right to {ref.id} at the hub", status=403)
    wait = str(error.response.headers.get("retry-after", "")) if status == 429 else ""
    return SourceUnreachable(
        f"the hub answered {status} when asked for {ref}", retry_after=float(wait) if wait.isdigit() else None
    )


def _shown(token: str | None) -> str:
    return "the token" if token else "a caller without a token"
