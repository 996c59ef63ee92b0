"""Streams of answers: server-sent events, clients that disconnect, and resumable requests.

An event stream is a small ASGI response: one `send` per item, and comments that keep the connection alive. With the
header `x-lorikeet-resumable` the route writes into a buffer, and a closed connection does not cancel it. The client's
own connection is the first reader of the buffer; `GET /v1/streams/{id}` makes others.
"""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lorikeet.proto.config_file import whole_number
from lorikeet.router.errors import ValidationError
from lorikeet.router.http_protocol import Exchange, header
from lorikeet.router.kept_streams import MAX_TTL_S, KeptStream, StreamReader, Streams

KEEP_ALIVE_S = 15.0
COMMENT = b":\n\n"

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event that carries `value` as JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One event that carries `value` as JSON, with its `type` as the name of the event."""
    return b"event: " + value["type"].encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


class EventWriter(ABC):
    """Writes events of tokens for a stream whose task waits, while the connection takes them. A `TokenWriter`."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        """Set once the answer has begun. None where it goes elsewhere than to a connection."""
        self.texts: list[str] = []
        """Of all tokens that it took."""
        self.written_at = 0.0
        """In the loop's time."""
        self._time = asyncio.get_running_loop().time

    def write(self, token_id: int, text: str, logprob: float) -> bool:
        """A further token, without alternatives. False, and nothing happened, if it cannot be written at once."""
        exchange, event = self.exchange, self.event_of(token_id, text, logprob)
        if exchange is None or (event and not exchange.write_chunk(event)):
            return False
        self.texts.append(text)
        self.written_at = self._time()
        return True

    @abstractmethod
    def event_of(self, token_id: int, text: str, logprob: float) -> bytes:
        """The event of one token; empty where it has none."""


class TextEvents(EventWriter):
    """Events that differ in a text alone."""

    def __init__(self) -> None:
        super().__init__()
        self._head = self._tail = b""

    def set_form(self, form: Callable[[str], bytes]) -> None:
        """`form` makes the event of a text."""
        mark = secrets.token_hex(16)
        self._head, _, self._tail = form(mark).partition(orjson.dumps(mark))

    def event_of(self, token_id: int, text: str, logprob: float) -> bytes:
        """The event of one token; empty where it has none."""
        return self._head + orjson.dumps(text) + self._tail if text else b""


class EventStream(Response):
    """Sends what `events` yields; the generator is closed when the client disconnects. `writer` may write events
    meanwhile.

    `on_close` runs however the stream ends, also when `events` was never started. Starlette's StreamingResponse would
    start a task group per response and a wrapper per chunk.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        on_close: Callable[[], None] | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        writer: EventWriter | None = None,
    ) -> None:
        super().__init__(headers=headers)
        # The length of a stream is unknown when it starts.
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._events = events
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keep_alive = _KeepAlive(send, self._keep_alive_s, self._writer)
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        scope.setdefault("state", {})["filler"] = COMMENT
        try:
            await send(start | {"writer": self._writer})
            async with ClientWatch(receive), aclosing(self._events):
                async for body in self._events:
                    keep_alive.touch()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            keep_alive.stop()
            if self._on_close is not None:
                self._on_close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _KeepAlive:
    """Sends a comment after `seconds` without an event. One timer per stream, not one per event."""

    def __init__(self, send: Send, seconds: float, writer: EventWriter | None) -> None:
        self._send = send
        self._writer = writer
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check)
        self._comment: asyncio.Task[None] | None = None

    def touch(self) -> None:
        self._last = self._loop.time()

    def _check(self) -> None:
        written_at = 0.0 if self._writer is None else self._writer.written_at
        silent = self._loop.time() - max(self._last, written_at)
        if silent >= self._seconds:
            self._comment = self._loop.create_task(self._send_comment())
            silent = 0.0
        self._timer = self._loop.call_later(self._seconds - silent, self._check)

    async def _send_comment(self) -> None:
        self._last = self._loop.time()
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    def stop(self) -> None:
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


class ClientWatch:
    """Cancels the task that entered it when the client disconnects, and turns that cancellation into ClientGone.

    The watcher can only run while that task waits inside the block, so the cancellation always lands inside the block.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self._gone and kind is not None and issubclass(kind, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise ClientGone() from None


TTL_HEADER = "x-lorikeet-resumable"
ID_HEADER = b"x-lorikeet-stream"


def wanted_ttl(scope: Scope) -> int | None:
    """The seconds for which a request asks its answer to be kept; None without. Raises ValidationError."""
    text = header(scope, TTL_HEADER.encode())
    if text is None:
        return None
    seconds = whole_number(text, 1, MAX_TTL_S)
    if seconds is None:
        raise ValidationError(f"`{TTL_HEADER}` must be a number of seconds from 1 to {MAX_TTL_S}", TTL_HEADER)
    return seconds


class Buffered:
    """What a route takes as its connection: it reads the body from the real one, and writes into a stream."""

    def __init__(self, stream: KeptStream, streams: Streams, receive: Receive) -> None:
        self._stream = stream
        self._streams = streams
        self._receive = receive
        self._is_read = False

    async def receive(self) -> Message:
        """The body; once it is complete, only the end of the stream ends the request."""
        if not self._is_read:
            message = await self._receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                self._is_read = True
                self._stream.begun.set()
            return message
        await self._stream.cancelled.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", []), (ID_HEADER, self._stream.id.encode())]
            self._stream.begin(message["status"], headers)
        elif (body := message.get("body", b"")) and body != COMMENT:  # each reader has comments of its own
            await self._streams.add(self._stream, body)


class Replay(Response):
    """Sends a stream from one of its events on, and what is added to it, until it ends or the client disconnects."""

    def __init__(self, stream: KeptStream, first_event: int = 0) -> None:
        """Raises Trimmed or OutOfRange."""
        super().__init__()
        self._stream = stream
        self._reader = StreamReader(stream, first_event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._stream
        try:
            await stream.begun.wait()
            async with ClientWatch(receive):
                await stream.started()
                if stream.status:
                    await self._replay(scope, send)
        finally:
            self._reader.close()

    async def _replay(self, scope: Scope, send: Send) -> None:
        stream = self._stream
        if stream.is_events:
            scope.setdefault("state", {})["filler"] = COMMENT
        await send({"type": "http.response.start", "status": stream.status, "headers": list(stream.headers)})
        comments = asyncio.create_task(self._send_comments(send)) if stream.is_events else None
        try:
            async with aclosing(self._reader.read()) as parts:
                async for body in parts:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            if comments is not None:
                comments.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        """Keep the connection alive while nothing is added."""
        while True:
            before = self._reader.part
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._reader.part == before:
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})


async def forward(replay: Replay, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the answer to the client that asked for it, as long as that is connected."""
    try:
        await replay(scope, receive, send)
    except ClientGone:
        pass
