"""HTTP/1.1: Uvicorn's server and its protocol on httptools, with limits and time limits on what a client sends.

One request at a time: what a client sends before its answer is complete is discarded, and the connection closes after
the answer, so that clients send it again on another one (RFC 9112, 9.3.2). The connection is always read, because only
then its end is noticed. A client's address is that of the connection, or the one that a trusted proxy reports; IPv6
clients own at least a /64, so they are identified by it.
"""

import asyncio
import contextlib
import hashlib
import re
import secrets
import sys
from asyncio import TimerHandle
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from http import HTTPStatus
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any
from urllib.parse import unquote

import httptools
import structlog
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lorikeet.router.config import RouterConfig

_FOR = re.compile(r'(?:^|;)\s*for\s*=\s*("[^"]*"|[^;]*)', re.IGNORECASE)
_WITH_PORT = re.compile(r"\[(?P<six>[^\]]*)\](?::\d+)?|(?P<four>[^:]*)(?::\d+)?")


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of the header `name`, which is in lower case. Starlette's `Headers` encode each name anew."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


_LONGEST = 64
"""Characters of an address with a zone. A header may be longer, and must not be kept."""


class Addresses:
    """Resolves the address of each request. `trusted` are the networks of proxies whose headers are believed."""

    def __init__(self, trusted: Iterable[str] = (), *, hashed: bool = False) -> None:
        """`hashed`: log lines get hashes. Raises ValueError for a text that is no network in CIDR notation."""
        self._hash_key = secrets.token_bytes(16) if hashed else None
        self._trusted: tuple[IPv4Network | IPv6Network, ...] = tuple(map(ip_network, trusted))

    def is_trusted(self, address: str) -> bool:
        """Whether a connection from `address` is one of a trusted proxy."""
        parsed = parsed_address(address) if self._trusted else None
        return parsed is not None and any(parsed in network for network in self._trusted)

    def of(self, scope: Scope) -> str:
        """The client's IPv4 address or IPv6 network of a request; empty for a connection without an address."""
        client = scope.get("client")
        peer: str = client[0] if client else ""
        if self._trusted and self.is_trusted(peer):
            peer = self._forwarded(scope["headers"], peer)
        return identity(peer)

    def shown(self, address: str) -> str:
        """`address` for a log line: as it is, or a hash under a key that only this process knows."""
        if self._hash_key is None or not address:
            return address
        return hashlib.blake2b(address.encode(), digest_size=8, key=self._hash_key).hexdigest()

    def _forwarded(self, headers: Iterable[tuple[bytes, bytes]], peer: str) -> str:
        """The last address that no trusted proxy has. Two headers that disagree are not believed.

        A proxy sets one header and may pass the other one on as the client wrote it.
        """
        reported = set[str]()
        for name, read in _READERS.items():
            text = ",".join(value.decode("latin-1") for key, value in headers if key == name)
            if text:
                reported.add(self._outermost(read(text), peer))
        return reported.pop() if len(reported) == 1 else peer

    def _outermost(self, hops: Iterator[str], peer: str) -> str:
        """`hops` come from the nearest to the farthest; only those that trusted proxies have reported count."""
        for hop in hops:
            if parsed_address(hop) is None:
                break
            peer = hop
            if not self.is_trusted(hop):
                break
        return peer


def _of_x_forwarded_for(text: str) -> Iterator[str]:
    for part in reversed(text.split(",")):
        yield _without_port(part)


def _of_forwarded(text: str) -> Iterator[str]:
    """RFC 7239's `for`."""
    for part in reversed(text.split(",")):
        address = _FOR.search(part)
        yield _without_port(address[1].strip().strip('"')) if address else ""


_READERS = {b"x-forwarded-for": _of_x_forwarded_for, b"forwarded": _of_forwarded}


def _without_port(text: str) -> str:
    """`1.2.3.4:80`, `[::1]:80` and `::1` without the port."""
    text = text.strip()
    if text.count(":") > 1 and not text.startswith("["):
        return text
    parts = _WITH_PORT.fullmatch(text)
    return "" if parts is None else parts["six"] or parts["four"] or ""


def parsed_address(text: str) -> IPv4Address | IPv6Address | None:
    """None where `text` is no address. IPv4 addresses in IPv6 notation become IPv4."""
    return _parsed_short_address(text) if len(text) <= _LONGEST else None


@lru_cache(maxsize=4096)
def _parsed_short_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@lru_cache(maxsize=4096)
def identity(address: str) -> str:
    """What a limit per client counts by: an IPv4 address, the /64 of an IPv6 address, or the text as it is."""
    parsed = parsed_address(address)
    if parsed is None:
        return address
    if isinstance(parsed, IPv4Address):
        return str(parsed)
    return str(IPv6Network((int(parsed) >> 64 << 64, 64)))


MAX_HEAD_BYTES = 64 * 1024
"""Maximum bytes of a request line with header fields, and of everything else between two parts of a body."""
MAX_HEADER_FIELDS = 100
"""Maximum fields of a head, and of trailers."""
MAX_CHUNKS, LEAST_CHUNK_BYTES = 8192, 64
"""Chunks of a body: so many, and one more for every so many bytes of it."""
MAX_FRAMING_BYTES = 256 * 1024
"""Bytes of sizes and extensions of chunks, and of trailers, in addition to as many as the body has."""

_log = structlog.get_logger(__name__)


@dataclass
class Connections:
    """Connections of one server."""

    addresses: Addresses = field(default_factory=Addresses)
    header_timeout_s: float = 10.0
    keep_alive_timeout_s: float = 75.0
    max_per_address: int = 0
    """0 is no limit."""
    on_rejected: Callable[[str], None] = lambda _: None
    """Called with the reason of an answer that no route gives."""
    _counts: Counter[str] = field(default_factory=Counter)
    _refused: set[str] = field(default_factory=set)
    """Addresses at the limit that were logged."""

    def open(self, peer: str) -> bool:
        """Count a connection from `peer`; False where that would be too many."""
        address = identity(peer)
        if self._is_over(peer, address):
            if address not in self._refused:
                self._refused.add(address)
                _log.warning("connections_refused", client=self.shown(peer), limit=self.max_per_address)
            return False
        self._counts[address] += 1
        return True

    def shown(self, peer: str) -> str:
        """`peer` as log lines show it."""
        return self.addresses.shown(identity(peer))

    def _is_over(self, peer: str, address: str) -> bool:
        is_limited = self.max_per_address and address and not self.addresses.is_trusted(peer)
        return bool(is_limited) and self._counts[address] >= self.max_per_address

    def close(self, peer: str) -> None:
        """A counted connection is closed."""
        address = identity(peer)
        self._counts[address] -= 1
        self._refused.discard(address)
        if self._counts[address] <= 0:
            del self._counts[address]


_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = (b"connection", b"close")


class _Sent:
    """What is awaited of a message that was sent at once."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


SENT = _Sent()


class Exchange(RequestResponseCycle):
    """Uvicorn's, with three differences.

    Chunks of a body are written at once, without a coroutine for each. HTTP/1.0 clients get no chunks: the end of the
    connection ends the body. Where an answer begins before the whole request was read, it says that the connection
    closes, and the protocol closes it later, so that the answer arrives.
    """

    def __init__(self, **options: Any) -> None:
        """`options` are Uvicorn's."""
        super().__init__(**options)
        self.is_http_1_0: bool = self.scope["http_version"] == "1.0"
        """Whether the client knows neither chunks nor interim responses."""
        self.closes_late = False
        """Whether the connection has to be closed after this answer."""

    def send(self, message: Any) -> Awaitable[None]:  # type: ignore[override]
        """Send one ASGI message. Not a coroutine function, because it is called for every token."""
        if message["type"] == "http.response.start":
            return self._start(message)
        if message.get("more_body") and (body := message.get("body")) and self.write_chunk(body):
            return SENT
        if self.is_http_1_0 and not message.get("more_body", False) and self.expected_content_length > sys.maxsize // 2:
            self.expected_content_length = len(message.get("body", b""))
        return super().send(message)

    def write_chunk(self, body: bytes) -> bool:
        """Write a part of the body, which is not empty. False, and nothing happened, where that has to wait."""
        if not self.chunked_encoding or self.flow.write_paused or self.disconnected or self.response_complete:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

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
        if (writer := message.get("writer")) is not None:
            writer.exchange = self
        if self.closes_late:
            self.keep_alive = True  # else Uvicorn would close the connection at the end of the answer

    @property
    def filler(self) -> bytes:
        """Bytes that any client ignores at this point of the answer; empty where there are none."""
        if not self.response_started:
            return _CONTINUE
        comment: bytes = self.scope["state"].get("filler", b"")
        return b"%x\r\n%b\r\n" % (len(comment), comment) if comment and self.chunked_encoding else b""


LINGER_S = 2.0
"""How long input is discarded before a connection closes: closing on unread bytes resets it, and the answer is lost."""
DISCARD_PAUSE_S = 0.05
DISCARD_SLOWLY_BYTES = 16 * 1024
"""Read at once; after that much at once there is a pause."""
DISCARD_S = 30.0
DISCARD_BYTES = 64 * 1024 * 1024
"""Maximum time and bytes of discarding the rest of a body; the connection closes after LINGER_S without data."""
FIRST_PROBE_S = 0.05
LAST_PROBE_S = 5.0


class _ConnectionStop(Exception):
    """Ends the parser's run inside one of its callbacks."""


class Protocol(HttpToolsProtocol):
    """One connection."""

    cycle: Exchange

    def __init__(self, connections: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._shared = connections
        self._peer = ""
        self._is_counted = False
        self._timer: TimerHandle | None = None
        """Timer for the head of a request, or for a connection that is about to close."""
        self._probe: TimerHandle | None = None
        self._ignores_input = False
        self._reads_head = True
        self._is_half_closed = False
        self._num_pending = 0
        """Bytes since the last part of a body or the end of a head."""
        self._head_size = 0
        self._num_fields = 0
        self._num_discarded = 0
        self._is_chunked = False
        self._num_chunks = self._num_body_bytes = self._num_framing_bytes = 0
        """Of the current body."""

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = self.client[0] if self.client else ""
        self._is_counted = self._shared.open(self._peer)
        if self._is_counted:
            self._expect_head()
        else:
            self._shared.on_rejected("too_many_connections")
            self._close_with(429, "Too many connections from this address")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_counted:
            self._is_counted = False
            self._shared.close(self._peer)
        self._cancel_timers()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the connection open: the client may have closed its side only, and wait for its answer.

        With TLS that does not exist. It may also be gone. Bytes without a meaning are sent until it is known: a client
        that is gone resets the connection, and the next write fails.
        """
        exchange: Exchange | None = self.cycle
        if exchange is None or exchange.response_complete or exchange.more_body or exchange.is_http_1_0:
            return False
        if exchange.disconnected or not self.transport.can_write_eof():
            return False
        exchange.keep_alive = False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._send_probe(FIRST_PROBE_S)
        return True

    def _send_probe(self, pause_s: float) -> None:
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if filler := self.cycle.filler:
            self.transport.write(filler)
        self._probe = self.loop.call_later(pause_s, self._send_probe, min(2 * pause_s, LAST_PROBE_S))

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._probe):
            if timer is not None:
                timer.cancel()
        self._timer = self._probe = None

    # What the client sends

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._ignores_input:
            self._discard(len(data))
            return
        self._num_pending += len(data)
        is_in_body, num_before = not self._reads_head, self._num_body_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._ignores_input = True  # the request is answered without the upgrade, and the connection closes
        except httptools.HttpParserError:
            if not self._ignores_input:
                self._refuse(400, "invalid_http", "Invalid HTTP request received.")
            return
        if is_in_body and self._is_chunked:
            self._num_framing_bytes += len(data) - (self._num_body_bytes - num_before)
        if self._num_pending > MAX_HEAD_BYTES and not self._ignores_input:
            self._refuse_head()
        elif self._num_framing_bytes > MAX_FRAMING_BYTES + self._num_body_bytes and not self._ignores_input:
            self._refuse_chunks()
        elif self._reads_head and self._num_pending and self._timer is None and not self._is_answering:
            self._expect_head()

    @property
    def _is_answering(self) -> bool:
        """Whether a request runs: a head cannot begin then, and empty lines mean nothing."""
        return self.cycle is not None and not self.cycle.response_complete

    def _discard(self, num_bytes: int) -> None:
        """Read on after a pause: a client that floods the connection takes little of the event loop."""
        self._num_discarded += num_bytes
        if num_bytes >= DISCARD_SLOWLY_BYTES:
            self.flow.pause_reading()
            self.loop.call_later(DISCARD_PAUSE_S, self.flow.resume_reading)

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(self._shared.header_timeout_s, self._head_overdue)

    def _head_overdue(self) -> None:
        self._timer = None
        if self._num_pending:
            text = f"The head of the request took longer than {self._shared.header_timeout_s:g} seconds"
            self._refuse(408, "head_timeout", text)
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        what = "Request header fields" if self._reads_head else "Trailer fields or chunk extensions"
        limits = f"{MAX_HEAD_BYTES} bytes or {MAX_HEADER_FIELDS} fields"
        reason = "head_too_large" if self._reads_head else "trailers_too_large"
        self._refuse(431, reason, f"{what} too large: the limit is {limits}")

    def _refuse_chunks(self) -> None:
        text = (
            f"Too many or too small chunks: a body may have {MAX_CHUNKS}, and one more per {LEAST_CHUNK_BYTES} bytes;"
            f" their sizes and extensions may take {MAX_FRAMING_BYTES} bytes more than the body"
        )
        self._refuse(400, "too_many_chunks", text)

    def _refuse(self, status: int, reason: str, text: str) -> None:
        """Answer with `status` and `text` unless an answer has begun, and close. `reason` is for log and metrics."""
        self._shared.on_rejected(reason)
        _log.info("request_rejected", status=status, reason=reason, client=self._shared.shown(self._peer))
        has_begun = False
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            has_begun = self.cycle.response_started
        if has_begun:
            self._close_later(LINGER_S)
        else:
            self._close_with(status, text)

    def _close_with(self, status: int, text: str) -> None:
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        answer = f"{head}content-length: {len(text)}\r\nconnection: close\r\n\r\n{text}"
        self.transport.write(answer.encode())
        self._close_later(LINGER_S)

    def _close_later(self, within_s: float) -> None:
        """Discard what the client sends, and close after `within_s`, or earlier once it sends nothing."""
        self._ignores_input = True
        self._cancel_timers()
        if self.transport.is_closing():
            return
        if not self._is_half_closed and self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger(self.loop.time() + within_s, self._num_discarded)

    def _linger(self, end: float, num_before: int) -> None:
        is_over = self.loop.time() + LINGER_S > end or self._num_discarded > DISCARD_BYTES
        is_quiet = self._timer is not None and self._num_discarded == num_before
        if self._timer is not None and (is_over or is_quiet):
            self.transport.close()
            return
        self._timer = self.loop.call_later(LINGER_S, self._linger, end, self._num_discarded)

    # What the parser finds

    def on_message_begin(self) -> None:
        if self._is_answering:
            self.cycle.keep_alive = False
            self._ignores_input = True
            raise _ConnectionStop
        super().on_message_begin()
        self._head_size = self._num_fields = 0
        self._is_chunked = False
        self._num_chunks = self._num_body_bytes = self._num_framing_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head; trailers are counted and dropped."""
        self._num_fields += 1
        self._count(len(name) + len(value) + 4)
        if self._reads_head:
            self._is_chunked = self._is_chunked or name.lower() == b"transfer-encoding"
            super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        self._head_size += num_bytes
        if self._head_size > MAX_HEAD_BYTES or self._num_fields > MAX_HEADER_FIELDS:
            self._refuse_head()
            raise _ConnectionStop

    def on_headers_complete(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._reads_head = False
        self._num_pending = self._head_size = self._num_fields = 0
        version = self.parser.get_http_version()
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self.scope |= {
            "method": self.parser.get_method().decode("ascii"),
            "http_version": version,
            "path": self.root_path + (unquote(path) if "%" in path else path),
            "raw_path": self.root_path.encode("ascii") + url.path,
            "query_string": url.query or b"",
        }
        keeps_alive = version != "1.0" and self.parser.should_keep_alive() and not self.parser.should_upgrade()
        self.cycle = Exchange(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version != "1.0",
            keep_alive=keeps_alive,
            on_response=self.on_response_complete,
        )
        self._start_asgi_task(self.cycle, self.app)

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        self._num_body_bytes += len(body)
        self._num_chunks += 1
        if self._is_chunked and self._num_chunks > MAX_CHUNKS + self._num_body_bytes // LEAST_CHUNK_BYTES:
            self._refuse_chunks()
            raise _ConnectionStop
        if not self.cycle.response_complete:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._reads_head = True
        self._num_pending = 0
        self.cycle.more_body = False
        if not self.cycle.response_complete:
            self.cycle.message_event.set()

    # What the server sends

    def on_response_complete(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.cycle.closes_late:  # nobody reads the rest of the body
            self._close_later(DISCARD_S)
        else:
            self._await_next(self._shared.keep_alive_timeout_s)

    def _await_next(self, timeout_s: float) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(timeout_s, self.timeout_keep_alive_handler)

    def leave(self, timeout_s: float) -> None:
        """The server ends: an idle connection stays open for `timeout_s` at most."""
        if self.timeout_keep_alive_task is not None:
            self._await_next(timeout_s)


FLUSH_TIMEOUT_S = 5
"""How long connections may take to flush after the last generation has ended."""
LEAVING_KEEP_ALIVE_S = 5.0
"""How long an idle connection stays open once another router has taken over."""


class HttpServer(uvicorn.Server):
    """Serves one application."""

    def __init__(
        self, app: ASGIApp, config: RouterConfig, on_rejected: Callable[[str], None] = lambda _: None, **options: Any
    ) -> None:
        """`on_rejected` is called with the reason of an answer that no route gives; `options` are Uvicorn's.

        Raises ValueError where a trusted proxy is no network.
        """
        self.connections = Connections(
            Addresses(config.trusted_proxies, hashed=config.hash_client_addresses),
            config.header_timeout_s,
            config.keep_alive_timeout_s,
            config.max_connections_per_address,
            on_rejected,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Protocol, self.connections),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=4096,
                timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
                lifespan="off",
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=config.ssl_cert_reqs,
                **options,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No handlers: the router's drain first."""
        yield

    def leave(self) -> None:
        """Another router serves new connections: idle ones here end soon."""
        self.connections.keep_alive_timeout_s = LEAVING_KEEP_ALIVE_S
        for connection in list(self.server_state.connections):
            if isinstance(connection, Protocol):
                connection.leave(LEAVING_KEEP_ALIVE_S)
