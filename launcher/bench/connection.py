"""HTTP/1.1 connections that stay open between requests and give the pieces of a body with the times of their arrival.

The client shares the machine with the server it measures, so a C parser reads, and nothing runs per piece but a note.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

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
