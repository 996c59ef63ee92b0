"""Sends planned requests: in a closed loop, or when they arrive, and notes what each saw.

The client shares the machine with the server it measures, so a C parser reads the HTTP/1.1 connections, which stay open
between requests, and nothing runs per piece but a note. `APIS` are the APIs that can be measured.
"""

import asyncio
import math
import resource
import ssl
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

from lorikeet.launcher.bench.workload import Planned

Pieces = list[tuple[float, bytes]]
"""Parts of a body as they arrived, with the time in time.perf_counter()."""


@dataclass
class Response:
    """What one request got."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """By lower-case name."""
    pieces: Pieces = field(default_factory=list)
    """Pieces of the body, each with its arrival time."""

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class _Protocol(asyncio.Protocol):
    """One connection. httptools calls the methods `on_*`."""

    def __init__(self) -> None:
        self.is_usable = True
        self.was_answered = False
        """Whether a part of the newest response has arrived."""
        self._response = Response()
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[Response] | None = None
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def send(self, request: bytes, pieces: Pieces | None) -> "asyncio.Future[Response]":
        """Write a request; the result is its response. Its body is added to `pieces`, if given, while it arrives."""
        self._response = Response() if pieces is None else Response(pieces=pieces)
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.was_answered = False
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.was_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ValueError(f"not HTTP: {error}"))
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_usable = False
        self._fail(error or ConnectionResetError("the server closed the connection"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._response.pieces.append((self._now, data))

    def on_message_complete(self) -> None:
        if self._response.status == 100:  # the response itself follows
            self._response = Response(pieces=self._response.pieces)
            return
        self.is_usable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class ConnectionPool:
    """To one server."""

    def __init__(self, url: str, headers: dict[str, str], timeout_s: float) -> None:
        parts = urlsplit(url)
        self._url = url
        self._host, self._prefix = parts.hostname or "", parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"host": parts.netloc, **headers}.items())
        self._timeout_s = timeout_s
        self._idle: list[_Protocol] = []

    async def post(self, path: str, content: bytes, pieces: Pieces | None = None) -> Response:
        """The body is added to `pieces`, if given, while it arrives. Raises OSError, ValueError, or TimeoutError."""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}content-type: application/json\r\n"
        return await self._ask(f"{head}content-length: {len(content)}\r\n\r\n".encode("latin-1") + content, pieces)

    async def get(self, path: str) -> Response:
        """Raises OSError, ValueError, or TimeoutError."""
        return await self._ask(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode("latin-1"))

    async def _ask(self, request: bytes, pieces: Pieces | None = None) -> Response:
        async with asyncio.timeout(self._timeout_s):
            connection, response = await self._try_idle(request, pieces)
            if connection is None or response is None:
                connection = await self._open()
                response = await self._send(connection, request, pieces)
        if connection.is_usable:
            self._idle.append(connection)
        else:
            connection.transport.close()
        return response

    async def _try_idle(self, request: bytes, pieces: Pieces | None) -> tuple[_Protocol | None, Response | None]:
        """Ask over the connection that was idle for the shortest time. None if there is no such connection, or if
        the server closed it before it answered: the caller sends the request again (RFC 9112, 9.3.1), which is safe
        because completions change nothing in the server.
        """
        while self._idle:
            if not (idle := self._idle.pop()).is_usable:
                continue
            try:
                return idle, await self._send(idle, request, pieces)
            except ConnectionError:
                if idle.was_answered:
                    raise
        return None, None

    async def _send(self, connection: _Protocol, request: bytes, pieces: Pieces | None) -> Response:
        try:
            return await connection.send(request, pieces)
        except BaseException:
            connection.transport.abort()
            raise

    async def _open(self) -> _Protocol:
        loop = asyncio.get_running_loop()
        try:
            _, protocol = await loop.create_connection(_Protocol, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise ConnectionError(f"cannot connect to {self._url}: {error}") from None
        return protocol

    async def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.transport.abort()
        await asyncio.sleep(0)  # the loop closes the sockets


def events(pieces: Pieces) -> list[tuple[float, bytes]]:
    """The data of each server-sent event of a body, with the time at which its end arrived."""
    read_events: list[tuple[float, bytes]] = []
    pending = b""
    for time_s, piece in pieces:
        *complete, pending = (pending + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in complete:
            data = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            if data:
                read_events.append((time_s, b"\n".join(data)))
    return read_events


@dataclass
class Seen:
    """What the events of one stream have said so far."""

    token_times: list[float] = field(default_factory=list)
    """Arrival times of events with new tokens, in seconds; tokens of one step are one event."""
    num_prompt: int = 0
    num_output: int = 0
    """As the server counts them; 0 while it has not said."""
    num_tokens: int = 0
    """Tokens of LoRAX's events, which have one token each."""
    num_steps: int = 0
    """Tokens that were not drafted and accepted; 0 if the server does not say."""
    sources: Counter[str] = field(default_factory=Counter)
    """Tokens by what proposed them, if the server says so."""
    texts: list[str] = field(default_factory=list)
    error: str = ""
    is_complete: bool = False


class Api(ABC):
    """One of them, for one model."""

    path: str

    def __init__(self, model: str, fields: dict[str, Any], ignores_eos: bool) -> None:
        """`fields` go into every body."""
        self._model = model
        self._fields = fields
        self._ignores_eos = ignores_eos

    @abstractmethod
    def body(self, planned: Planned) -> dict[str, Any]:
        """Body of a request that streams."""

    def read(self, event: bytes, time_s: float, seen: Seen) -> None:
        """Add the data of an event that arrived at `time_s`."""
        if event == b"[DONE]":
            seen.is_complete = True
            return
        data = orjson.loads(event)
        if not isinstance(data, dict):
            raise ValueError(f"{event[:80]!r} is not an event of this API")
        if data.get("error"):
            error = data["error"]
            seen.error = str(error.get("message", error) if isinstance(error, dict) else error)[:500]
        else:
            self._read(data, time_s, seen)

    @abstractmethod
    def _read(self, data: dict[str, Any], time_s: float, seen: Seen) -> None: ...


class Completions(Api):
    """OpenAI's `/v1/completions`. An adapter is a model, as in vLLM and LoRAX."""

    path = "/v1/completions"

    def body(self, planned: Planned) -> dict[str, Any]:
        more = {"ignore_eos": True} if self._ignores_eos else {}
        return {
            "model": planned.adapter or self._model,
            **self._prompt(planned),
            "max_tokens": planned.num_output,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
            **self._fields,
        }

    def _prompt(self, planned: Planned) -> dict[str, Any]:
        return {"prompt": planned.prompt}

    def _read(self, data: dict[str, Any], time_s: float, seen: Seen) -> None:
        for choice in data.get("choices") or ():
            text = self._text(choice)
            if text or (choice.get("finish_reason") is None and self._counts_empty):
                seen.token_times.append(time_s)
                seen.texts.append(text)
        if usage := data.get("usage"):
            seen.num_prompt, seen.num_output = usage["prompt_tokens"], usage.get("completion_tokens", 0)

    _counts_empty = True
    """An event without text may hold a part of a character."""

    def _text(self, choice: dict[str, Any]) -> str:
        return choice.get("text") or ""


class Chat(Completions):
    """OpenAI's `/v1/chat/completions`: the prompt is one message of the user."""

    path = "/v1/chat/completions"
    _counts_empty = False  # the first event has only the role

    def _prompt(self, planned: Planned) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": planned.prompt}]}

    def _text(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta") or {}
        return delta.get("content") or delta.get("reasoning_content") or ""


class Lorax(Api):
    """LoRAX's `/generate_stream`, which text-generation-inference has too. Lorikeet's events name the source."""

    path = "/generate_stream"

    def body(self, planned: Planned) -> dict[str, Any]:
        parameters: dict[str, Any] = {"max_new_tokens": planned.num_output, "details": True, **self._fields}
        if planned.adapter is not None:
            parameters["adapter_id"] = planned.adapter
        if self._ignores_eos:
            parameters["ignore_eos_token"] = True
        return {"inputs": planned.prompt, "parameters": parameters}

    def _read(self, data: dict[str, Any], time_s: float, seen: Seen) -> None:
        if (token := data.get("token")) is not None:
            seen.num_tokens += 1
            if not token.get("skipped"):
                seen.token_times.append(time_s)
            if (source := token.get("source")) is not None:
                seen.sources[source] += 1
                seen.num_steps += not token["skipped"]
            seen.texts.append(token.get("text") or "")
        if data.get("generated_text") is not None:
            details = data.get("details") or {}
            seen.num_prompt = details.get("prompt_tokens", 0)
            seen.num_output = details.get("generated_tokens", seen.num_tokens)
            seen.is_complete = True


APIS: dict[str, type[Api]] = {"openai": Completions, "openai-chat": Chat, "lorax": Lorax}


TIER_HEADER = "x-lorikeet-adapter-tier"
"""Where the adapter was, in answers of Lorikeet."""


@dataclass
class Sample:
    """What one request saw; seconds count from when it was sent."""

    planned: Planned
    start: float
    """From the start of the load."""
    queue_time: float = 0.0
    """Seconds that it waited here for its turn, if the number of requests at a time is limited."""
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    """Between events with new tokens."""
    latency: float = 0.0
    """To the last token."""
    num_prompt: int = 0
    num_output: int = 0
    num_steps: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    tier: str = ""
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float:
        """Mean distance of output tokens after the first; 0 for one token."""
        return (self.latency - self.ttft) / (self.num_output - 1) if self.num_output > 1 else 0.0


@dataclass
class LoadResult:
    """Everything that a load has shown."""

    samples: list[Sample]
    """In the order of the plan."""
    duration: float
    client_cpu_s: float
    """Processor time of the client during the load."""
    num_processes: int = 1


@dataclass
class _TimedResponse:
    """A complete response whose events are not parsed yet. `sent` is a time of time.perf_counter()."""

    sample: Sample
    sent: float
    pieces: Pieces = field(default_factory=list)


class LoadGenerator:
    """One run against one server.

    The events of an answer are parsed after the client has sent its next request: parsing first would delay and spread
    out the requests of clients whose answers end together.
    """

    def __init__(
        self, connections: ConnectionPool, api: Api, max_concurrency: int | None, *, shows_progress: bool = False
    ) -> None:
        self._connections = connections
        self._api = api
        self._max_concurrency = max_concurrency
        self._progress = _Progress(shows_progress)

    async def warm_up(self, planned: Sequence[Planned]) -> None:
        """Send these before the measurement. Raises ValueError if one fails: the command line is probably wrong."""
        answers = await asyncio.gather(*(self._ask(request, time.perf_counter(), 0.0) for request in planned))
        if errors := [sample.error for sample in map(self._read, answers) if sample.error]:
            raise ValueError(f"a request before the measurement failed: {errors[0]}")

    async def run(self, plan: Sequence[Planned]) -> LoadResult:
        """Send the whole plan. Failed requests are in the result, not raised."""
        self._progress.begin(len(plan))
        cpu_began, began = _cpu_seconds(), time.perf_counter()
        is_closed = self._max_concurrency is not None and all(request.at == 0 for request in plan)
        answers: asyncio.Queue[tuple[int, _TimedResponse]] = asyncio.Queue()
        reading = asyncio.create_task(self._read_all(answers, len(plan)))
        try:
            await (self._closed if is_closed else self._open)(plan, began, answers)
            duration = time.perf_counter() - began
            samples = await reading
        finally:
            reading.cancel()
        self._progress.end()
        return LoadResult(samples, duration, _cpu_seconds() - cpu_began)

    async def _closed(
        self, plan: Sequence[Planned], began: float, answers: "asyncio.Queue[tuple[int, _TimedResponse]]"
    ) -> None:
        """Each client sends the next request once its last answer is complete."""
        waiting: Iterator[tuple[int, Planned]] = iter(enumerate(plan))

        async def client() -> None:
            for index, planned in waiting:
                answers.put_nowait((index, await self._ask(planned, began, time.perf_counter() - began)))

        await asyncio.gather(*(client() for _ in range(min(self._max_concurrency or 1, len(plan)))))

    async def _open(
        self, plan: Sequence[Planned], began: float, answers: "asyncio.Queue[tuple[int, _TimedResponse]]"
    ) -> None:
        """Requests are sent when they arrive, or once there is room below the limit."""
        room = asyncio.Semaphore(self._max_concurrency or len(plan))

        async def send(index: int, planned: Planned) -> None:
            arrived = time.perf_counter()
            async with room:
                answer = await self._ask(planned, began, time.perf_counter() - arrived)
            answers.put_nowait((index, answer))

        running: list[asyncio.Task[None]] = []
        for index, planned in enumerate(sorted(plan, key=lambda request: request.at)):
            if (wait := began + planned.at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            running.append(asyncio.create_task(send(index, planned)))
        await asyncio.gather(*running)

    async def _read_all(self, answers: "asyncio.Queue[tuple[int, _TimedResponse]]", count: int) -> list[Sample]:
        """Parses one answer in each pass of the event loop, so that arrivals are noted and requests sent first."""
        samples: dict[int, Sample] = {}
        for _ in range(count):
            index, answer = await answers.get()
            samples[index] = self._read(answer)
            self._progress.add(samples[index])
            await asyncio.sleep(0)
        return [samples[index] for index in range(count)]

    async def _ask(self, planned: Planned, began: float, queue_time: float) -> _TimedResponse:
        content = orjson.dumps(self._api.body(planned))
        sent = time.perf_counter()
        answer = _TimedResponse(Sample(planned, sent - began, queue_time), sent)
        try:
            response = await self._connections.post(self._api.path, content)
            answer.sample.tier = response.headers.get(TIER_HEADER, "")
            if response.status != 200:
                raise ValueError(f"status {response.status}: {response.body[:300].decode(errors='replace')}")
            answer.pieces = response.pieces
        except (OSError, ValueError, TimeoutError) as error:
            answer.sample.error = str(error) or type(error).__name__
        return answer

    def _read(self, answer: _TimedResponse) -> Sample:
        sample = answer.sample
        if sample.error:
            return sample
        try:
            seen = Seen()
            for time_s, event in events(answer.pieces):
                self._api.read(event, time_s, seen)
            _fill(sample, seen, answer.sent)
        except (ValueError, KeyError, TypeError) as error:
            sample.error = str(error) or type(error).__name__
        return sample


def _fill(sample: Sample, seen: Seen, sent: float) -> None:
    """Raises ValueError for an answer that is not complete."""
    if seen.error:
        raise ValueError(seen.error)
    if not seen.is_complete or not seen.token_times:
        raise ValueError("the stream ended early" if seen.token_times else "the stream has no token")
    times = seen.token_times
    sample.ttft, sample.latency = times[0] - sent, times[-1] - sent
    sample.itls = [later - earlier for earlier, later in pairwise(times)]
    sample.num_prompt, sample.num_output = seen.num_prompt, seen.num_output or len(times)
    sample.num_steps, sample.sources, sample.text = seen.num_steps, seen.sources, "".join(seen.texts)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class _Progress:
    """One line on standard error: rewritten on a terminal, else one every ten seconds."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._is_terminal = sys.stderr.isatty()
        self._every = 0.5 if self._is_terminal else 10.0

    def begin(self, total: int) -> None:
        self._total, self._done, self._failed, self._tokens = total, 0, 0, 0
        self._began = self._shown_at = time.perf_counter()

    def add(self, sample: Sample) -> None:
        self._done += 1
        self._failed += bool(sample.error)
        self._tokens += sample.num_output
        now = time.perf_counter()
        if self._is_shown and now - self._shown_at >= self._every:
            self._shown_at = now
            self._show(now)

    def end(self) -> None:
        if self._is_shown:
            self._show(time.perf_counter())
            if self._is_terminal:
                print(file=sys.stderr)

    def _show(self, now: float) -> None:
        speed = self._tokens / max(now - self._began, 1e-9)
        remaining_s = (self._total - self._done) * (now - self._began) / self._done if self._done else math.inf
        counts = f"{self._done}/{self._total} requests, {self._failed} failed"
        text = f"{counts}, {speed:.0f} tokens/s, {remaining_s:.0f} s left"
        print(f"\r\033[K{text}" if self._is_terminal else text, end="" if self._is_terminal else "\n", file=sys.stderr)
        sys.stderr.flush()
