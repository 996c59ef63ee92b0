"""Invalid bodies: the right status and text on every route, and never a server error."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

NATIVE = ["/", "/invocations", "/generate", "/generate_stream", "/tokenize"]
OPENAI = ["/v1/completions", "/v1/chat/completions"]
JSON = {"content-type": "application/json"}

BROKEN = {
    "empty": b"",
    "cut": b'{"inputs": "Hi"',
    "two values": b"{}{}",
    "not JSON": b"inputs=Hi",
    "invalid UTF-8": b'{"inputs": "\xff\xfe"}',
    "lone surrogate": b'{"inputs": "\\ud800"}',
    "raw NUL": b'{"inputs": "\x00"}',
    "NaN": b'{"inputs": "Hi", "parameters": {"temperature": NaN}}',
    "Infinity": b'{"inputs": "Hi", "parameters": {"temperature": Infinity}}',
    "huge number": b'{"inputs": "Hi", "parameters": {"temperature": 1e400}}',
    "deep nesting": b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "inputs: Field required"),
    ({"inputs": None}, "inputs: Field required"),
    ({"inputs": 5}, "inputs: Input should be a valid string, or a list of token ids"),
    ({"inputs": ["Hi"]}, "inputs: Input should be a valid string, or a list of token ids"),
    ({"inputs": "Hi", "parameters": []}, "parameters: Input should be an object"),
    (
        {"inputs": "Hi", "parameters": {"temperature": "hot"}},
        "parameters.temperature: Input should be a valid number",
    ),
    (
        {"inputs": "Hi", "parameters": {"temperature": 1e39}},
        "parameters.temperature: Input should be a finite 32-bit floating point number",
    ),
    (
        {"inputs": "Hi", "parameters": {"max_new_tokens": -1}},
        "parameters.max_new_tokens: Input should be greater than or equal to 0",
    ),
    (
        {"inputs": "Hi", "parameters": {"max_new_tokens": 1.5}},
        "parameters.max_new_tokens: Input should be a valid integer",
    ),
    (
        {"inputs": "Hi", "parameters": {"max_new_tokens": 2**32}},
        "parameters.max_new_tokens: Input should be less than or equal to 4294967295",
    ),
    (
        {"inputs": "Hi", "parameters": {"top_k": True}},
        "parameters.top_k: Input should be a valid integer",
    ),
    (
        {"inputs": "Hi", "parameters": {"seed": 2**64}},
        "parameters.seed: Input should be a valid integer",
    ),
    ({"inputs": "Hi", "parameters": {"stop": "a"}}, "parameters.stop: Input should be a valid list"),
    (
        {"inputs": "Hi", "parameters": {"stop": ["a", 5]}},
        "parameters.stop[1]: Input should be a valid string",
    ),
    (
        {"inputs": "Hi", "parameters": {"details": "yes"}},
        "parameters.details: Input should be a valid boolean",
    ),
]


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("path", NATIVE + OPENAI)
async def test_broken_json(server: Serving, path: str, body: bytes) -> None:
    response = await server.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    start = "Failed to parse the request body as JSON: "
    if path in OPENAI:
        error = response.json()["error"]
        assert error["message"].startswith(start) and error["type"] == "invalid_request_error"
    else:
        assert response.text.startswith(start)
        assert response.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(("body", "text"), WRONG)
@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream"])
async def test_wrong_types(server: Serving, path: str, body: dict[str, Any], text: str) -> None:
    response = await server.client.post(path, json=body)
    assert response.status_code == 422
    assert response.text == f"Failed to deserialize the JSON body into the target type: {text}"


@pytest.mark.parametrize("body", [b"[]", b'"Hi"', b"5", b"null", b"true"])
@pytest.mark.parametrize("path", NATIVE + OPENAI)
async def test_json_other_than_an_object(server: Serving, path: str, body: bytes) -> None:
    response = await server.client.post(path, content=body, headers=JSON)
    assert response.status_code == (400 if path in OPENAI else 422)
    assert "Failed to deserialize the JSON body into the target type: " in response.text


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
@pytest.mark.parametrize("path", NATIVE + OPENAI)
async def test_other_media_types(server: Serving, path: str, media_type: str) -> None:
    response = await server.client.post(path, content=b'{"inputs": "Hi"}', headers={"content-type": media_type})
    assert response.status_code == 415
    assert "Expected request with `Content-Type: application/json`" in response.text


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON", "application/a+json"])
async def test_spellings_of_json(server: Serving, media_type: str) -> None:
    server.says("x")
    response = await server.client.post("/generate", content=b'{"inputs":"Hi"}', headers={"content-type": media_type})
    assert response.status_code == 200


async def test_three_megabytes_are_read_and_validated(server: Serving) -> None:
    """LoRAX rejects every body above 2 MB; here the number of tokens is limited."""
    body: dict[str, Any] = {"inputs": "there " * 5_000, "padding": "x" * 3_000_000}
    response = await server.client.post("/generate", json=body)
    assert response.status_code == 422
    assert response.json()["error"].startswith("Input validation error: `inputs` must have less than 2047 tokens.")
    server.says("x")
    response = await server.client.post("/generate", json={"inputs": "Hi", "padding": "x" * 3_000_000})
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("declared", [True, False])
async def test_bodies_above_the_limit(server: Serving, path: str, declared: bool) -> None:
    size = 16 * 1024 * 1024 + 1
    body = b" " * size

    async def parts() -> Any:
        for start in range(0, size, 1 << 20):
            yield body[start : start + (1 << 20)]

    response = await server.client.post(path, content=body if declared else parts(), headers=JSON)
    assert response.status_code == 413
    assert "Failed to buffer the request body: length limit exceeded" in response.text
    assert response.headers["connection"] == "close"


async def test_a_body_of_exactly_the_limit(tmp_path: Any, anyio_backend: str) -> None:
    async with serving(tmp_path, max_body_bytes=100) as server:
        server.says("x")
        body = b'{"inputs":"Hi"}'
        response = await server.client.post("/generate", content=body + b" " * (100 - len(body)), headers=JSON)
        assert response.status_code == 200
        response = await server.client.post("/generate", content=body + b" " * (101 - len(body)), headers=JSON)
        assert response.status_code == 413


async def test_a_disconnect_while_the_body_is_sent(server: Serving) -> None:
    port = httpx.URL(server.url).port
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /generate HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    writer.write(head + b'{"inputs"')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    server.says("x")
    assert (await server.client.post("/generate", json={"inputs": "Hi"})).status_code == 200


async def test_unknown_routes_and_methods(server: Serving) -> None:
    response = await server.client.get("/nope")
    assert (response.status_code, response.json()["error_type"]) == (404, "not_found")
    response = await server.client.get("/generate")
    assert (response.status_code, response.headers["allow"]) == (405, "OPTIONS, POST")
    response = await server.client.get("/v1/nope")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings"])
async def test_routes_of_embedding_models_need_one(server: Serving, path: str) -> None:
    response = await server.client.post(path, json={"inputs": "Hi", "input": "Hi", "model": MODEL_ID})
    assert response.status_code == (400 if path.startswith("/v1/") else 422)
    assert "--pooling" in response.text
