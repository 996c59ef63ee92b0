"""Connections over real sockets: their end, pipelining, heads that are too large or too slow, and unread bodies."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.router.http_protocol.serving import Served, head, http_server, rest

WAIT = b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST /length HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def served() -> Iterator[Served]:
    with http_server(header_timeout_s=5.0) as started:
        yield started


# The end of a connection


def test_a_closed_connection_with_a_pipelined_request_ends_the_running_one(served: Served) -> None:
    served.connect(WAIT + HEALTH).close()
    served.until("gone", 2)
    assert "begin /health" not in served.application.events


def test_a_pipelined_request_that_comes_later_does_not_hide_the_end_either(served: Served) -> None:
    client = served.connect(WAIT)
    served.until("begin /wait")
    client.sendall(HEALTH)
    time.sleep(0.1)
    client.close()
    served.until("gone", 2)


def test_many_closed_pipelines_leave_nothing_behind(served: Served) -> None:
    for _ in range(100):
        served.connect(WAIT + HEALTH).close()
    end = time.monotonic() + 10
    while served.application.events.count("gone") < 100:
        assert time.monotonic() < end, served.application.events.count("gone")
        time.sleep(0.01)
    assert not served.server.server_state.connections


def test_the_connection_closes_after_an_answer_with_a_request_behind_it(served: Served) -> None:
    client = served.connect(WAIT + HEALTH)
    served.until("begin /wait")
    served.release()
    answer = rest(client)
    assert answer.count(b"HTTP/1.1 200") == 1 and answer.endswith(b"late")
    assert b"connection: close" in answer
    assert "begin /health" not in served.application.events


def test_requests_one_after_another_share_a_connection(served: Served) -> None:
    client = served.connect()
    for _ in range(3):
        client.sendall(HEALTH)
        assert head(client).startswith(b"HTTP/1.1 200")
        assert client.recv(4) == b"well"
    client.close()


def test_a_half_closed_client_gets_its_answer(served: Served) -> None:
    client = served.connect(WAIT)
    client.shutdown(socket.SHUT_WR)
    time.sleep(0.5)
    served.release()
    answer = rest(client)
    final = answer[answer.index(b"HTTP/1.1 200") :]
    assert final.endswith(b"late")
    assert answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"") == final
    assert "gone" not in served.application.events


def test_a_half_closed_client_gets_its_stream(served: Served) -> None:
    client = served.connect(WAIT.replace(b"/wait", b"/stream"))
    assert b"200" in head(client)
    client.shutdown(socket.SHUT_WR)
    time.sleep(0.3)
    served.release()
    body = rest(client)
    assert b"data: 1\n\n" in body and b"data: 2\n\n" in body and body.endswith(b"0\r\n\r\n")
    assert b"3\r\n:\n\n\r\n" in body


@pytest.mark.parametrize("path", [b"/wait", b"/stream"])
def test_a_closed_client_is_noticed(served: Served, path: bytes) -> None:
    client = served.connect(WAIT.replace(b"/wait", path))
    served.until(f"begin {path.decode()}")
    client.close()
    served.until("gone", 2)


# Heads


def test_a_head_of_the_greatest_size_is_read(served: Served) -> None:
    client = served.connect(b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"a" * 65_000 + b"\r\n\r\n")
    assert head(client).startswith(b"HTTP/1.1 200")
    client.close()


@pytest.mark.parametrize(
    "start",
    [b"GET / HTTP/1.1\r\na: ", b"GET /", b"GET / HTTP/1.1\r\n"],
    ids=["value", "url", "name"],
)
def test_a_head_that_is_too_large_is_431(served: Served, start: bytes) -> None:
    client = served.connect(start)
    with contextlib.suppress(ConnectionError):
        client.sendall(b"a" * (256 * 1024))
    answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 431 "), answer[:200]
    assert b"connection: close" in answer


@pytest.mark.parametrize(("num_fields", "status"), [(100, b"200"), (101, b"431")])
def test_at_most_a_hundred_fields(served: Served, num_fields: int, status: bytes) -> None:
    fields = b"".join(b"a%d: b\r\n" % index for index in range(num_fields))
    client = served.connect(b"GET /health HTTP/1.1\r\n" + fields + b"\r\n")
    assert head(client).startswith(b"HTTP/1.1 " + status)
    client.close()


def test_others_are_answered_next_to_an_endless_head(served: Served) -> None:
    attackers = [threading.Thread(target=_endless_head, args=(served,)) for _ in range(4)]
    for attacker in attackers:
        attacker.start()
    longest = 0.0
    while any(attacker.is_alive() for attacker in attackers):
        began_at = time.monotonic()
        client = served.connect(HEALTH)
        assert head(client).startswith(b"HTTP/1.1 200")
        client.close()
        longest = max(longest, time.monotonic() - began_at)
    assert longest < 1.0, longest


def _endless_head(served: Served) -> None:
    """16 MiB in one header field, as far as the server reads them."""
    client = served.connect(b"GET / HTTP/1.1\r\nx: ")
    with contextlib.suppress(ConnectionError):
        for _ in range(256):
            client.sendall(b"a" * 65536)
    assert b"431" in head(client)[:20]
    client.close()


def test_trailers_are_dropped(served: Served) -> None:
    client = served.connect(CHUNKED + b"3\r\nabc\r\n0\r\nauthorization: Bearer x\r\n\r\n")
    assert head(client).startswith(b"HTTP/1.1 200")
    assert "authorization" not in served.application.headers[0]
    client.close()


@pytest.mark.parametrize(
    "after",
    [b"0\r\n" + b"a: b\r\n" * 200, b"0\r\na: " + b"b" * 200_000, b"3;a=" + b"b" * 200_000],
    ids=["fields", "value", "extension"],
)
def test_trailers_and_chunk_extensions_are_limited(served: Served, after: bytes) -> None:
    client = served.connect(CHUNKED + b"3\r\nabc\r\n")
    with contextlib.suppress(ConnectionError):
        client.sendall(after)
    assert rest(client).startswith(b"HTTP/1.1 431 ")
    served.until("gone", 2)


def test_a_broken_chunk_is_400_and_ends_the_request(served: Served) -> None:
    client = served.connect(CHUNKED + b"zz\r\n")
    assert rest(client).startswith(b"HTTP/1.1 400 ")
    served.until("gone", 2)


def test_many_small_chunks_are_read(served: Served) -> None:
    client = served.connect(CHUNKED + b"1\r\na\r\n" * 8000 + b"0\r\n\r\n")
    assert head(client).startswith(b"HTTP/1.1 200")
    assert client.recv(4) == b"8000"
    client.close()


def test_a_large_body_may_come_in_many_chunks(served: Served) -> None:
    client = served.connect(CHUNKED + (b"40;a=b\r\n" + b"a" * 64 + b"\r\n") * 40_000 + b"0\r\n\r\n")
    assert head(client).startswith(b"HTTP/1.1 200")
    assert client.recv(7) == b"2560000"
    client.close()


@pytest.mark.parametrize(
    "chunks",
    [
        b"1\r\na\r\n" * 500_000,
        (b"1;a=" + b"b" * 60_000 + b"\r\na\r\n") * 50,
        (b"3f\r\n" + b"a" * 63 + b"\r\n") * 600_000,
    ],
    ids=["small", "extensions", "slightly too small"],
)
def test_small_chunks_are_limited(served: Served, chunks: bytes) -> None:
    client = served.connect(CHUNKED)
    with contextlib.suppress(ConnectionError):
        client.sendall(chunks)
    assert rest(client).startswith(b"HTTP/1.1 400 ")
    served.until("gone", 2)
    assert served.rejected == ["too_many_chunks"]
    served.until_closed()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\na: " + b"a" * 70_000, "head_too_large"),
        (CHUNKED + b"3;a=" + b"b" * 200_000, "trailers_too_large"),
        (b"nothing\r\n\r\n", "invalid_http"),
        (b"GET /", "head_timeout"),
    ],
)
def test_answers_before_any_route_have_a_reason(sent: bytes, reason: str) -> None:
    with http_server(header_timeout_s=0.3) as served:
        assert rest(served.connect(sent)).startswith(b"HTTP/1.1 4")
        assert served.rejected == [reason]


def test_an_upgrade_is_ignored(served: Served) -> None:
    fields = b"host: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    answer = rest(served.connect(b"GET /health HTTP/1.1\r\n" + fields + b"\r\n"))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"well")


# Time


def test_a_head_that_is_too_slow_is_408() -> None:
    with http_server(header_timeout_s=0.4) as served:
        client = served.connect()
        began_at = time.monotonic()
        for byte in b"GET /health HTT":
            with contextlib.suppress(ConnectionError):
                client.sendall(bytes([byte]))
            time.sleep(0.05)
        assert rest(client).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began_at < 4
        second = served.connect(HEALTH)  # the time counts per request, not per connection
        head(second)
        second.recv(4)
        time.sleep(0.6)
        second.sendall(b"GET /hea")
        assert rest(second).startswith(b"HTTP/1.1 408 ")


def test_empty_lines_behind_a_request_are_ignored() -> None:
    with http_server(header_timeout_s=0.2) as served:
        client = served.connect(WAIT + b"\r\n")
        served.until("begin /wait")
        client.sendall(b"\r\n")
        time.sleep(0.6)
        served.release()
        assert head(client).startswith(b"HTTP/1.1 200")
        client.close()


def test_a_silent_connection_is_closed() -> None:
    with http_server(header_timeout_s=0.3) as served:
        assert rest(served.connect()) == b""


def test_an_idle_connection_is_closed_after_the_keep_alive_timeout() -> None:
    with http_server(header_timeout_s=0.2, keep_alive_timeout_s=0.8) as served:
        client = served.connect(HEALTH)
        head(client)
        client.recv(4)
        time.sleep(0.4)
        client.sendall(HEALTH)
        assert head(client).startswith(b"HTTP/1.1 200")
        client.recv(4)
        began_at = time.monotonic()
        assert rest(client) == b""
        assert 0.5 < time.monotonic() - began_at < 5


def test_idle_connections_end_soon_when_another_router_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.router.http_protocol.LEAVING_KEEP_ALIVE_S", 0.2)
    with http_server() as served:
        client = served.connect(HEALTH)
        head(client)
        client.recv(4)
        served._loop.call_soon_threadsafe(served.server.leave)
        assert rest(client) == b""


# Connections per address


def test_connections_per_address_are_limited() -> None:
    with http_server(max_connections_per_address=2) as served:
        first, second = served.connect(WAIT), served.connect(WAIT)
        served.until("begin /wait")
        refused = rest(served.connect())
        assert refused.startswith(b"HTTP/1.1 429 ")
        first.close()
        served.until("gone", 2)
        third = served.connect(HEALTH)
        assert head(third).startswith(b"HTTP/1.1 200")
        for client in (second, third):
            client.close()


def test_trusted_proxies_may_open_as_many_as_they_need() -> None:
    with http_server(max_connections_per_address=1, trusted_proxies=("127.0.0.0/8",)) as served:
        clients = [served.connect(HEALTH) for _ in range(4)]
        assert all(head(client).startswith(b"HTTP/1.1 200") for client in clients)
        for client in clients:
            client.close()


# Bodies


def test_an_answer_arrives_although_its_body_is_not_read(served: Served) -> None:
    client = served.connect(b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n")
    client.sendall(b"a" * 8_000_000)
    answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer and answer.endswith(b"well")


def test_http_1_0_gets_no_chunks(served: Served) -> None:
    client = served.connect(b"GET /stream HTTP/1.0\r\n\r\n")
    first = head(client)
    assert b"transfer-encoding" not in first and b"connection: close" in first
    served.release()
    assert rest(client) == b"data: 1\n\ndata: 2\n\n"
    answer = rest(served.connect(b"POST /length HTTP/1.0\r\ncontent-length: 3\r\n\r\nabc"))
    assert answer.endswith(b"3") and b"content-length: 1" in answer
