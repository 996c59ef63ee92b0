"""Resumable requests: `x-lorikeet-resumable` keeps the answer for a while, and a closed connection does not cancel it.

The route runs as always, but writes into a buffer. The client's own connection is the first reader of the buffer;
`GET /v1/streams/{id}` makes others.
"""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lorikeet.proto.numbers import whole_number
from lorikeet.router.api.disconnect import ClientGone, ClientWatch
from lorikeet.router.api.sse import COMMENT, KEEP_ALIVE_SECONDS
from lorikeet.router.errors import ValidationError
from lorikeet.router.kept_streams import MAX_TTL_S, KeptStream, StreamReader, Streams

TTL_HEADER = "x-lorikeet-resumable"
ID_HEADER = b"x-lorikeet-stream"


def wanted_ttl(headers: Mapping[str, str]) -> int | None:
    """The seconds for which a request asks its answer to be kept; None without. Raises ValidationError."""
    given = headers.get(TTL_HEADER)
    if given is None:
        return None
    seconds = whole_number(given, 1, MAX_TTL_S)
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

    def __init__(self, stream: KeptStream, first_event: int = 0, keep_alive_s: float = KEEP_ALIVE_SECONDS) -> None:
        """Raises Trimmed or OutOfRange."""
        super().__init__()
        self._stream = stream
        self._reader = StreamReader(stream, first_event)
        self._keep_alive_s = keep_alive_s

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
            await asyncio.sleep(self._keep_alive_s)
            if self._reader.part == before:
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})


async def forward(replay: Replay, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the answer to the client that asked for it, as long as that is connected."""
    try:
        await replay(scope, receive, send)
    except ClientGone:
        pass
