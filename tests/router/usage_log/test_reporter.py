"""Usage records of requests on every route, however they end, in the operator's file and at the URL."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.adapters.keys import sha256
from tests.router.serving import MODEL_ID, Serving, serving
from tests.router.usage_log.receiver import Receiver

pytestmark = pytest.mark.anyio

CHAT = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as started:
        yield started


@pytest.fixture
async def logged(tmp_path: Path, anyio_backend: str) -> AsyncIterator[tuple[Serving, Path]]:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: team-a, sha256: {sha256('secret a')}}}\n")
    path = tmp_path / "usage.jsonl"
    fields = {"usage_log": str(path), "keys_path": str(keys), "keys_optional": True}
    async with serving(tmp_path, adapters=True, **fields) as server:
        yield server, path


async def lines(server: Serving, path: Path, number: int) -> list[dict[str, Any]]:
    """The lines of the file, once there are `number`."""

    def texts() -> list[str]:
        return path.read_text().splitlines()

    await server.shard.until(lambda: len(texts()) >= number)
    assert len(texts()) == number
    return [json.loads(line) for line in texts()]


async def test_a_line_for_every_route(logged: tuple[Serving, Path]) -> None:
    server, path = logged
    server.says("abc")
    server.adapter("mine")
    sent: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"inputs": "Hi"}),
        ("/generate_stream", {"inputs": "Hi", "parameters": {"adapter_id": "mine"}}),
        ("/", {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}}),
        ("/predict", {"prompt": "Hi", "max_new_tokens": 3}),
        ("/v1/completions", {"model": MODEL_ID, "prompt": ["Hi", "Hiho"], "n": 2, "max_tokens": 3}),
        ("/v1/completions", {"model": MODEL_ID, "prompt": "Hi", "n": 3, "stream": True, "max_tokens": 3}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 3}),
        ("/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": 3}),
    ]
    for number, (route, body) in enumerate(sent):
        headers = {"authorization": "Bearer secret a", "x-request-id": f"request-{number}"}
        response = await server.client.post(route, json=body, headers=headers)
        assert response.status_code == 200, response.text
    await server.client.post("/tokenize", json={"inputs": "Hi"})
    await server.client.get("/startup")
    records = await lines(server, path, len(sent))
    assert [line["route"] for line in records] == [route for route, _ in sent]
    assert [line["request_id"] for line in records] == [f"request-{number}" for number in range(len(sent))]
    assert {line["key"] for line in records} == {"team-a"}
    assert {line["model"] for line in records} == {MODEL_ID}
    assert {line["status"] for line in records} == {200}
    assert {line["error"] for line in records} == {None}
    assert [line["sequences"] for line in records] == [1, 1, 2, 1, 4, 3, 1, 1]
    chat = len(server.ids("[user]Hi[assistant]"))
    assert [line["prompt_tokens"] for line in records] == [2, 2, 2, 2, 6, 2, chat, chat]
    assert [line["generated_tokens"] for line in records] == [3, 3, 6, 3, 12, 9, 3, 3]
    for line in records:
        assert line["finish_reasons"] == ["length"] * line["sequences"]
        assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["total_seconds"] < 60
        assert line["input"] is None and line["output"] is None
    assert [line["adapter"] for line in records] == [None, "mine", *[None] * 6]
    assert records[1]["adapter_digest"] and records[0]["adapter_digest"] is None
    assert path.stat().st_mode & 0o777 == 0o600


async def test_requests_that_fail(logged: tuple[Serving, Path]) -> None:
    server, path = logged
    server.says("abc", error="broken")
    headers = {"authorization": "Bearer secret a", "content-type": "application/json"}
    sent: list[tuple[str, str]] = [
        ("/generate", "{"),
        ("/generate", '{"inputs": ""}'),
        ("/generate_stream", '{"inputs": ""}'),
        ("/generate", '{"inputs": "Hi", "parameters": {"adapter_id": "nowhere"}}'),
        ("/generate", '{"inputs": "Hi"}'),
        ("/generate_stream", '{"inputs": "Hi"}'),
        ("/v1/chat/completions", json.dumps({**CHAT, "stream": True})),
    ]
    for route, body in sent:
        await server.client.post(route, content=body, headers=headers)
    records = await lines(server, path, len(sent))
    errors = ["bad_request", "validation", "validation", "download_adapter", *["generation"] * 3]
    assert [line["error"] for line in records] == errors
    assert [line["status"] for line in records] == [400, 422, 200, 404, 424, 200, 200]
    assert {line["key"] for line in records} == {"team-a"}
    assert {line["adapter"] for line in records} == {None}
    for line in records[:4]:
        assert (line["sequences"], line["prompt_tokens"], line["queue_seconds"]) == (0, 0, None)
    for line in records[4:]:
        assert (line["sequences"], line["generated_tokens"], line["finish_reasons"]) == (1, 3, [None])


@pytest.mark.parametrize(
    ("route", "body"),
    [("/generate", {"inputs": "Hi"}), ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2})],
)
async def test_a_disconnect(logged: tuple[Serving, Path], route: str, body: dict[str, Any]) -> None:
    server, path = logged
    server.says("ab", hangs=True)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        request = asyncio.create_task(client.post(route, json=body))
        num_sequences = int(body.get("n", 1))
        await server.shard.until(lambda: server.metrics.generated_tokens.values.get("", 0) == 2 * num_sequences)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    (line,) = await lines(server, path, 1)
    assert (line["status"], line["error"]) == (499, "dropped")
    assert (line["sequences"], line["generated_tokens"]) == (num_sequences, 2 * num_sequences)


async def test_records_of_an_overloaded_server_name_the_caller(tmp_path: Path, anyio_backend: str) -> None:
    path = tmp_path / "usage.jsonl"
    async with serving(tmp_path, adapters=True, usage_log=str(path), max_concurrent_requests=1) as server:
        server.says("ab", hangs=True)
        first = asyncio.create_task(server.client.post("/generate", json={"inputs": "Hi"}))
        await server.shard.until(lambda: server.shard.num_running == 1)
        body = {"inputs": "Hi", "parameters": {"adapter_id": server.adapter("mine")}}
        assert (await server.client.post("/generate", json=body)).status_code == 429
        (line,) = await lines(server, path, 1)
        # It is rejected before its adapter is resolved.
        assert (line["error"], line["adapter"], line["sequences"]) == ("overloaded", None, 0)
        first.cancel()
        await server.idle()


async def test_drafts_are_counted(logged: tuple[Serving, Path]) -> None:
    server, path = logged
    server.says("abcdef", per_step=3, num_rejected=1)
    body = {"inputs": "Hi", "parameters": {"speculative_tokens": 3, "max_new_tokens": 6, "details": True}}
    details = (await server.client.post("/generate", json=body)).json()["details"]["speculation"]
    (line,) = await lines(server, path, 1)
    assert line["drafted_tokens"] == details["drafted"] > 0
    assert line["accepted_tokens"] == details["accepted"] > 0


async def test_texts_are_recorded_with_log_texts(tmp_path: Path, anyio_backend: str, receiver: Receiver) -> None:
    path = tmp_path / "usage.jsonl"
    places = {"usage_log": str(path), "request_logger_url": receiver.url}
    async with serving(tmp_path, **places, log_texts=True) as server:
        server.says("abcd")
        stop = {"stop": "c", "max_tokens": 4}
        sent: list[tuple[str, dict[str, Any]]] = [
            ("/generate", {"inputs": "Hi", "parameters": {"return_full_text": True}}),
            ("/generate_stream", {"inputs": "Hi"}),
            ("/v1/completions", {"model": MODEL_ID, "prompt": server.ids("Hiho"), **stop}),
            ("/v1/completions", {"model": MODEL_ID, "prompt": ["Hi", "Ho"], "n": 2, "stream": True, **stop}),
            ("/v1/chat/completions", {**CHAT, **stop}),
        ]
        for route, body in sent:
            assert (await server.client.post(route, json=body)).status_code == 200
        records = await lines(server, path, len(sent))
        assert [line["input"] for line in records] == ["Hi", "Hi", "Hiho", ["Hi", "Ho"], "[user]Hi[assistant]"]
        assert [line["output"] for line in records] == ["abcd", "abcd", "ab", ["ab"] * 4, "ab"]
        await server.shard.until(lambda: len(receiver.events) == len(sent))
        assert sorted(str(event["input"]) for event in receiver.events) == sorted(
            str(line["input"]) for line in records
        )


async def test_lorax_s_event_without_token_and_texts(tmp_path: Path, anyio_backend: str, receiver: Receiver) -> None:
    async with serving(tmp_path, adapters=True, request_logger_url=f"{receiver.url}/events?a=b") as server:
        server.says("abc")
        headers = {"authorization": "Bearer hf_caller"}
        await server.client.post("/generate", json={"inputs": "Hi"}, headers=headers)
        await server.shard.until(lambda: len(receiver.events) == 1)
        body = {"inputs": "Hi", "parameters": {"adapter_id": server.adapter("mine"), "api_token": "hf_other"}}
        await server.client.post("/generate", json={"inputs": ""})
        await server.client.post("/generate", json=body)
        await server.shard.until(lambda: len(receiver.events) == 2)
    expected = {"tokens": 5, "adapter_id": "", "input": None, "output": None, "api_token": None, "model_id": MODEL_ID}
    assert receiver.events == [expected, {**expected, "adapter_id": "mine"}]
    assert receiver.paths == ["/events?a=b"] * 2
    assert "hf_" not in str(receiver.headers)


async def test_info_shows_the_url_without_credentials(tmp_path: Path, anyio_backend: str) -> None:
    fields = {"request_logger_url": "http://me:secret@127.0.0.1:9/in?key=secret#secret"}
    async with serving(tmp_path, admin_key_sha256=sha256("admin"), **fields) as server:
        response = await server.client.get("/info", headers={"authorization": "Bearer admin"})
        assert response.json()["request_logger_url"] == "http://127.0.0.1:9/in"
        assert "secret" not in response.text


async def test_an_unusable_destination_changes_no_answer(tmp_path: Path, anyio_backend: str) -> None:
    """The port of the URL is closed, and the file is on a full disk."""
    places = {"usage_log": "/dev/full", "request_logger_url": "http://127.0.0.1:9"}
    async with serving(tmp_path, **places) as server:
        server.says("abc")
        for _ in range(3):
            assert (await server.client.post("/generate", json={"inputs": "Hi"})).json() == {"generated_text": "abc"}
        dropped = server.metrics.usage_dropped.values
        await server.shard.until(lambda: dropped["file"] == 3 and dropped["url"] == 3)
        text = (await server.client.get("/metrics")).text
        assert 'lorikeet_usage_dropped_total{to="file"} 3.0' in text
        assert 'lorikeet_usage_dropped_total{to="url"} 3.0' in text
