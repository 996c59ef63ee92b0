"""A small application behind the real HTTP server, in a thread with uvloop as in production, and raw sockets to it."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvloop
from starlette.types import Receive, Scope, Send

from lorikeet.router.config import RouterConfig
from lorikeet.router.http_protocol import HttpServer

TIMEOUT_S = 20.0


class Application:
    """`/health` answers at once, `/length` with the length of the body, `/wait` when it is released, `/stream` with
    two events, one before and one after the release. What happens is noted in `events`.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.released = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.events.append(f"begin {path}")
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        answers = {"/length": self._length, "/wait": self._wait, "/stream": self._stream}
        if path in answers:
            await answers[path](scope, receive, send)
        else:
            await _answer(send, b"well")
        self.events.append(f"end {path}")

    async def _length(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.events.append("gone")
                return
            size, more = size + len(message["body"]), message["more_body"]
        await _answer(send, b"%d" % size)

    async def _wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._is_released(receive):
            await _answer(send, b"late")

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["filler"] = b":\n\n"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        if await self._is_released(receive):
            await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _is_released(self, receive: Receive) -> bool:
        """False where the client is gone first."""
        released = asyncio.ensure_future(self.released.wait())
        gone = asyncio.ensure_future(_disconnect(receive))
        await asyncio.wait([released, gone], return_when=asyncio.FIRST_COMPLETED)
        if released.done():
            gone.cancel()
            return True
        released.cancel()
        self.events.append("gone")
        return False


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Served:
    """The server and its application."""

    def __init__(self, server: HttpServer, application: Application, port: int, loop: Any, rejected: list[str]) -> None:
        self.server = server
        self.application = application
        self.port = port
        self._loop = loop
        self.rejected = rejected
        """The reasons of answers before any route."""

    def connect(self, first: bytes = b"") -> socket.socket:
        """A connection on which `first` was sent."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        client.sendall(first)
        return client

    def release(self) -> None:
        """Let `/wait` and `/stream` go on."""
        self._loop.call_soon_threadsafe(self.application.released.set)

    def until(self, event: str, within_s: float = TIMEOUT_S) -> None:
        """Wait for an event of the application."""
        end = time.monotonic() + within_s
        while event not in self.application.events:
            assert time.monotonic() < end, self.application.events
            time.sleep(0.005)

    def until_closed(self) -> None:
        """Wait until the server has closed every connection."""
        end = time.monotonic() + TIMEOUT_S
        while self.server.server_state.connections:
            assert time.monotonic() < end, "a connection stays open"
            time.sleep(0.005)


@contextmanager
def http_server(**fields: Any) -> Iterator[Served]:
    """`fields` are RouterConfig's."""
    application, ready = Application(), threading.Event()
    rejected: list[str] = []
    server = HttpServer(application, RouterConfig("model", ".", (), **fields), rejected.append)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    served = Served(server, application, listener.getsockname()[1], None, rejected)

    async def serve() -> None:
        served._loop = asyncio.get_running_loop()
        running = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        ready.set()
        await running

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        assert ready.wait(TIMEOUT_S)
        yield served
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def rest(client: socket.socket) -> bytes:
    """Everything up to the end of the connection, also where it is reset."""
    parts = []
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := client.recv(1 << 16):
            parts.append(part)
    client.close()
    return b"".join(parts)


def head(client: socket.socket) -> bytes:
    """The head of an answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(1)
        if not part:
            break
        data += part
    return data
