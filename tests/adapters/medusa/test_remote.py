"""Texts from a server: the requests, the checks of its answers, and the errors."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.errors import HeadsError
from lorikeet.adapters.medusa import texts
from lorikeet.adapters.medusa.target import Target
from lorikeet.adapters.medusa.texts import EncodedPrompt, TextStore, Writing
from tests.adapters.medusa import small

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """`answer` turns the body of a POST to /generate into status and JSON."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, content = answer(body) if self.path == "/generate" else (404, {})
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def whole(target: Target, body: dict[str, Any]) -> dict[str, Any]:
    """What a server of this target answers."""
    ids = target.tokenizer(body["inputs"])["input_ids"]
    with LOCK:
        written = target.write([ids], body["parameters"]["max_new_tokens"])[0]
    return {"generated_text": "", "details": {"prompt_tokens": len(ids), "tokens": [{"id": i} for i in written]}}


LOCK = threading.Lock()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return small.target(small.base(tmp_path_factory.mktemp("base")))


def ask(target: Target, url: str, store: TextStore, adapter: str | None = None) -> list[EncodedPrompt]:
    encoded = texts.encode_prompts(small.PROMPTS, target.tokenizer)
    texts.write_with_server(url, adapter, encoded, store, Writing(6, 3, lambda done, of: None))
    return encoded


def test_a_servers_texts_equal_the_targets(target: Target) -> None:
    store = TextStore(None, {})
    with server(lambda body: (200, whole(target, body))) as url:
        encoded = ask(target, url + "/", store)
    assert [list(store.outputs[n]) for n in range(len(encoded))] == [
        target.write([prompt.ids], 6)[0] for prompt in encoded
    ]


def test_requests_are_greedy_with_the_adapter_and_only_for_missing_texts(target: Target, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        return 200, whole(target, body)

    store = TextStore(None, {})
    store.add([(0, [1]), (2, [1])])
    with server(answer) as url:
        ask(target, url, store, "owner/adapter")
        assert {body["inputs"] for body in bodies} == set(small.PROMPTS) - {small.PROMPTS[0], small.PROMPTS[2]}
        parameters = {"max_new_tokens": 6, "do_sample": False, "details": True}
        hub = parameters | {"adapter_id": "owner/adapter", "adapter_source": "hub"}
        assert all(body["parameters"] == hub for body in bodies)
        bodies.clear()
        ask(target, url, TextStore(None, {}), str(tmp_path))
        local = parameters | {"adapter_id": str(tmp_path), "adapter_source": "local"}
        assert all(body["parameters"] == local for body in bodies)


def test_a_busy_server_is_retried(target: Target) -> None:
    calls = iter([(429, {"error": "busy"}), (503, {"error": "starting"})])
    store = TextStore(None, {})
    with server(lambda body: next(calls, None) or (200, whole(target, body))) as url:
        ask(target, url, store)
    assert len(store.outputs) == len(small.PROMPTS)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((422, {"error": "no such adapter"}), "answers with status 422: no such adapter"),
        ((500, "oops"), "answers with status 500"),
        ((200, {"generated_text": "x"}), r"answers without details\.tokens"),
        ((200, {"details": {"prompt_tokens": 99, "tokens": []}}), "counts 99 tokens .* serves another model"),
    ],
)
def test_the_servers_errors_are_reported(target: Target, answer: tuple[int, Any], sentence: str) -> None:
    with server(lambda body: answer) as url, pytest.raises(HeadsError, match=sentence):
        ask(target, url, TextStore(None, {}))


def test_an_unreachable_server(target: Target) -> None:
    with server(lambda body: (200, {})) as url:
        pass
    with pytest.raises(HeadsError, match="cannot be reached"):
        ask(target, url, TextStore(None, {}))
