"""Server-sent events as a small ASGI response: one `send` per item, and comments that keep the connection alive."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorikeet.router.api.disconnect import ClientWatch

KEEP_ALIVE_SECONDS = 15.0
COMMENT = b":\n\n"

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event that carries `value` as JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """The same with its `type` as the name of the event."""
    return b"event: " + value["type"].encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


class EventStream(Response):
    """Sends what `events` yields; the generator is closed when the client disconnects.

    `on_close` runs however the stream ends, also when `events` was never started. Starlette's StreamingResponse would
    start a task group per response and a wrapper per chunk.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        on_close: Callable[[], None] | None = None,
        keep_alive_s: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        super().__init__(headers=headers)
        # The length of a stream is unknown when it starts.
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._events = events
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keep_alive = _KeepAlive(send, self._keep_alive_s)
        scope.setdefault("state", {})["filler"] = COMMENT
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
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

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._check)
        self._comment: asyncio.Task[None] | None = None

    def touch(self) -> None:
        self._last = self._loop.time()

    def _check(self) -> None:
        silent = self._loop.time() - self._last
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
