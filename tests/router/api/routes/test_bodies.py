"""Bodies over real sockets: encodings, time, expectations, the memory of all, and what others notice of large ones."""

import asyncio
import gzip
import time
import zlib
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
GZIP = {**JSON, "content-encoding": "gzip"}
MIB = 1 << 20
HEAD = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
FEW = {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}


async def test_gzip(server: Serving) -> None:
    server.says("x")
    body = orjson.dumps(FEW)
    for name in ("gzip", "x-gzip", "GZIP"):
        headers = {**JSON, "content-encoding": name}
        response = await server.client.post("/generate", content=gzip.compress(body, mtime=0), headers=headers)
        assert (response.status_code, response.json()) == (200, {"generated_text": "x"})
    large = gzip.compress(orjson.dumps({**FEW, "padding": "x" * 3 * MIB}), mtime=0)
    assert (await server.client.post("/generate", content=large, headers=GZIP)).status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_a_body_that_decodes_to_more_than_the_limit(server: Serving, path: str) -> None:
    bomb = gzip.compress(b" " * (64 * MIB), mtime=0)
    response = await server.client.post(path, content=bomb, headers=GZIP)
    assert response.status_code == 413
    assert "Failed to buffer the request body: length limit exceeded" in response.text


NOT_GZIP = {
    "plain": b"{}",
    "truncated": gzip.compress(orjson.dumps(FEW), mtime=0)[:-4],
    "continued": gzip.compress(b"{}", mtime=0) + b"rest",
    "empty": b"",
}


@pytest.mark.parametrize("body", NOT_GZIP.values(), ids=NOT_GZIP)
async def test_a_body_that_is_not_gzip(server: Serving, body: bytes) -> None:
    response = await server.client.post("/generate", content=body, headers=GZIP)
    assert response.status_code == 400
    assert response.text.startswith("Failed to decode the request body as gzip: ")


@pytest.mark.parametrize("encoding", ["deflate", "br", "zstd", "gzip, gzip"])
async def test_other_encodings(server: Serving, encoding: str) -> None:
    headers = {**JSON, "content-encoding": encoding}
    response = await server.client.post("/generate", content=zlib.compress(b"{}"), headers=headers)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, identity"
    response = await server.client.post("/v1/completions", content=b"{}", headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (415, "invalid_request_error")


async def test_a_slow_body_is_408(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, header_timeout_s=0.3) as server:
        reader, writer = await _connect(server)
        writer.write(HEAD + b"content-length: 100\r\n\r\n")
        for _ in range(4):
            writer.write(b" ")
            await asyncio.sleep(0.15)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer
        writer.close()
        assert (await server.client.get("/health")).status_code == 200


async def test_a_body_that_is_too_large_is_rejected_before_it_is_sent(server: Serving) -> None:
    reader, writer = await _connect(server)
    writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 20000000\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    reader, writer = await _connect(server)
    writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 15\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 100 ")
    server.says("x")
    writer.write(b'{"inputs":"Hi"}')
    assert b"HTTP/1.1 200" in await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_large_bodies_of_one_caller_wait_and_are_then_rejected(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfinished bodies of one address take its share, and nobody else's; a small one is always read."""
    monkeypatch.setattr("lorikeet.router.schemas.body.MAX_WAIT_S", 0.2)
    async with serving(tmp_path, max_body_memory=64 * MIB, trusted_proxies=("127.0.0.1/32",)) as server:
        held = [await _connect(server) for _ in range(2)]
        for _, writer in held:
            writer.write(HEAD + b"x-forwarded-for: 6.6.6.6\r\ncontent-length: 7000000\r\n\r\n ")
        await _until(lambda: server.service.bodies._memory.num_used == 14_000_000)
        large = orjson.dumps({**FEW, "padding": "x" * 2 * MIB})
        server.says("x")
        response = await server.client.post("/generate", content=large, headers={**JSON, "x-forwarded-for": "6.6.6.6"})
        assert (response.status_code, response.json()["error_type"]) == (503, "overloaded")
        assert int(response.headers["retry-after"]) >= 1
        response = await server.client.post("/generate", content=large, headers={**JSON, "x-forwarded-for": "7.7.7.7"})
        assert response.status_code == 200
        response = await server.client.post("/generate", json=FEW, headers={"x-forwarded-for": "6.6.6.6"})
        assert response.status_code == 200
        for _, writer in held:
            writer.close()
        await _until(lambda: server.service.bodies._memory.num_used == 0)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize(
    "body",
    [
        {"inputs": "Hi", "parameters": {"merged_adapters": {"ids": ["a"], "weights": [1] * 2_000_000}}},
        {"model": MODEL_ID, "prompt": [[0]] * 2_000_000, "inputs": [[0]] * 2_000_000},
        {"model": MODEL_ID, "prompt": "Hi", "inputs": "Hi", "unknown": [{}] * 2_000_000},
    ],
    ids=["weights", "prompts", "unknown"],
)
async def test_others_are_answered_next_to_large_lists(server: Serving, path: str, body: dict[str, Any]) -> None:
    content = orjson.dumps(body)
    attack = asyncio.create_task(server.client.post(path, content=content, headers=JSON))
    longest = await _longest_wait(server, attack)
    assert (await attack).status_code == 413
    assert longest < 1.0, longest
    await _until(lambda: server.service.bodies._memory.num_used == 0)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (
            "/generate",
            {"inputs": "Hi", "parameters": {"merged_adapters": {"ids": ["a"], "weights": ["b"] * 9}}},
            "number of adapter IDs must match number of adapter weights",
        ),
        (
            "/generate",
            {"inputs": "Hi", "parameters": {"merged_adapters": {"ids": [1] * 33, "weights": [1] * 33}}},
            "supports up to 32 adapters",
        ),
        ("/v1/completions", {"model": MODEL_ID, "prompt": [0.5] * 2000}, "prompts times choices must be <= "),
        ("/v1/completions", {"model": MODEL_ID, "prompt": [0, "x"] * 2000}, "a prompt may have 2047 tokens"),
        ("/v1/chat/completions", {"model": MODEL_ID, "messages": [0] * 3000}, "`messages` supports up to 2047"),
    ],
)
async def test_lengths_are_checked_before_elements(server: Serving, path: str, body: dict[str, Any], text: str) -> None:
    response = await server.client.post(path, json=body)
    assert 400 <= response.status_code < 500
    assert text in response.text


async def _connect(server: Serving) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - several kinds of conditions
            await asyncio.sleep(0.01)


async def _longest_wait(server: Serving, attack: "asyncio.Task[Any]") -> float:
    """The longest time that another client waited for an answer during the attack."""
    longest = 0.0
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as other:
        while not attack.done():
            began_at = time.monotonic()
            assert (await other.get("/health")).status_code == 200
            longest = max(longest, time.monotonic() - began_at)
    return longest
