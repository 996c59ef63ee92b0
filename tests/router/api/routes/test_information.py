"""`/info`, `/tokenize`, `/metrics`, and the published schema."""

import threading
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.router.config import RouterConfig
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.schemas.native import CompatGenerateRequest, GenerateParameters
from lorikeet.router.schemas.openai import ChatCompletionRequest, CompletionRequest
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
        assert [model["id"] for model in listed] == [MODEL_ID]
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


def test_null_is_absence() -> None:
    everything = dict.fromkeys(GenerateParameters.applied)
    body = CompatGenerateRequest.read({"inputs": "Hi", "parameters": everything, "stream": None})
    assert (body.ignored(), body.parameters) == ([], GenerateParameters())


def test_null_is_absence_on_openai_s_routes() -> None:
    config = RouterConfig(model_id="m", model_path="", shard_addresses=())
    fields: dict[str, Any] = {"model": "m", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    completion = {name: fields.get(name) for name in CompletionRequest.applied}
    assert CompletionRequest.read(completion, config).to_request(config).ignored == []
    chat = {name: fields.get(name) for name in ChatCompletionRequest.applied}
    assert ChatCompletionRequest.read(chat, config).to_request(config).ignored == []
    strange = {**chat, "prompt": None, "store": None}
    assert ChatCompletionRequest.read(strange, config).to_request(config).ignored == ["prompt", "store"]


async def test_metrics_are_written_in_a_thread(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()
    render = Metrics.render

    def noted(metrics: Metrics, *of: Any) -> tuple[bytes, str]:
        threads.append(threading.get_ident())
        return render(metrics, *of)

    monkeypatch.setattr(Metrics, "render", noted)
    assert "lorax_request_count" in (await server.client.get("/metrics")).text
    assert threads and threading.get_ident() not in threads
