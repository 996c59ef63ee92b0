"""Resumable requests over real sockets: what a closed connection does to them, who may read them, how they end."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.router.api.streaming import EventWriter
from lorikeet.router.kept_streams import StreamLimits
from tests.router.serving import MODEL_ID, Serving, parse_events, serving

pytestmark = pytest.mark.anyio

TEXT = "abcdefghijklmnop"
RESUMABLE = {"x-lorikeet-resumable": "30"}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate_stream", {"inputs": "Hi", "parameters": {"details": True, "seed": 1}}),
    ("/", {"inputs": "Hi", "stream": True}),
    ("/v1/completions", {"model": MODEL_ID, "prompt": "Hi", "stream": True, "logprobs": 1}),
    ("/v1/completions", {"model": MODEL_ID, "prompt": "Hi", "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi"}], "stream": True}),
]


@pytest.fixture(autouse=True)
def forgotten(server: Serving) -> Iterator[None]:
    """What a test leaves behind is gone before the next one."""
    yield
    forget_all(server)


def forget_all(server: Serving) -> None:
    for stream in list(server.service.streams._streams.values()):
        server.service.streams.cancel(stream)


async def lines_of(response: httpx.Response, num_events: int) -> str:
    """The first events of a stream, at least so many; the rest is left unread."""
    text = ""
    async for part in response.aiter_text():
        text += part
        if text.count("\n\n") >= num_events:
            return text
    raise AssertionError(f"the stream ended early: {text}")


def without_ids(events: list[Any]) -> list[Any]:
    """Ids and times differ between two requests."""
    return [
        {name: value for name, value in event.items() if name not in ("id", "created")}
        if isinstance(event, dict)
        else event
        for event in events
    ]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_stream_is_read_on_after_its_connection_closed(
    server: Serving, path: str, body: dict[str, Any]
) -> None:
    server.says(TEXT, step_seconds=0.01, ends=True)
    expected = await server.events(path, body)
    async with server.client.stream("POST", path, json=body, headers=RESUMABLE) as response:
        stream_id = response.headers["x-lorikeet-stream"]
        assert stream_id == response.headers["x-request-id"]
        first = await lines_of(response, 3)
    num_first = first.count("\n\n")
    answer = await server.client.get(f"/v1/streams/{stream_id}", params={"from": num_first})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-lorikeet-stream"] == stream_id
    assert without_ids(parse_events(first + answer.text)) == without_ids(expected)
    whole = await server.client.get(f"/v1/streams/{stream_id}")
    assert whole.text == first + answer.text
    assert (await server.client.get(f"/v1/streams/{stream_id}?from={len(expected)}")).text == ""
    await server.idle()


@pytest.mark.parametrize(("path", "body"), [ROUTES[0], ROUTES[3], ROUTES[4]])
async def test_most_tokens_are_written_without_waking_the_task_of_their_stream(
    server: Serving, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    written = list[bool]()
    write = EventWriter.write

    def counted(self: EventWriter, token_id: int, text: str, logprob: float) -> bool:
        written.append(write(self, token_id, text, logprob))
        return written[-1]

    monkeypatch.setattr(EventWriter, "write", counted)
    server.says(TEXT + "é…", step_seconds=0.01)
    events = await server.events(path, body | {"max_tokens": 21} if "model" in body else body)
    assert sum(written) >= len(TEXT) - 4
    received = "".join(re.findall(r'"(?:text|content)":"([^"]*)"', "".join(map(dumped, events))))
    assert received == TEXT + "é…"
    written.clear()
    response = await server.client.post(path, json=body, headers=RESUMABLE)
    assert parse_events(response.text)[-1] == events[-1] and not any(written)
    await server.idle()


def dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


NAMED_EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"model": MODEL_ID, "input": "Hi", "stream": True}),
    ("/v1/messages", {"model": MODEL_ID, "max_tokens": 30, "messages": ROUTES[4][1]["messages"], "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), NAMED_EVENTS)
async def test_streams_of_named_events_are_read_on_too(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says(TEXT, step_seconds=0.01, ends=True)
    async with server.client.stream("POST", path, json=body, headers=RESUMABLE) as response:
        first = await lines_of(response, 3)
    stream = f"/v1/streams/{response.headers['x-lorikeet-stream']}"
    rest = (await server.client.get(stream, params={"from": first.count("\n\n")})).text
    assert (await server.client.get(stream)).text == first + rest
    assert rest.startswith("event: ") and "".join(re.findall(r'"(?:text|delta)":"(\w)"', first + rest)) == TEXT
    await server.idle()


async def test_two_connections_read_a_running_stream(server: Serving) -> None:
    server.says(TEXT, step_seconds=0.02)
    headers = {**RESUMABLE, "x-request-id": "my-stream"}
    body = {"inputs": "Hi"}
    own = asyncio.create_task(server.client.post("/generate_stream", json=body, headers=headers))
    await server.shard.until(lambda: server.shard.num_running == 1)
    other = await server.client.get("/v1/streams/my-stream")
    assert other.text == (await own).text and len(parse_events(other.text)) == len(TEXT)


async def test_any_other_request_is_cancelled_at_once(server: Serving) -> None:
    server.says(TEXT, hangs=True)
    async with server.client.stream("POST", "/generate_stream", json={"inputs": "Hi"}) as response:
        assert "x-lorikeet-stream" not in response.headers
        await lines_of(response, 1)
    await server.idle()
    assert (await server.client.get(f"/v1/streams/{response.headers['x-request-id']}")).status_code == 404


async def test_a_stream_that_nobody_reads_is_cancelled_after_its_time(server: Serving) -> None:
    server.says(TEXT, hangs=True)
    headers = {"x-lorikeet-resumable": "1"}
    async with server.client.stream("POST", "/generate_stream", json={"inputs": "Hi"}, headers=headers) as response:
        await lines_of(response, 1)
    path = f"/v1/streams/{response.headers['x-lorikeet-stream']}"
    await asyncio.sleep(0.3)
    assert server.shard.num_running == 1
    async with server.client.stream("GET", path) as again:
        parts = again.aiter_raw()
        assert await anext(parts)
        await asyncio.sleep(1.2)
        assert server.shard.num_running == 1, "it is read"
    await server.idle()
    assert (await server.client.get(path)).status_code == 404
    assert len(server.service.streams) == 0


async def test_delete_cancels_and_forgets(server: Serving) -> None:
    server.says(TEXT, hangs=True)
    async with server.client.stream("POST", "/generate_stream", json={"inputs": "Hi"}, headers=RESUMABLE) as response:
        await lines_of(response, 1)
        path = f"/v1/streams/{response.headers['x-lorikeet-stream']}"
        deleted = await server.client.delete(path)
        assert (deleted.status_code, deleted.content) == (204, b"")
        await server.idle()
        assert (await server.client.get(path)).status_code == 404
        assert (await server.client.delete(path)).status_code == 404


async def test_readers_of_a_cancelled_stream_get_an_error_as_its_end(server: Serving) -> None:
    server.says("ab", hangs=True)
    headers = {**RESUMABLE, "x-request-id": "mine"}
    path, body = ROUTES[2]
    reading = asyncio.create_task(server.client.post(path, json=body, headers=headers))
    await server.shard.until(lambda: server.shard.num_running == 1)
    other = asyncio.create_task(server.client.get("/v1/streams/mine"))
    await asyncio.sleep(0.2)
    await server.client.delete("/v1/streams/mine")
    assert parse_events((await reading).text)[-1]["error"]["code"] == "generation_failed"
    assert (await other).text == (await reading).text


async def test_a_request_that_waits_for_its_adapter_survives_a_closed_connection(
    tmp_path: Path, anyio_backend: str
) -> None:
    """Its answer has not begun: the client knows the id that it chose."""
    async with serving(tmp_path, adapters=True) as server:
        server.adapter("slow")
        server.says("abc")
        server.loader.may_answer.clear()
        headers = {**RESUMABLE, "x-request-id": "chosen"}
        body = {"inputs": "Hi", "parameters": {"adapter_id": "slow"}}
        with pytest.raises(httpx.ReadTimeout):
            await server.client.post("/generate_stream", json=body, headers=headers, timeout=0.3)
        waiting = asyncio.create_task(server.client.get("/v1/streams/chosen"))
        await asyncio.sleep(0.1)
        server.loader.may_answer.set()
        assert parse_events((await waiting).text)[-1]["generated_text"] == "abc"


async def test_errors_are_kept_too(server: Serving) -> None:
    body = {"model": "nowhere/none", "prompt": "Hi", "stream": True}
    first = await server.client.post("/v1/completions", json=body, headers=RESUMABLE)
    again = await server.client.get(f"/v1/streams/{first.headers['x-lorikeet-stream']}")
    assert (first.status_code, again.status_code) == (404, 404)
    assert again.json() == first.json()


async def test_an_answer_that_is_no_stream_is_kept_whole(server: Serving) -> None:
    server.says("abc")
    first = await server.client.post("/generate", json={"inputs": "Hi"}, headers=RESUMABLE)
    again = await server.client.get(f"/v1/streams/{first.headers['x-lorikeet-stream']}")
    assert again.json() == first.json() == {"generated_text": "abc"}


@pytest.mark.parametrize("seconds", ["0", "61", "1000", "1.5", "-1", "x", "", "١"])
async def test_times_out_of_range_are_rejected(server: Serving, seconds: str) -> None:
    headers = {b"x-lorikeet-resumable": seconds.encode()}
    answer = await server.client.post("/generate", json={"inputs": "Hi"}, headers=headers)
    assert answer.status_code == 422 and "from 1 to 60" in answer.json()["error"]
    assert not server.shard.submits and len(server.service.streams) == 0


async def test_positions_out_of_range_are_rejected(server: Serving) -> None:
    server.says("abc")
    first = await server.client.post("/generate_stream", json={"inputs": "Hi"}, headers=RESUMABLE)
    path = f"/v1/streams/{first.headers['x-lorikeet-stream']}"
    for seconds in ("-1", "x", "4", "9" * 30, ""):
        answer = await server.client.get(path, params={"from": seconds})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "from"), seconds


async def test_an_id_is_used_once_at_a_time(server: Serving) -> None:
    server.says("abc", hangs=True)
    headers = {**RESUMABLE, "x-request-id": "same"}
    async with server.client.stream("POST", "/generate_stream", json={"inputs": "Hi"}, headers=headers) as response:
        await lines_of(response, 1)
        answer = await server.client.post("/v1/completions", json=ROUTES[2][1], headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stream_exists")
        await server.client.delete("/v1/streams/same")
    await server.idle()


async def test_a_caller_keeps_a_bounded_number(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.streams, "_limits", StreamLimits(num_per_caller=2))
    server.says("abc", hangs=True)
    for _ in range(2):
        async with server.client.stream("POST", ROUTES[0][0], json=ROUTES[0][1], headers=RESUMABLE) as response:
            await lines_of(response, 1)
    answer = await server.client.post("/generate", json={"inputs": "Hi"}, headers=RESUMABLE)
    assert answer.status_code == 429 and "2 of one caller" in answer.json()["error"]
    forget_all(server)
    await server.idle()


async def test_only_the_same_key_reads_a_stream(tmp_path: Path, anyio_backend: str) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("".join(f"- {{name: {name}, sha256: {sha256(name)}, concurrency: 1}}\n" for name in ("one", "two")))
    async with serving(tmp_path, keys_path=str(keys)) as server:
        server.says(TEXT, hangs=True)
        one, two = ({"authorization": f"Bearer {name}"} for name in ("one", "two"))
        body = {"inputs": "Hi"}
        async with server.client.stream("POST", "/generate_stream", json=body, headers=RESUMABLE | one) as response:
            await lines_of(response, 1)
        path = f"/v1/streams/{response.headers['x-lorikeet-stream']}"
        for method in ("GET", "DELETE"):
            other, nobody = await asyncio.gather(
                server.client.request(method, path, headers=two), server.client.request(method, path)
            )
            unknown = await server.client.request(method, "/v1/streams/none", headers=two)
            assert (other.status_code, nobody.status_code) == (404, 401)
            assert other.json() == {"error": unknown.json()["error"] | {"message": other.json()["error"]["message"]}}
        busy = await server.client.post("/generate", json=body, headers=one)
        assert busy.status_code == 429, "the request counts against the key until it ends"
        assert (await server.client.delete(path, headers=one)).status_code == 204
        await server.idle()


async def test_the_length_of_a_stream_that_is_read_is_not_bounded(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service.streams, "_limits", StreamLimits(bytes_per_caller=4000))
    server.says(TEXT * 20)
    answer = await server.client.post("/generate_stream", json={"inputs": "Hi"}, headers=RESUMABLE)
    events = parse_events(answer.text)
    assert events[-1]["generated_text"] == TEXT * 20
    again = await server.client.get(f"/v1/streams/{answer.headers['x-lorikeet-stream']}")
    assert (again.status_code, again.json()["error"]["code"]) == (410, "stream_trimmed")


async def test_streams_are_read_while_the_router_drains(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path) as server:
        server.says(TEXT, step_seconds=0.05)
        async with server.client.stream(
            "POST", "/generate_stream", json={"inputs": "Hi"}, headers=RESUMABLE
        ) as response:
            await lines_of(response, 1)
        draining = asyncio.create_task(server.dispatcher.drain(20))
        await server.shard.until(lambda: server.dispatcher.draining)
        answer = await server.client.get(f"/v1/streams/{response.headers['x-lorikeet-stream']}")
        assert parse_events(answer.text)[-1]["generated_text"] == TEXT
        assert await draining
