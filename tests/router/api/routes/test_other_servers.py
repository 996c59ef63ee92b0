"""Small routes of vLLM, SGLang, Kubernetes and SageMaker."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.version import version
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "Hi"}]
KEY = {"authorization": "Bearer admin"}
PROBES = ("/healthz", "/livez", "/readyz", "/health_generate")


@pytest.mark.parametrize("path", PROBES)
async def test_probes(server: Serving, path: str) -> None:
    server.says("x")
    response = await server.client.get(path)
    assert (response.status_code, response.content) == (200, b"")


async def test_probes_are_open_and_fail_without_a_shard(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, connected=False, api_keys_sha256=(sha256("k"),)) as server:
        for path in PROBES:
            assert (await server.client.get(path)).status_code == 503
        assert (await server.client.post("/ping")).status_code == 503
        assert (await server.client.get("/version")).status_code == 401


async def test_information_in_the_forms_of_vllm_and_sglang(server: Serving) -> None:
    server.says("abcdef", per_step=3, num_rejected=1)
    await server.client.post("/generate", json={"inputs": "Hi", "parameters": {"max_new_tokens": 6}})
    await server.idle()
    assert (await server.client.get("/version")).json() == {"version": version()}
    assert (await server.client.get("/load")).json() == {"server_load": 0}
    assert (await server.client.post("/ping")).status_code == 200
    for path in ("/server_info", "/get_server_info"):
        information = (await server.client.get(path)).json()
        assert information["served_model_name"] == information["model_path"] == MODEL_ID
        assert information["max_total_num_tokens"] == 4096 * 16
        assert information["internal_states"] == [{"avg_spec_accept_length": 3.0}]
    for path in ("/model_info", "/get_model_info"):
        assert (await server.client.get(path)).json()["is_generation"] is True


async def test_invocations_take_openai_s_bodies(server: Serving) -> None:
    server.says("x")
    chat: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1}
    answer = (await server.client.post("/invocations", json=chat)).json()
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL_ID)
    answer = (await server.client.post("/invocations", json={"prompt": "Hi", "max_tokens": 1})).json()
    assert answer["object"] == "text_completion"
    events = await server.events("/invocations", {**chat, "stream": True})
    assert events[-1] == "[DONE]"
    answer = (await server.client.post("/invocations", json={"inputs": "Hi"})).json()
    assert list(answer[0]) == ["generated_text"]
    response = await server.client.post("/invocations", json={**chat, "n": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    response = await server.client.post("/invocations", json={"inputs": "Hi", "parameters": {"best_of": 0}})
    assert response.json()["error_type"] == "validation"


async def test_invocations_take_the_adapter_from_a_header(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, adapters=True) as server:
        server.says("x")
        server.adapter("one")
        header = {"X-Amzn-SageMaker-Adapter-Identifier": "one"}
        for body in ({"messages": MESSAGES}, {"inputs": "Hi"}, {"inputs": "Hi", "parameters": {"adapter_id": "one"}}):
            response = await server.client.post("/invocations", json=body, headers=header)
            assert response.headers["x-adapter-id"] == "one"
        body = {"inputs": "Hi", "parameters": {"adapter_id": "two"}}
        response = await server.client.post("/invocations", json=body, headers=header)
        assert (response.status_code, response.json()["error_type"]) == (422, "validation")


async def unloaded(server: Serving, answer: "asyncio.Task[Any]") -> Any:
    """The answer, once the shard has unloaded what it was sent to unload."""
    await server.shard.until(lambda: answer.done() or any(command.unload_digests for command in server.shard.commands))
    for command in server.shard.commands:
        absent = pb.AdapterState.ABSENT
        server.shard.tell(*(pb.AdapterState(digest=digest, residency=absent) for digest in command.unload_digests))
    server.shard.commands.clear()  # so that the next call waits for its own
    return await answer


async def test_adapters_are_named_and_removed(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, adapters=True, admin_key_sha256=sha256("admin")) as server:
        server.says("x")
        server.adapter("one")
        body = {"name": "mine", "src": "one"}
        assert (await server.client.post("/adapters", json=body)).status_code == 403
        for remove in ("/adapters/mine", "/v1/models/mine"):
            response = await server.client.post("/adapters", json=body, headers=KEY)
            assert response.text == "Success: LoRA adapter 'mine' added successfully."
            await server.client.post("/v1/completions", json={"model": "mine", "prompt": "Hi"})
            assert (await server.client.delete(remove)).status_code == 403
            task = asyncio.create_task(server.client.delete(remove, headers=KEY))
            response = await unloaded(server, task)
            assert response.status_code == 200
            assert (await server.client.get("/v1/models/mine")).status_code == 404
        assert response.json() == {"id": "mine", "object": "model", "deleted": True}
        response = await server.client.delete("/v1/models/mine", headers=KEY)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        response = await server.client.delete(f"/v1/models/{MODEL_ID}", headers=KEY)
        assert (response.status_code, response.json()["error"]["message"]) == (400, "the base model cannot be deleted")
        response = await server.client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}, headers=KEY)
        assert response.status_code == 404
        assert response.json()["error"]["message"] == "The lora adapter 'mine' cannot be found."
        response = await server.client.post("/v1/unload_lora_adapter", json={}, headers=KEY)
        assert response.json()["error"]["message"] == "'lora_name' needs to be provided to unload a LoRA adapter."
