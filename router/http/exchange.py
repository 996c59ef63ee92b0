"""One request on a connection and its answer, as ASGI messages."""

import sys
from collections.abc import Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = (b"connection", b"close")


class Exchange(RequestResponseCycle):
    """Uvicorn's, with two differences.

    HTTP/1.0 clients get no chunks: the end of the connection ends the body. Where an answer begins before the whole
    request was read, it says that the connection closes, and the protocol closes it later, so that the answer arrives.
    """

    def __init__(self, **options: Any) -> None:
        """`options` are Uvicorn's."""
        super().__init__(**options)
        self.is_http_1_0: bool = self.scope["http_version"] == "1.0"
        """Whether the client knows neither chunks nor interim responses."""
        self.closes_late = False
        """Whether the connection has to be closed after this answer."""

    def send(self, message: Any) -> Coroutine[Any, Any, None]:
        """Send one ASGI message. Not a coroutine function, because it is called for every token."""
        if message["type"] == "http.response.start":
            return self._start(message)
        if not self.is_http_1_0:
            return RequestResponseCycle.send(self, message)
        if not message.get("more_body", False) and self.expected_content_length > sys.maxsize // 2:
            self.expected_content_length = len(message.get("body", b""))
        return super().send(message)

    async def _start(self, message: Any) -> None:
        headers = list(message.get("headers", []))
        if self.is_http_1_0 and not any(name.lower() == b"content-length" for name, _ in headers):
            self.chunked_encoding = False
            self.expected_content_length = sys.maxsize
        if self.more_body:
            self.closes_late = True
            headers = [*(pair for pair in headers if pair[0].lower() != b"connection"), _CLOSE]
        message["headers"] = headers
        await super().send(message)
        if self.closes_late:
            self.keep_alive = True  # else Uvicorn would close the connection at the end of the answer

    @property
    def filler(self) -> bytes:
        """Bytes that any client ignores at this point of the answer; empty where there are none."""
        if not self.response_started:
            return _CONTINUE
        comment: bytes = self.scope["state"].get("filler", b"")
        return b"%x\r\n%b\r\n" % (len(comment), comment) if comment and self.chunked_encoding else b""
