"""Adapters from the Hugging Face hub, with each caller's own token. Imports no torch, and its library at first use.

Public files go through the library's cache, which operators may fill beforehand; files that need a token never do.
Therefore with HF_HUB_OFFLINE everything in the cache is available to every caller.

No hub is trusted. A schema reads its description of a repository. The library names files in its cache by headers, so
its HTTP client checks those headers first.
"""

import asyncio
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lorikeet.adapters import errors
from lorikeet.adapters.errors import AdapterError, AdapterInvalid, InvalidAnswer
from lorikeet.adapters.refs import Pin, Ref, SourceKind
from lorikeet.adapters.sources import base
from lorikeet.adapters.sources.base import SMALL_NAMES, FileHead, Peek, Resolved, Within
from lorikeet.proto.config_file import whole_number

MAX_ANSWER_BYTES, MAX_NAMES_BYTES = 4 << 20, 1 << 20
"""Of one description with the sizes of its files, and without: 10 000 files take less."""
USUAL_ANSWER_BYTES, MAX_LARGE_BYTES = 128 << 10, 32 << 20
"""Bytes that every answer may have in memory, and those that larger ones may have together, while they are read."""
MAX_FILES = 10_000
MAX_FILE_BYTES = 1 << 50
_COMMIT = r"^(?:[0-9a-f]{40}|[0-9a-f]{64})\Z"
_ETAG = re.compile(r'(?:W/)?"?(?P<digest>[0-9A-Fa-f]{32,128})(?:-[0-9]{1,5})?"?')
"""A digest of the content; `-N` follows that of a file that was uploaded in N parts."""
IS_PARSED = "lorikeet_is_parsed"
"""Marks requests whose answers are parsed by a schema of this module."""

Commit = Annotated[str, Field(pattern=_COMMIT)]
Size = Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]


class _HubAnswer(BaseModel):
    """Fields have the types that the hub documents; others are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", regex_engine="python-re")


Schema = TypeVar("Schema", bound=BaseModel)


class LargeFile(_HubAnswer):
    """What is known of a file that is stored by its hash."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\Z")]


class HubFile(_HubAnswer):
    """One file of a repository."""

    rfilename: Annotated[str, Field(min_length=1, max_length=1024)]
    size: Size | None = None
    lfs: LargeFile | None = None


class Repository(_HubAnswer):
    """A repository at one commit."""

    sha: Commit
    id: Annotated[str, Field(max_length=512)] | None = None
    private: bool | None = None
    gated: bool | Annotated[str, Field(max_length=64)] | None = None

    @property
    def needs_token(self) -> bool:
        return bool(self.private) or bool(self.gated)


class Listing(Repository):
    """A repository with its files."""

    siblings: Annotated[list[HubFile], Field(max_length=MAX_FILES)] | None = None

    def top_level(self) -> dict[str, HubFile]:
        """The files outside of folders, by name. Names that no file of this machine may have are left out."""
        names = ((file.rfilename, file) for file in self.siblings or ())
        return {name: file for name, file in names if "/" not in name and name.isprintable() and len(name) <= 255}


def is_commit(text: str) -> bool:
    """Whether `text` can be the id of a commit: it becomes a part of paths."""
    return re.match(_COMMIT, text) is not None


def parse(answer: bytes, schema: type[Schema], name: str) -> Schema:
    """The answer about the repository `name`. Raises AdapterInvalid for too many files, and InvalidAnswer."""
    if len(answer) > _max_bytes(schema):
        raise AdapterInvalid(f"the hub describes {name} in more than {_max_bytes(schema)} bytes")
    try:
        return schema.model_validate_json(answer)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(map(str, problem["loc"]))[:80]
    if problem["type"] == "too_long" and field == "siblings":
        raise AdapterInvalid(f"{name} has more than {MAX_FILES} files at the hub")
    where = f"`{field}`: " if field else ""
    raise InvalidAnswer(f"the hub's description of {name} is invalid: {where}{problem['msg']}")


@cache
def library() -> Any:
    """huggingface_hub, with a client that checks every answer from which the library makes names of files."""
    import huggingface_hub
    from huggingface_hub.utils import _http

    def make_client() -> Any:
        client = _http.default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), check_answer]}
        return client

    huggingface_hub.set_client_factory(make_client)
    return huggingface_hub


def check_answer(response: Any) -> None:
    """Check the headers that describe a file, or the commit of a repository's description. Raises InvalidAnswer."""
    if response.request.method == "HEAD":
        _check_headers(response.headers)
    elif "/api/models/" in response.request.url.path and not response.request.extensions.get(IS_PARSED):
        response.read()
        with suppress(ValueError, RecursionError):  # the library's own error says that it is not JSON
            values = json.loads(response.content)
            commit = values.get("sha") if isinstance(values, dict) else None
            if commit is not None and not (isinstance(commit, str) and is_commit(commit)):
                raise InvalidAnswer("the hub's description of a repository is invalid: `sha` is not a commit")


def _check_headers(headers: Any) -> None:
    for name in ("etag", "x-linked-etag"):
        if name in headers and not _ETAG.fullmatch(headers[name]):
            raise InvalidAnswer(f"the hub's header `{name}` of a file is not a digest")
    if "x-repo-commit" in headers and not is_commit(headers["x-repo-commit"]):
        raise InvalidAnswer("the hub's header `x-repo-commit` of a file is not a commit")
    for name in ("content-length", "x-linked-size"):
        if name in headers and whole_number(headers[name], 0, MAX_FILE_BYTES) is None:
            raise InvalidAnswer(f"the hub's header `{name}` of a file is not a size")


def describe(
    ref: Ref,
    schema: type[Schema],
    token: str | bool | None,
    timeout_s: float,
    limit_s: float,
    endpoint: str | None = None,
) -> Schema:
    """The hub's description of a repository, with its files if the schema has them.

    `token` is as the library takes it: False is none, None is that of this machine's user. Raises the library's errors,
    TimeoutError, AdapterInvalid and InvalidAnswer.
    """
    hub = library()
    url = f"{endpoint or hub.constants.ENDPOINT}/api/models/{ref.id}"
    if ref.revision is not None:
        url += f"/revision/{quote(ref.revision, safe='')}"
    if schema is Listing:
        url += "?blobs=true"
    headers = hub.utils.build_hf_headers(token=token)
    return parse(read_first(url, headers, _max_bytes(schema) + 1, timeout_s, limit_s), schema, str(ref))


def _max_bytes(schema: type[BaseModel]) -> int:
    return MAX_ANSWER_BYTES if schema is Listing else MAX_NAMES_BYTES


def read_first(url: str, headers: dict[str, str], num_bytes: int, timeout_s: float, limit_s: float) -> bytes:
    """At most the first `num_bytes` bytes of an answer; no more are transferred.

    The hub may send nothing for `timeout_s`, and all of it within `limit_s`. Raises the library's errors, TimeoutError
    and InvalidAnswer.
    """
    hub, end = library(), time.monotonic() + limit_s
    # a part of a compressed answer cannot be read, and a small one may unpack to gigabytes
    headers = {**headers, "Accept-Encoding": "identity"}
    options = {"headers": headers, "follow_redirects": True, "timeout": timeout_s, "extensions": {IS_PARSED: True}}
    with _memory.counted() as grow, hub.get_session().stream("GET", url, **options) as response:
        hub.utils.hf_raise_for_status(response)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InvalidAnswer("the hub sends compressed content that was not asked for")
        content = bytearray()
        for chunk in response.iter_raw():
            content += chunk
            grow(len(content))
            if len(content) >= num_bytes:
                break
            if time.monotonic() > end:
                raise TimeoutError
        return bytes(content[:num_bytes])


class AnswerMemory:
    """Memory of the answers that are larger than usual."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[Callable[[int], None]]:
        """A function to call with the size that one answer has by now. It raises SourceUnreachable where others take
        too much.
        """
        counted = 0

        def grow(size: int) -> None:
            nonlocal counted
            added = max(0, size - USUAL_ANSWER_BYTES) - counted
            if added:
                with self._lock:
                    if self.num_bytes > counted and self.num_bytes + added > MAX_LARGE_BYTES:
                        raise errors.SourceUnreachable(
                            "the hub sends too many large answers at once: repeat the request"
                        )
                    self.num_bytes += added
                    counted += added

        try:
            yield grow
        finally:
            with self._lock:
                self.num_bytes -= counted


_memory = AnswerMemory()

T = TypeVar("T")
Described = TypeVar("Described", bound=Repository)

NUM_THREADS = 128
"""Most of them wait for a hub."""
TIMEOUTS_PER_ANSWER = 3
"""An answer may take this many times HF_HUB_DOWNLOAD_TIMEOUT, which never ends an answer that arrives byte by byte."""
MAX_RETRY_AFTER_S = 3600
MIN_BYTES_PER_S = 1 << 17
"""A download may also take the time that it would at this rate, about 1 Mbit/s."""


class HubSource:
    """The hub at `endpoint` or HF_ENDPOINT. The folder `notes` keeps public names and their commits across restarts."""

    def __init__(self, cache: str | None, max_bytes: int, notes: str | None = None, endpoint: str | None = None):
        self._endpoint, self._cache, self._max_bytes = endpoint, cache, max_bytes
        self._notes = None if notes is None else Path(notes)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hub")

    async def resolve(self, ref: Ref, token: str | None) -> Resolved:
        """One request to the hub, which reveals private repositories only to tokens with access."""
        try:
            async with asyncio.timeout(_time_limit_s()):
                return await self._in_thread(lambda: self._resolve(ref, token))
        except TimeoutError:
            return self._without_hub(ref, _unreachable(ref, "it does not answer"))

    def real_ids(self, id: str) -> frozenset[str]:
        """The hub ignores upper and lower case."""
        return frozenset((id.lower(),))

    def missing(self, ref: Ref, token: str | None) -> errors.AdapterNotFound:
        return _missing(ref, token)

    async def small_files(
        self, pin: Pin, token: str | None, names: frozenset[str] = SMALL_NAMES, max_bytes: int = base.MAX_SMALL_BYTES
    ) -> dict[str, bytes]:
        return await self._in_thread(lambda: self._small_files(pin, token, names, max_bytes))

    def fetch(self, pin: Pin, token: str | None, folder: Path, within: Within = base.unbounded) -> Path:
        """Public files through the cache, others into `folder`. A complete cached snapshot needs no request."""
        if (cached := self._whole_snapshot(pin)) is not None:
            self._chosen(pin, _sizes(cached), _peeking(cached))
            return cached
        within(_time_limit_s())
        info, files = self._listed(pin, token)
        where: dict[str, Any] = {"local_dir": folder} if info.needs_token else {"cache_dir": self._cache}
        for name in self._chosen(pin, {name: file.size for name, file in files.items()}, self._peeking(pin, token)):
            size = files[name].size
            within(_time_limit_s(self._max_bytes if size is None else size))
            path = self._download(pin, name, token, where)
            _check(path, files[name], pin)
        return path.parent

    def heads(self, pin: Pin, token: str | None, num_bytes: int) -> dict[str, FileHead]:
        """From a complete cached snapshot, else by range requests."""
        if (cached := self._whole_snapshot(pin)) is not None:
            names = base.parts(self._chosen(pin, _sizes(cached), _peeking(cached)))
            return {name: _head(cached / name, num_bytes) for name in names}
        sizes = {name: file.size for name, file in self._listed(pin, token)[1].items()}
        names = base.parts(self._chosen(pin, sizes, self._peeking(pin, token)))
        return {name: FileHead(self._range(pin, name, token, num_bytes), sizes[name] or 0) for name in names}

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _listed(self, pin: Pin, token: str | None) -> tuple[Listing, dict[str, HubFile]]:
        """The hub's description of the repository, and its top-level files by name."""
        info = self._ask(Ref(SourceKind.HUB, pin.id, pin.revision), token, Listing)
        return info, info.top_level()

    def _chosen(self, pin: Pin, sizes: Mapping[str, int | None], peek: Peek) -> list[str]:
        return base.choose(sizes, pin.id, self._max_bytes, peek)

    def _resolve(self, ref: Ref, token: str | None) -> Resolved:
        if _is_offline():
            if (cached := self._snapshot(ref.id, ref.revision)) is None:
                raise errors.AdapterNotFound(f"{ref} is not in the hub's cache, and HF_HUB_OFFLINE forbids downloads")
            return Resolved(Pin(SourceKind.HUB, ref.id, cached.name), True, ref.id.lower())
        try:
            info = self._described(ref, token)
        except errors.SourceUnreachable as error:
            return self._without_hub(ref, error)
        self._note(ref, None if info.needs_token else info.sha)
        real_id = (info.id or ref.id).lower()  # that of a renamed repository is the new one
        return Resolved(Pin(SourceKind.HUB, ref.id, info.sha), not info.needs_token, real_id)

    def _described(self, ref: Ref, token: str | None) -> Repository:
        """The hub's description. A public repository is also for callers whose token the hub does not know, such as
        the placeholder of an OpenAI client.
        """
        try:
            return self._ask(ref, token, Repository)
        except errors.AdapterNotAllowed as rejected:
            if token is None or rejected.status != 401:
                raise
            try:
                info = self._ask(ref, None, Repository)
            except (errors.AdapterNotAllowed, errors.AdapterNotFound):
                raise rejected from None
            if info.needs_token:
                raise
            return info

    def _without_hub(self, ref: Ref, error: errors.SourceUnreachable) -> Resolved:
        if (noted := self._noted(ref)) is None:
            raise error
        return Resolved(Pin(SourceKind.HUB, ref.id, noted), True, ref.id.lower())

    def _small_files(self, pin: Pin, token: str | None, names: frozenset[str], max_bytes: int) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        if (cached := self._whole_snapshot(pin)) is not None:
            paths = {name: cached / name for name in names if (cached / name).is_file()}
            for name, path in paths.items():
                self._check_small(pin, name, path.stat().st_size, max_bytes)
                contents[name] = path.read_bytes()
            return contents
        files = self._listed(pin, token)[1]
        for name in sorted(names & set(files)):
            size = files[name].size
            self._check_small(pin, name, size, max_bytes)
            # not through the cache: files that a caller's token opened must not reach others
            contents[name] = self._range(pin, name, token, max_bytes if size is None else size)
            if size not in (None, len(contents[name])):
                raise _other(name, pin)
        return contents

    @staticmethod
    def _check_small(pin: Pin, name: str, size: int | None, max_bytes: int) -> None:
        if size is not None and size > max_bytes:
            raise errors.AdapterTooLarge(f"{name} of {pin.id} is larger than {max_bytes} bytes")

    def _ask(self, ref: Ref, token: str | None, schema: type[Described]) -> Described:
        """The hub's description of a repository. Raises leaves of AdapterError."""
        # False: never the token of this machine's user, which the library uses if none is given
        describe_at = partial(describe, ref, schema, token or False, _read_timeout_s(), _time_limit_s())
        return _translated(partial(describe_at, self._endpoint), ref, token)

    def _download(self, pin: Pin, name: str, token: str | None, where: dict[str, Any]) -> Path:
        where = where | {"token": token or False, "etag_timeout": _read_timeout_s(), "endpoint": self._endpoint}
        hub = library()
        download: Any = partial(hub.hf_hub_download, pin.id, name, revision=pin.revision, **where)
        return Path(_translated(download, Ref(SourceKind.HUB, pin.id, pin.revision), token))

    def _peeking(self, pin: Pin, token: str | None) -> Peek:
        return lambda name: self._range(pin, name, token, base.PEEK_BYTES)

    def _range(self, pin: Pin, name: str, token: str | None, num_bytes: int) -> bytes:
        """The first bytes of a file; no more are transferred."""
        if num_bytes == 0:  # an empty range cannot be requested
            return b""
        hub = library()
        url = hub.hf_hub_url(pin.id, name, revision=pin.revision, endpoint=self._endpoint)
        headers = {**hub.utils.build_hf_headers(token=token or False), "Range": f"bytes=0-{num_bytes - 1}"}
        limit_s = _time_limit_s(num_bytes)
        return _translated(
            lambda: read_first(url, headers, num_bytes, _read_timeout_s(), limit_s),
            Ref(SourceKind.HUB, pin.id, pin.revision),
            token,
        )

    def _snapshot(self, id: str, revision: str | None) -> Path | None:
        """The folder in the cache, if any."""
        hub = library()
        for name in (base.CONFIG, *base.HEADS, base.HEADS_CONFIG):
            path = hub.try_to_load_from_cache(id, name, cache_dir=self._cache, revision=revision)
            if isinstance(path, str):
                return Path(path).parent
        return None

    def _whole_snapshot(self, pin: Pin) -> Path | None:
        cached = self._snapshot(pin.id, pin.revision)
        return cached if cached is not None and _is_whole(cached) else None

    def _note(self, ref: Ref, commit: str | None) -> None:
        """Record the commit of a public name; None removes the record."""
        if self._notes is None or commit == self._noted(ref):
            return
        path = self._notes / _file_name(ref)
        with suppress(OSError):  # it is only used while the hub does not answer
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
        return commit if isinstance(commit, str) and is_commit(commit) else None


def _file_name(ref: Ref) -> str:
    return hashlib.sha256(str(ref).encode()).hexdigest() + ".json"


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _read_timeout_s() -> float:
    """How long the hub may send nothing: the library's own download timeout."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def _time_limit_s(num_bytes: int = 0) -> float:
    """How long an answer of `num_bytes` bytes may take in all."""
    return TIMEOUTS_PER_ANSWER * _read_timeout_s() + num_bytes / MIN_BYTES_PER_S


def _check(path: Path, file: HubFile, pin: Pin) -> None:
    """Compare a downloaded file with the hub's listing. A mismatch is deleted: later requests would trust the cache."""
    is_right = file.size in (None, path.stat().st_size)
    if is_right and file.lfs is not None:
        with path.open("rb") as content:
            is_right = hashlib.file_digest(content, "sha256").hexdigest() == file.lfs.sha256
    if not is_right:
        path.resolve().unlink(missing_ok=True)  # in the cache a name is a link
        path.unlink(missing_ok=True)
        raise _other(file.rfilename, pin)


def _other(name: str, pin: Pin) -> errors.SourceUnreachable:
    return errors.SourceUnreachable(f"what the hub sent for {name} of {pin.id} does not match its listing")


def _sizes(folder: Path) -> dict[str, int | None]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def _head(path: Path, num_bytes: int) -> FileHead:
    with path.open("rb") as file:
        return FileHead(file.read(num_bytes), path.stat().st_size)


def _peeking(folder: Path) -> Peek:
    return lambda name: _head(folder / name, base.PEEK_BYTES).content


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot holds the weights that its configurations need: an interrupted download may not."""
    names = {path.name for path in folder.iterdir()}
    has_heads = base.find_heads(names, _peeking(folder)) is not None
    if base.CONFIG not in names:
        return has_heads
    return _has_weights(folder) and (has_heads or not _names_heads(folder / base.HEADS_CONFIG))


def _names_heads(config: Path) -> bool:
    """Whether a configuration describes Medusa heads."""
    try:
        return config.stat().st_size <= base.MAX_SMALL_BYTES and b'"medusa_num_heads"' in config.read_bytes()
    except OSError:
        return False


def _has_weights(folder: Path) -> bool:
    for name in base.WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return True
        if index.is_file():
            with suppress(ValueError, KeyError, AttributeError, OSError):
                names = set(json.loads(index.read_bytes())["weight_map"].values())
                return all((folder / name).is_file() for name in names)
    return False


def _translated(call: Callable[[], T], ref: Ref, token: str | None) -> T:
    """The result of `call`; the library's errors are translated to ours."""
    from huggingface_hub import errors as hub_errors

    try:
        return call()
    except AdapterError:
        raise
    except hub_errors.GatedRepoError:
        status = 403 if token else 401
        raise errors.AdapterNotAllowed(f"{ref.id} is gated, and {_shown(token)} has no access", status=status) from None
    except hub_errors.RevisionNotFoundError:
        raise errors.AdapterNotFound(f"{ref.id} has no revision {ref.revision} at the hub") from None
    except hub_errors.LocalEntryNotFoundError as error:  # the request for the file failed
        raise _unreachable(ref, type(error.__cause__).__name__) from None
    except hub_errors.EntryNotFoundError:
        raise errors.AdapterNotFound(f"a file of {ref} no longer exists at the hub") from None
    except (hub_errors.RepositoryNotFoundError, hub_errors.DisabledRepoError) as error:
        if token and error.response.status_code == 401:  # hubs say 404 for what a valid token has no access to
            raise _by_status(error, ref, token) from None
        raise _missing(ref, token) from None
    except hub_errors.HfHubHTTPError as error:
        raise _by_status(error, ref, token) from None
    except hub_errors.HFValidationError:
        raise errors.AdapterNotFound(f"{ref} is not a name at the hub") from None
    except Exception as error:  # the library passes on errors of the HTTP client that it is built on
        if isinstance(error, OSError) and errors.is_full(error):
            raise errors.not_stored(error) from None
        raise _unreachable(ref, type(error).__name__) from None


def _missing(ref: Ref, token: str | None) -> errors.AdapterNotFound:
    sentence = f"{ref.id} was not found at the hub, or is private and {_shown(token)} has no access to it"
    return errors.AdapterNotFound(sentence)


def _by_status(error: Any, ref: Ref, token: str | None) -> AdapterError:
    status = getattr(error.response, "status_code", 0)
    if status == 401:
        return errors.AdapterNotAllowed(f"the hub does not accept {_shown(token)} for {ref.id}", status=401)
    if status == 403:
        return errors.AdapterNotAllowed(f"{_shown(token)} has no access to {ref.id} at the hub", status=403)
    wait = str(error.response.headers.get("retry-after", "")) if status == 429 else ""
    retry_after = whole_number(wait, 1, MAX_RETRY_AFTER_S)
    return errors.SourceUnreachable(f"the hub answered {status} for {ref}", retry_after=retry_after)


def _unreachable(ref: Ref, reason: str) -> errors.SourceUnreachable:
    return errors.SourceUnreachable(f"the hub cannot be reached for {ref}: {reason}")


def _shown(token: str | None) -> str:
    return "the token" if token else "a caller without a token"
