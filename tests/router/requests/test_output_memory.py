"""Outputs that nobody reads, and answers with many details: bounded per sequence and in all, and given back."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from orjson import dumps

from lorikeet.router.requests import generation as generations
from tests.router.dispatch.test_dispatcher import WORDS, ids_of, request, stage
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

STREAM = {"inputs": "Hi", "parameters": {"max_new_tokens": 1500, "return_k_alternatives": 250, "details": True}}


async def unread(server: Serving, body: dict[str, Any]) -> asyncio.StreamWriter:
    """A stream whose client reads nothing."""
    port = server.url.rpartition(":")[2]
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(port)))
    _, writer = await asyncio.open_connection(sock=client, limit=1)
    data = dumps(body)
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(f"POST /generate_stream HTTP/1.1\r\n{head}".encode() + data)
    await writer.drain()
    return writer


async def test_a_stream_that_nobody_reads_leaves_the_shard_and_goes_on_when_it_is_read(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "MAX_UNREAD_BYTES", 20_000)
    async with serving(tmp_path) as server:
        server.says("a" * 1500)
        writer = await unread(server, STREAM)
        await server.shard.until(lambda: server.dispatcher.metrics.requests_held.values.get("", 0) > 0)
        [generation] = server.dispatcher.queued
        assert server.dispatcher.memory.num_bytes < 300_000
        before = generation.num_generated
        await asyncio.sleep(0.3)
        assert generation.num_generated == before and server.shard.num_running == 0
        writer.close()
        await server.idle()
        await server.shard.until(lambda: server.dispatcher.memory.num_bytes == 0)


async def test_less_may_wait_for_a_reader_while_all_outputs_take_much(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "MAX_BYTES", 400_000)
    async with serving(tmp_path) as server:
        server.says("a" * 1500)
        memory = server.dispatcher.memory
        memory.num_bytes = 190_000  # of others
        writer = await unread(server, STREAM)
        await server.shard.until(lambda: server.dispatcher.metrics.requests_held.values.get("", 0) > 0)
        assert 200_000 < memory.num_bytes < 190_000 + generations.MAX_UNREAD_BYTES // 2
        writer.close()
        await server.idle()
        await server.shard.until(lambda: memory.num_bytes == 190_000)
        memory.num_bytes = 0


async def test_a_stream_that_is_read_late_is_whole(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "MAX_UNREAD_BYTES", 20_000)
    async with stage(tmp_path) as here:
        held = here.dispatcher.metrics.requests_held.values
        generation, ids = here.dispatcher.submit(request(400)), list[int]()
        for num_held in (1, 2, 3):
            await here.until(lambda most=num_held: held.get("", 0) == most)  # type: ignore[misc]
            await here.until(lambda: here.shard.num_running == 0)
            assert not generation.is_over
            ids += [token.id for token in (await generation.next()).tokens]
        ids += await ids_of(generation)
        start = WORDS.index(ids[0])
        assert ids == [WORDS[(start + index) % len(WORDS)] for index in range(400)]
        assert here.dispatcher.memory.num_bytes == 0


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("MAX_ANSWER_BYTES", "one may have 2 MiB."),
        ("MAX_BYTES", "one may have 1 MiB while all answers together take more than 2 MiB."),
    ],
)
async def test_an_answer_that_takes_too_much_memory_fails_by_name(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch, limit: str, reason: str
) -> None:
    monkeypatch.setattr(generations, limit, 2 << 20)
    monkeypatch.setattr(generations, "LEAST_KEPT_BYTES", 1 << 20)
    async with serving(tmp_path) as server:
        server.says("a" * 1000)
        answer = await server.client.post("/generate", json=STREAM)
        assert answer.status_code == 413 and answer.json()["error_type"] == "answer_too_large"
        assert "alternatives" in answer.json()["error"] and reason in answer.json()["error"]
        small = {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}
        assert (await server.client.post("/generate", json=small)).status_code == 200
        await server.idle()
        assert server.dispatcher.memory.num_bytes == 0


async def test_memory_of_every_kind_of_answer_is_given_back(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path) as server:
        server.says("abc", ends=True)
        choices = {"model": "", "prompt": ["Hi", "Ho"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 3}
        for path, body in (("/v1/completions", choices), ("/v1/completions", choices | {"stream": True})):
            answer = await server.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
        assert (await server.client.get("/startup")).status_code == 200
        await server.idle()
        await server.shard.until(lambda: server.dispatcher.memory.num_bytes == 0)
