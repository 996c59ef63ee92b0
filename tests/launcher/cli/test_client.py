"""The client against a server with scripted responses."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from lorikeet.launcher.cli.client import Client, ServerError


@dataclass
class Scripted:
    """The response to every request, and the requests that arrived."""

    status: int = 200
    body: bytes = b"{}"
    chunked: bool = False
    """The response ends within a chunk."""
    models: list[str] = field(default_factory=list)
    """Names for `/v1/models`, if any."""
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)


@contextmanager
def serving(scripted: Scripted) -> Iterator[Client]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length) or b"null")
            scripted.asked.append((self.path, {name.lower(): text for name, text in self.headers.items()}, body))
            answer = scripted.body
            if scripted.models and self.path == "/v1/models":
                answer = json.dumps({"data": [{"id": name} for name in scripted.models]}).encode()
            self.send_response(scripted.status)
            if scripted.chunked:
                self.send_header("transfer-encoding", "chunked")
                answer = b"ffff\r\n" + answer
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Client(f"http://127.0.0.1:{server.server_port}/", token="secret", timeout_s=20)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(text: str, full: str | None = None, details: dict[str, Any] | None = None, **more: Any) -> bytes:
    token = {"id": 7, "text": text, "logprob": -0.5, "special": False, **more}
    details = None if full is None else details or {"generated_tokens": 2}
    return b"data: " + json.dumps({"token": token, "generated_text": full, "details": details}).encode() + b"\n\n"


def test_an_answer_includes_tokens_and_sources() -> None:
    token = {"id": 7, "text": " a", "logprob": None, "special": False, "skipped": True, "source": "draft"}
    scripted = Scripted(body=json.dumps({"generated_text": " a", "details": {"tokens": [token]}}).encode())
    with serving(scripted) as client:
        answer = client.generate("b", max_new_tokens=1)
    assert answer.text == " a"
    (read,) = answer.tokens
    assert (read.id, read.text, read.skipped, read.source, read.logprob) == (7, " a", True, "draft", None)
    ((path, headers, body),) = scripted.asked
    assert path == "/generate" and headers["authorization"] == "Bearer secret"
    assert body == {"inputs": "b", "parameters": {"details": True, "max_new_tokens": 1}}


def test_a_stream_yields_tokens_then_text_and_details() -> None:
    with serving(Scripted(body=b":\n\n" + event(" a", source="lookup") + event(" b", full=" a b"))) as client:
        stream = client.stream("x")
        assert [(token.text, token.source) for token in stream] == [(" a", "lookup"), (" b", None)]
    assert (stream.text, stream.details) == (" a b", {"generated_tokens": 2})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (event(" a") + b'data: {"error": "no page is left", "error_type": "generation"}\n\n', "no page is left"),
        (event(" a"), "the stream ended early"),
    ],
)
def test_a_stream_that_fails_raises(body: bytes, said: str) -> None:
    with serving(Scripted(body=body)) as client, client.stream("x") as stream:
        tokens = iter(stream)
        assert next(tokens).text == " a"
        with pytest.raises(ServerError, match=said):
            next(tokens)


def test_a_chat_uses_openai_s_route() -> None:
    scripted = Scripted(body=b'{"choices": []}')
    with serving(scripted) as client:
        assert client.chat("hello", temperature=0) == {"choices": []}
        client.chat([{"role": "system", "content": "be brief"}])
    (path, _, first), (_, _, second) = scripted.asked
    assert path == "/v1/chat/completions"
    assert first == {"model": "", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    assert second == {"model": "", "messages": [{"role": "system", "content": "be brief"}]}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": "Input validation error: no", "error_type": "validation"}', "Input validation error: no"),
        (b'{"error": {"message": "no such model", "code": null}}', "no such model"),
        (b"bad gateway", "bad gateway"),
        (b"", "no reason was given"),
    ],
)
def test_an_error_has_the_server_s_message(body: bytes, said: str) -> None:
    with serving(Scripted(status=422, body=body)) as client:
        for call in (client.generate, client.stream, client.chat):
            with pytest.raises(ServerError, match=said) as caught:
                call("x")
            assert caught.value.status == 422
