"""What the operator names: served names of the base model, adapters of `lora_modules`, keys, a path of a proxy, a
chat template.
"""

from pathlib import Path

import pytest

from lorikeet.adapters.keys import sha256
from tests.router.serving import MODEL_ID, serving

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


async def test_served_names_are_those_of_the_base_model(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, served_model_names=("gpt-4o", "tgi"), adapters=True) as server:
        server.says("x")
        listed = (await server.client.get("/v1/models")).json()["data"]
        assert [line["id"] for line in listed] == ["gpt-4o", "tgi"]
        for name in ("tgi", "gpt-4o", MODEL_ID, "__base_model__"):
            answer = await server.client.post("/v1/chat/completions", json={"model": name, **CHAT})
            assert answer.status_code == 200, answer.text
        assert answer.headers["x-model-id"] == "gpt-4o"
        answer = await server.client.post("/v1/chat/completions", json={"model": "", **CHAT})
        assert answer.json()["model"] == "gpt-4o"
        answer = await server.client.post("/v1/chat/completions", json={"model": "gpt-4", **CHAT})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await server.client.get("/v1/models/tgi")).json()["id"] == "tgi"
        assert (await server.client.get("/info")).json()["model_id"] == MODEL_ID
        native = {"inputs": "Hi", "parameters": {"adapter_id": "tgi", "max_new_tokens": 1}}
        assert (await server.client.post("/generate", json=native)).status_code == 200
        assert all(not submit.adapter.digest for submit in server.shard.submits)


async def test_lora_modules_are_aliases(tmp_path: Path, anyio_backend: str) -> None:
    (tmp_path / "roots" / "mine").mkdir(parents=True)
    (tmp_path / "roots" / "mine" / "adapter_config.json").write_text("{}")
    (tmp_path / "roots" / "mine" / "adapter_model.safetensors").write_text("mine")
    modules = {"sql": ["local", "mine"]}
    async with serving(tmp_path, adapters=True, lora_modules=modules) as server:
        server.says("x")
        listed = (await server.client.get("/v1/models")).json()["data"]
        assert [(line["id"], line["parent"]) for line in listed if "parent" in line] == [("sql", MODEL_ID)]
        answer = await server.client.post("/v1/chat/completions", json={"model": "sql", **CHAT})
        assert answer.json()["model"] == "sql"
        assert server.shard.submits[-1].adapter.digest


async def test_keys_of_the_command_line_close_the_server(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, api_keys_sha256=(sha256("one"), sha256("two"))) as server:
        assert (await server.client.get("/v1/models")).status_code == 401
        assert (await server.client.get("/health")).status_code == 200
        for key in ("one", "two"):
            response = await server.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200
        response = await server.client.post("/admin/adapters/load", json={}, headers={"authorization": "Bearer one"})
        assert response.status_code == 403


async def test_a_root_path_may_be_in_requests_or_not(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, root_path="/llm") as server:
        server.says("x")
        for root in ("", "/llm", "/llm//"):
            assert (await server.client.get(f"{root}/v1/models")).status_code == 200
            answer = await server.client.post(f"{root}/v1/chat/completions", json={"model": "", **CHAT})
            assert answer.status_code == 200
        answer = await server.client.post("/llm/v1/nothing", json={})
        assert answer.json()["error"]["code"] == "unknown_url"
        assert (await server.client.get("/llmv1/models")).status_code == 404
        assert (await server.client.get("/llm")).status_code == 200
        assert (await server.client.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]


async def test_a_chat_template_replaces_the_model_s(tmp_path: Path, anyio_backend: str) -> None:
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    async with serving(tmp_path, template=template) as server:
        server.says("x")
        await server.client.post("/v1/chat/completions", json={"model": "", **CHAT})
        assert list(server.shard.submits[-1].prompt_ids) == server.ids("<Hi>")


async def test_an_invalid_chat_template_stops_the_router(tmp_path: Path, anyio_backend: str) -> None:
    with pytest.raises(ValueError, match="the chat template of --chat-template is invalid: "):
        async with serving(tmp_path, template="{% for %}"):
            raise AssertionError("it must not start")
