"""The usage log: a record of every ended request for the operator's file, URL or both.

Requests never wait for it: a backlog is bounded, and background threads write. Records that do not fit, or cannot be
written, are counted, and the first one is logged. No record holds a credential, and texts only with `--log-texts`.
"""

import base64
import http.client
import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

import orjson
import structlog
from starlette.requests import Request

from lorikeet.router.config import RouterConfig
from lorikeet.router.metrics.groups import Counter
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Caller, GenerationRequest

Texts = str | list[str] | None
"""One text as it is, several as a list, None where texts are not logged or there are none."""


class Unwritten(Exception):
    """Why a record was lost, as a text that may be logged."""


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """The keys of one line."""

    time: str
    """Time of the request's end, in UTC."""
    request_id: str
    route: str
    status: int
    key: str | None
    """Name of the server's API key, empty for the admin key."""
    model: str
    adapter: str | None
    """Its name as the caller wrote it, once it was resolved."""
    adapter_digest: str | None
    sequences: int
    """Texts that were started."""
    prompt_tokens: int
    """Each prompt counts once, however many sequences it has."""
    cached_tokens: int
    generated_tokens: int
    """Output tokens of all sequences, including those that `best_of` did not choose."""
    drafted_tokens: int
    accepted_tokens: int
    queue_seconds: float | None
    """None for a request that was never sent to a shard."""
    first_token_seconds: float | None
    """Time to first token, from the request's arrival; None where there was no token."""
    total_seconds: float
    finish_reasons: list[str | None]
    """By sequence; null for one that did not finish."""
    error: str | None
    """The reason of a failure, as in the label of `lorax_request_failure`."""
    input: Texts
    output: Texts


@dataclass(frozen=True, slots=True)
class Ending:
    """How an HTTP request ended."""

    route: str
    status: int
    error: str | None
    began_at: float
    """In seconds of the monotonic clock, like `ended_at`."""
    ended_at: float


def record(state: Mapping[str, Any], caller: Caller, ending: Ending, model: str) -> UsageRecord:
    """Usage record of one request. `state` is the request's, to which routes add `requests` and `generations`."""
    requests: list[GenerationRequest] = state.get("requests", [])
    generations: list[Generation] = state.get("generations", [])
    adapter = requests[0].adapter if requests else None
    speculation_stats = [
        generation.speculation_stats for generation in generations if generation.speculation_stats is not None
    ]
    first_tokens = [generation.first_token_at for generation in generations if generation.first_token_at is not None]
    return UsageRecord(
        time=datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        request_id=caller.request_id,
        route=ending.route,
        status=ending.status,
        key=None if caller.key is None else caller.key.name,
        model=model,
        adapter=None if adapter is None else adapter.name,
        adapter_digest=None if adapter is None or not generations else generations[0].digest or None,
        sequences=len(generations),
        prompt_tokens=sum(len(request.prompt_ids) for request, _ in _by_prompt(generations)),
        cached_tokens=sum(generation.num_cached for _, generation in _by_prompt(generations)),
        generated_tokens=sum(generation.num_generated for generation in generations),
        drafted_tokens=sum(counts.num_drafted for counts in speculation_stats),
        accepted_tokens=sum(counts.num_accepted for counts in speculation_stats),
        queue_seconds=_rounded(generations[0].routing.waited_s) if generations else None,
        first_token_seconds=_rounded(min(first_tokens) - ending.began_at) if first_tokens else None,
        total_seconds=round(ending.ended_at - ending.began_at, 6),
        finish_reasons=[
            None if generation.finish_reason is None else generation.finish_reason.value for generation in generations
        ],
        error=ending.error,
        input=_texts([request.text for request, _ in _by_prompt(generations)], generations),
        output=_texts(["".join(generation.read_texts or ()) for generation in generations], generations),
    )


def _by_prompt(generations: list[Generation]) -> Iterator[tuple[GenerationRequest, Generation]]:
    """The first sequence of each prompt; the others share its list of ids."""
    seen: set[int] = set()
    for generation in generations:
        if id(generation.request.prompt_ids) not in seen:
            seen.add(id(generation.request.prompt_ids))
            yield generation.request, generation


def _texts(texts: list[str], generations: list[Generation]) -> Texts:
    if not generations or generations[0].read_texts is None:
        return None
    return texts[0] if len(texts) == 1 else texts


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


class LineFile:
    """Lines at the end of a file that only its owner can read.

    Each line is one write to a file opened for appending, so several routers may share one.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.path = path
        self._descriptor = _open(path)
        self._is_torn = False
        """Whether the file ends within a line that could not be written whole."""

    def append(self, line: bytes) -> None:
        """Write `line`, which ends with a newline. Raises OSError."""
        if self._is_torn:
            line = b"\n" + line
        num_written = os.write(self._descriptor, line)
        self._is_torn = num_written < len(line) and (num_written > 0 or self._is_torn)
        if num_written < len(line):
            raise OSError(0, "only a part of a line was written")

    def reopen(self) -> None:
        """Start a new file where this one was moved away; on failure the old one stays open. Raises OSError."""
        descriptor = _open(self.path)
        os.close(self._descriptor)
        self._descriptor, self._is_torn = descriptor, False

    def close(self) -> None:
        os.close(self._descriptor)


class UsageFile(LineFile):
    """`--usage-log`."""

    def __init__(self, path: str) -> None:
        """Raises OSError with one sentence."""
        try:
            super().__init__(path)
        except OSError as error:
            raise OSError(f"--usage-log {path} cannot be opened: {error.strerror}") from None

    def write(self, record: UsageRecord) -> None:
        """Raises Unwritten."""
        try:
            self.append(orjson.dumps(record) + b"\n")
        except OSError as error:
            raise Unwritten(f"{self.path}: {error.strerror}") from None

    def reopen(self) -> None:
        """Raises Unwritten."""
        try:
            super().reopen()
        except OSError as error:
            raise Unwritten(f"{self.path} cannot be opened again: {error.strerror}") from None


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


TIMEOUT_S = 5.0
RETRY_DELAYS_S = (0.1, 0.4, 1.6)
"""Before each attempt after the first."""


class UsagePost:
    """One connection, kept open; redirects are not followed."""

    def __init__(self, url: str) -> None:
        """Raises ValueError, whose text does not hold the URL."""
        parts = _parts(url)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = {"content-type": "application/json", **_authorization(parts)}
        self._connection = _connection(parts)

    def write(self, record: UsageRecord) -> None:
        """Raises Unwritten after the last attempt."""
        body = orjson.dumps(event(record))
        for delay in (*RETRY_DELAYS_S, None):
            try:
                self._send(body)
                return
            except _Retryable:
                if delay is None:
                    raise
                time.sleep(delay)

    def _send(self, body: bytes) -> None:
        """Raises Unwritten, as _Retryable where another attempt may succeed."""
        try:
            self._connection.request("POST", self._target, body, self._headers)
            response = self._connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise _Retryable(f"REQUEST_LOGGER_URL: {_reason(error)}") from None
        if response.status >= 500 or response.status == 429:
            raise _Retryable(f"REQUEST_LOGGER_URL answered {response.status}")
        if response.status >= 300:
            raise Unwritten(f"REQUEST_LOGGER_URL answered {response.status}")

    def reopen(self) -> None:
        """There is nothing to reopen."""

    def close(self) -> None:
        self._connection.close()


class _Retryable(Unwritten):
    """A failure that may be temporary."""


def event(record: UsageRecord) -> dict[str, Any]:
    """LoRAX's keys. `api_token` is always null, so that no caller's token leaves the server."""
    return {
        "tokens": record.prompt_tokens + record.generated_tokens,
        "adapter_id": record.adapter or "",
        "input": record.input,
        "output": record.output,
        "api_token": None,
        "model_id": record.model,
    }


def shown_url(url: str) -> str:
    """`url` without user, password, query and fragment, any of which may be a secret."""
    parts = _parts(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{host}{port}{parts.path}"


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:  # its text quotes the invalid part, which may be that of a password
        is_one = False
    if not is_one:
        raise ValueError("REQUEST_LOGGER_URL must be an http:// or https:// URL")
    return parts


def _authorization(parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def _connection(parts: SplitResult) -> http.client.HTTPConnection:
    assert parts.hostname is not None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)


def _reason(error: Exception) -> str:
    """Not the error's text, which may quote what the other side sent."""
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


log = structlog.get_logger()

MAX_RECORDS = 4096
MAX_CHARACTERS = 64 * 1024 * 1024
"""Maximum characters of texts in all queued records."""
NUM_POSTERS = 4
"""Threads that post, each over its own connection: a single one would be limited by the round trip."""
CLOSE_S = 5.0
"""How long the router waits at its end for queued records."""


class UsageWriter(Protocol):
    """A destination of records. Each has its own thread, so it may block."""

    def write(self, record: UsageRecord) -> None:
        """Raises Unwritten."""

    def reopen(self) -> None:
        """Open the destination again, since the operator replaced it. Raises Unwritten."""

    def close(self) -> None:
        """Called once, after the last record."""


class BackgroundWriter:
    """One backlog for all of `writers`."""

    def __init__(self, name: str, writers: Sequence[UsageWriter], dropped: Counter) -> None:
        """`dropped` counts lost records by `name`."""
        self._name = name
        self._dropped = dropped
        self._dropped.add(0, name)  # adds the key now: the dictionary is read while threads count
        self._waiting: deque[tuple[UsageRecord, int]] = deque()
        self._num_characters = 0
        self._num_to_reopen = 0
        self._is_closed = False
        self._has_logged = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(writer,), name=f"usage {name}", daemon=True) for writer in writers
        ]
        for thread in self._threads:
            thread.start()

    def put(self, record: UsageRecord) -> None:
        """Queue a record, or count it as lost; returns at once."""
        size = _num_characters(record)
        with self._changed:
            if len(self._waiting) < MAX_RECORDS and self._num_characters + size <= MAX_CHARACTERS:
                self._waiting.append((record, size))
                self._num_characters += size
                self._changed.notify()
                return
        self._drop("requests end faster than their records can be written")

    def reopen(self) -> None:
        """Every writer reopens its destination before its next record."""
        with self._changed:
            self._num_to_reopen += 1
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` for queued records, then count the rest as lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            num_left = len(self._waiting)
            self._waiting.clear()
        if num_left:
            self._drop("the server ended before they were written", num_left)

    def _work(self, writer: UsageWriter) -> None:
        num_reopened = 0
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed and num_reopened == self._num_to_reopen:
                    self._changed.wait()
                is_to_reopen, num_reopened = num_reopened != self._num_to_reopen, self._num_to_reopen
                record, size = self._waiting.popleft() if self._waiting else (None, 0)
                self._num_characters -= size
            try:
                if is_to_reopen:
                    writer.reopen()
            except Unwritten as error:
                self._drop(str(error), 0)
            if record is not None:
                self._write(writer, record)
            elif self._is_closed:
                writer.close()
                return

    def _write(self, writer: UsageWriter, record: UsageRecord) -> None:
        try:
            writer.write(record)
        except Unwritten as error:
            self._drop(str(error))
        except Exception as error:
            # Its text may hold that of the record.
            self._drop(type(error).__name__)

    def _drop(self, reason: str, number: int = 1) -> None:
        with self._changed:
            self._dropped.add(number, self._name)
            is_first, self._has_logged = not self._has_logged, True
        if is_first:
            log.warning("usage_dropped", to=self._name, reason=reason)


class UsageLog:
    """The usage log of one router."""

    def __init__(self, config: RouterConfig, metrics: Metrics, caller: Callable[[Request], Caller]) -> None:
        """`caller` returns who sent a request. Raises OSError or ValueError where a destination is unusable."""
        url, path = config.request_logger_url, config.usage_log
        self._model = config.model_name
        self._caller = caller
        posters = [] if url is None else [UsagePost(url) for _ in range(NUM_POSTERS)]
        self._file = None if path is None else BackgroundWriter("file", [UsageFile(path)], metrics.usage_dropped)
        self._url = BackgroundWriter("url", posters, metrics.usage_dropped) if posters else None

    def ended(self, request: Request, ending: Ending) -> None:
        """Record a request that has ended, however it did."""
        if self._file is None and self._url is None:
            return
        entry = record(request.scope["state"], self._caller(request), ending, self._model)
        if self._file is not None:
            self._file.put(entry)
        if self._url is not None and entry.generated_tokens:
            self._url.put(entry)

    def reopen(self) -> None:
        """The operator has moved the file away."""
        if self._file is not None:
            self._file.reopen()

    def close(self) -> None:
        """Write what is queued; it may take `CLOSE_S` per destination."""
        for writer in (self._file, self._url):
            if writer is not None:
                writer.close(CLOSE_S)


def _num_characters(record: UsageRecord) -> int:
    texts = (record.input, record.output)
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts if text is not None)
