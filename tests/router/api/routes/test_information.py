"""`/info`, `/tokenize`, `/metrics`, and the published schema, which must match the readers."""

import dataclasses
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.router.config import RouterConfig
from lorikeet.router.schemas import openai
from lorikeet.router.schemas.native import NativeParameters, read_native
from lorikeet.router.schemas.openapi import models as published
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

LORAX_INFO = [
    "model_id",
    "model_sha",
    "model_dtype",
    "model_device_type",
    "model_pipeline_tag",
    "max_concurrent_requests",
    "max_best_of",
    "max_stop_sequences",
    "max_input_length",
    "max_total_tokens",
    "waiting_served_ratio",
    "max_batch_total_tokens",
    "max_waiting_tokens",
    "validation_workers",
    "eager_prefill",
    "version",
    "sha",
    "docker_label",
    "request_logger_url",
]


async def test_info_has_loraxs_keys_first(server: Serving) -> None:
    info = (await server.client.get("/info")).json()
    assert list(info)[: len(LORAX_INFO)] == LORAX_INFO
    assert info["model_id"] == MODEL_ID
    assert (info["model_dtype"], info["model_device_type"]) == ("torch.float32", "cuda")
    assert (info["max_input_length"], info["max_total_tokens"], info["max_best_of"]) == (2047, 2048, 2)
    assert info["max_batch_total_tokens"] == 4096 * 16
    assert info["shards"][0]["architecture"] == "llama"


async def test_requests_have_the_lengths_that_the_shard_takes(tmp_path: Any, anyio_backend: str) -> None:
    async with serving(tmp_path, max_total_tokens=9000, max_input_length=8999) as server:
        info = (await server.client.get("/info")).json()
        assert (info["max_input_length"], info["max_total_tokens"]) == (2047, 2048)
        assert (await server.client.get("/v1/models")).json()["data"][0]["max_model_len"] == 2048
        response = await server.client.post("/v1/completions", json={"model": "", "prompt": "a", "max_tokens": 2048})
        assert response.status_code == 400 and "2048 tokens" in response.text


async def test_a_path_is_accepted_as_the_name_and_not_shown(tmp_path: Any, anyio_backend: str) -> None:
    async with serving(tmp_path, model_given="/srv/models/parrot") as server:
        listed = (await server.client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == [MODEL_ID]
        answer = await server.client.post(
            "/v1/completions", json={"model": "/srv/models/parrot", "prompt": "a", "max_tokens": 1}
        )
        assert answer.status_code == 200, answer.text


async def test_info_shows_the_effective_configuration(tmp_path: Any, anyio_backend: str) -> None:
    flags = {"waiting-served-ratio": 1.2, "max-waiting-tokens": 20, "eager-prefill": True, "port": 80}
    effective = {"version": "0", "flags": {**flags, "adapters": "/etc/adapters.yaml"}}
    fields: dict[str, Any] = {"effective_configuration": effective, "public_configuration": {"flags": flags}}
    fields |= {"admin_key_sha256": sha256("admin"), "draft_model_id": "/models/draft", "device": "cpu"}
    async with serving(tmp_path, **fields, request_logger_url="http://10.0.0.1/usage") as server:
        admin = (await server.client.get("/info", headers={"authorization": "Bearer admin"})).json()
        assert (admin["effective_configuration"], admin["draft_model_id"]) == (effective, "/models/draft")
        response = await server.client.get("/info")
        info = response.json()
        assert info.keys() == admin.keys()
        assert info["effective_configuration"] == {"flags": flags}
        assert not any(part in response.text for part in ("/models", "/etc", "10.0.0.1", str(tmp_path)))
        assert (info["waiting_served_ratio"], info["max_waiting_tokens"], info["eager_prefill"]) == (1.2, 20, True)
        server.says("x")
        response = await server.client.post("/generate", json={"inputs": "Hi"})
        assert response.headers["x-compute-type"] == "cpu+optimized"


async def test_tokenize(server: Serving) -> None:
    response = await server.client.post("/tokenize", json={"inputs": "é there", "what": 1})
    assert response.headers["x-ignored-fields"] == "what"
    ids = server.ids("é there")
    assert response.json() == [
        {"id": ids[0], "text": "Ã", "start": 0, "stop": 1},
        {"id": ids[1], "text": "©", "start": 0, "stop": 1},
        {"id": ids[2], "text": "Ġthere", "start": 1, "stop": 7},
    ]
    body = {"inputs": "Hi", "add_special_tokens": None}
    assert [token["text"] for token in (await server.client.post("/tokenize", json=body)).json()] == ["H", "i"]
    assert (await server.client.post("/tokenize", json={"inputs": ""})).json() == []


async def test_metrics_in_both_forms(server: Serving) -> None:
    server.says("abc")
    await server.client.post("/generate", json={"inputs": "Hi"})
    response = await server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "lorax_request_count " in response.text
    response = await server.client.get("/metrics", headers={"accept": "application/json"})
    assert response.headers["content-type"] == "application/json"
    assert response.json()["lorax_request_success"]["data"][0]["value"] >= 1


async def test_documents(server: Serving) -> None:
    document = (await server.client.get("/openapi.json")).json()
    assert (await server.client.get("/api-doc/openapi.json")).json() == document
    assert (await server.client.get("/docs")).status_code == 200
    for path in ("/", "/generate", "/generate_stream", "/v1/chat/completions", "/tokenize", "/health", "/info"):
        assert path in document["paths"]
    assert set(document["components"]["schemas"]["GenerateRequest"]["properties"]) == {"inputs", "parameters"}


SPECULATIVE = {
    f"speculative_{name}" for name in ("tokens", "method", "schedule", "verification", "verify", "history")
} | {"heads_id"}


def test_published_parameters_are_those_that_are_read() -> None:
    read = {field.name for field in dataclasses.fields(NativeParameters)}
    read = read - {"speculation", "constraints"} | SPECULATIVE | {"stop_sequences"}
    read |= set(published.Constrained.model_fields) | set(published.Structured.model_fields)
    assert set(published.GenerateParameters.model_fields) == read
    everything = dict.fromkeys(published.GenerateParameters.model_fields)
    assert read_native({"inputs": "Hi", "parameters": everything, "stream": None}, with_stream=True).ignored == []


def test_published_openai_fields_are_those_that_are_read() -> None:
    config = RouterConfig(model_id="m", model_path="", shard_addresses=())
    given: dict[str, Any] = {"model": "m", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    completion = {name: given.get(name) for name in published.CompletionRequest.model_fields}
    assert openai.read_completion(completion, config).ignored == []
    chat = {name: given.get(name) for name in published.ChatCompletionRequest.model_fields}
    assert openai.read_chat(chat, config).ignored == []
    strange = {**chat, "prompt": None, "store": None}
    assert openai.read_chat(strange, config).ignored == ["prompt", "store"]
