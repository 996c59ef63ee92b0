"""Headers and queries that hold any characters at all: never a 5xx that is a fault, no traceback, and 503 says when."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lorikeet.adapters.keys import sha256
from lorikeet.router.http_protocol import header
from tests.router.threaded_serving import ThreadedServing

NAMES = (
    "x-lorikeet-resumable", "x-request-id", "x-api-key", "authorization", "content-type", "content-encoding", "accept",
    "origin", "traceparent", "tracestate", "forwarded", "x-forwarded-for", "x-amzn-sagemaker-adapter-identifier",
    "anthropic-version", "anthropic-beta", "if-none-match", "range", "cookie", "referer", "user-agent", "expect",
    "access-control-request-method", "access-control-request-headers", "accept-encoding", "cache-control", "te",
)  # fmt: skip
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=60) | (
    st.sampled_from(
        ["0", "1", "60", "0600", "61", "001" + "0" * 300, "9" * 5002, "-1", "+5", "1e3", "1_0", "²", "0x10", " 5", "5 ",
         "30;q=1", "Bearer ", "Bearer secret", "Bearer hf_x", "Basic eDp5", "gzip", "identity", "application/json",
         "text/event-stream", "application/json; charset=utf-16", "bytes=0-" + "9" * 400, "for=[::1]:99999999",
         "1.2.3.4, " * 500, "00-" + "0" * 32 + "-" + "0" * 16 + "-00", "null", "http://[::1", "*", "a" * 8000, ""]
    )
)  # fmt: skip
QUERIES = st.dictionaries(st.sampled_from(["from", "url", "limit", "x"]), VALUES, max_size=2)
ROUTES = (
    ("POST", "/generate"), ("POST", "/generate_stream"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("POST", "/invocations"), ("POST", "/v1/messages"), ("POST", "/tokenize"), ("GET", "/v1/models"), ("GET", "/"),
    ("GET", "/health"), ("GET", "/metrics"), ("GET", "/info"), ("GET", "/v1/streams/x"), ("DELETE", "/v1/streams/x"),
    ("OPTIONS", "/v1/completions"), ("GET", "/admin/adapters"), ("POST", "/admin/adapters/refresh"),
    ("DELETE", "/v1/models/x"), ("GET", "/docs"),
)  # fmt: skip
BODY = {"inputs": "Hi", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "model": ""}
NAMED = {501, 502, 503}


@contextmanager
def started(folder: Path) -> Iterator[ThreadedServing]:
    fields: dict[str, Any] = {"adapters": True, "admin_key_sha256": sha256("admin"), "unknown_fields": "ignore"}
    fields |= {"trusted_proxies": ("127.0.0.1/32",), "cors_allow_origin": ("http://a",)}
    with ThreadedServing(folder, **fields) as server:
        server.serving.says("a")
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServing]:
    """For drawn requests, some of which leave a resumable stream for up to a minute."""
    with started(tmp_path_factory.mktemp("serving")) as server:
        yield server


@pytest.fixture
def empty_server(tmp_path: Path) -> Iterator[ThreadedServing]:
    """One without streams of other tests."""
    with started(tmp_path) as server:
        yield server


REQUESTS = st.tuples(
    st.sampled_from(ROUTES), st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3), QUERIES
)


def send(client: httpx.Client, case: Any, lines: list[Any]) -> None:
    (method, path), headers, query = case
    raw = [(name.encode(), value.encode("latin-1").strip()) for name, value in headers.items()]  # as HTTP has it
    if "content-type" not in headers:
        raw.append((b"content-type", b"application/json"))
    del lines[:]
    try:
        answer = client.request(method, path, headers=raw, params=query, json=BODY if method == "POST" else None)
    except httpx.RemoteProtocolError:
        return  # the connection ended: the framing was refused
    assert answer.status_code < 500 or answer.status_code in NAMED, (case, answer.status_code, answer.text)
    if answer.status_code in NAMED:
        assert "error" in answer.text and answer.text.strip() != "Internal server error"
    assert answer.status_code != 503 or int(answer.headers["retry-after"]) >= 1
    assert [line for line in lines if line["event"] == "unhandled_exception" or "exc_info" in line] == []


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=REQUESTS)
@example(case=(("POST", "/generate"), {"x-lorikeet-resumable": "60"}, {}))
def test_hostile_headers(case: Any, server: ThreadedServing) -> None:
    with structlog.testing.capture_logs() as lines, httpx.Client(base_url=server.url, timeout=30) as client:
        send(client, case, lines)


@pytest.mark.long
def test_ten_thousand_hostile_headers(server: ThreadedServing) -> None:
    with structlog.testing.capture_logs() as lines, httpx.Client(base_url=server.url, timeout=30) as client:

        @settings(max_examples=10_000, deadline=None)
        @given(case=REQUESTS)
        def run(case: Any) -> None:
            send(client, case, lines)

        run()


@pytest.mark.parametrize("seconds", ["0", "61", "0600", "001" + "0" * 300, "9" * 5002, "²", "+5", "5_0"])
def test_the_time_of_a_resumable_stream_is_a_number_in_range(empty_server: ThreadedServing, seconds: str) -> None:
    headers = [(b"x-lorikeet-resumable", seconds.encode("latin-1"))]
    answer = httpx.post(f"{empty_server.url}/generate", json={"inputs": "Hi"}, headers=headers)
    assert answer.status_code == 422 and "from 1 to 60" in answer.json()["error"]
    assert len(empty_server.serving.service.streams) == 0
    answer = httpx.get(f"{empty_server.url}/v1/streams/x", params={"from": seconds})
    assert answer.status_code == 404


def test_the_limit_of_kept_bytes_holds_with_details(empty_server: ThreadedServing) -> None:
    """A token weighs what its event weighs, whatever it says about alternatives."""
    streams = empty_server.serving.service.streams
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 8, "return_k_alternatives": 200, "details": True}}
    headers = {"x-lorikeet-resumable": "30", "x-request-id": f"kept-{random.random()}"}
    empty_server.serving.says("abcdefgh")
    answer = httpx.post(f"{empty_server.url}/generate_stream", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200 and len(answer.content) > 8 * 1000
    assert len(answer.content) <= streams.num_bytes < 2 * len(answer.content)


def test_the_first_of_several_headers_counts() -> None:
    scope: dict[str, Any] = {
        "headers": [(b"origin", b"http://a"), (b"x-api-key", b"caf\xe9"), (b"origin", b"http://b"), (b"empty", b"")]
    }
    names = (b"origin", b"x-api-key", b"empty", b"host")
    assert [header(scope, name) for name in names] == ["http://a", "café", "", None]
