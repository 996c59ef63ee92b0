"""Routes of administrators: forbidden without the key, and what each of them does in loader and shard."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.adapters import selection
from tests.router.api.routes.test_adapters import body
from tests.router.scripted_loader import digest_of
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

KEY = {"authorization": "Bearer admin"}
ROUTES = ("load", "pin", "unpin", "unload", "refresh")


@pytest.fixture
async def server(anyio_backend: str, tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, adapters=True, admin_key_sha256=sha256("admin")) as started:
        started.adapter("one")
        started.adapter("two")
        yield started


async def admin(server: Serving, path: str, **fields: Any) -> tuple[int, Any]:
    response = await server.client.post(path, json=fields, headers=KEY)
    text = response.headers["content-type"].startswith("text/")
    return response.status_code, response.text if text else response.json()


async def test_all_routes_are_forbidden_without_an_admin_key(tmp_path: Path) -> None:
    async with serving(tmp_path, adapters=True) as server:
        for path in [f"/admin/adapters/{name}" for name in ROUTES] + [
            "/admin/catalogue/reload",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
        ]:
            for headers in ({}, KEY):
                response = await server.client.post(path, json={"adapter_id": "one"}, headers=headers)
                assert response.status_code == 403 and "--admin-key-file" in response.text
        assert (await server.client.get("/admin/adapters", headers=KEY)).status_code == 403


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer no"}, {"authorization": "Basic admin"}])
async def test_other_tokens_are_forbidden(server: Serving, headers: dict[str, str]) -> None:
    response = await server.client.post("/admin/adapters/load", json={"adapter_id": "one"}, headers=headers)
    assert (response.status_code, response.json()["error_type"]) == (403, "forbidden")
    assert ("is not an admin key" in response.text) == ("Bearer no" in headers.values())
    assert server.loader.calls == []


async def test_load_pin_and_list(server: Serving) -> None:
    status, answer = await admin(server, "/admin/adapters/load", adapter_id="one")
    digest = digest_of(server.loader.asked[0])
    assert (status, answer["loaded"][0]["digest"]) == (200, digest)
    await server.shard.until(lambda: any(command.prefetches for command in server.shard.commands))
    assert (await admin(server, "/admin/adapters/pin", adapter_id="one"))[0] == 200
    await server.shard.until(lambda: any(command.pins for command in server.shard.commands))
    listing = (await server.client.get("/admin/adapters", headers=KEY)).json()
    assert [(adapter["digest"], adapter["pinned"]) for adapter in listing["loaded"]] == [(digest, True)]
    assert (await admin(server, "/admin/adapters/unpin", adapter_id="one"))[0] == 200
    await server.shard.until(lambda: any(not pin.pinned for command in server.shard.commands for pin in command.pins))
    assert any(call.get("release") == digest for call in server.loader.calls)
    assert (await admin(server, "/admin/adapters/load", adapter_id="none"))[0] == 404
    assert (await admin(server, "/admin/adapters/load"))[0] == 422


async def test_unload_waits_for_the_shard(server: Serving) -> None:
    await server.client.post("/generate", json=body("/generate", "one"))
    digest = digest_of(server.loader.asked[0])
    task = asyncio.create_task(admin(server, "/admin/adapters/unload", adapter_id="one", disk=True))
    await server.shard.until(lambda: any(digest in command.unload_digests for command in server.shard.commands))
    assert not task.done()
    server.loader.may_answer.clear()
    server.shard.tell(pb.AdapterState(digest=digest, residency=pb.AdapterState.ABSENT))
    await server.shard.until(lambda: any(call.get("forget") == digest for call in server.loader.calls))
    assert not task.done()  # or the next request could be given a file that is about to be deleted
    server.loader.may_answer.set()
    assert await task == (200, {"adapter_id": "one", "unloaded": [digest]})
    assert server.loader.forgotten == [digest]
    # The next request loads it again.
    assert (await server.client.post("/generate", json=body("/generate", "one"))).status_code == 200
    assert len(server.loader.asked) == 2


async def test_refresh_asks_the_source_again(server: Serving) -> None:
    first = await server.client.post("/generate", json=body("/generate", "one"))
    server.adapter("one", **{"adapter_model.safetensors": "newer"})
    assert (await admin(server, "/admin/adapters/refresh", adapter_id="two"))[0] == 200
    again = await server.client.post("/generate", json=body("/generate", "one"))
    assert again.headers["x-adapter-digest"] == first.headers["x-adapter-digest"]
    for fields in ({"adapter_id": "one"}, {}):
        server.adapter("one", **{"adapter_model.safetensors": f"newest {fields}"})
        assert (await admin(server, "/admin/adapters/refresh", **fields))[0] == 200
        newer = await server.client.post("/generate", json=body("/generate", "one"))
        assert newer.headers["x-adapter-digest"] != again.headers["x-adapter-digest"]
        again = newer


@pytest.mark.parametrize("route", ["unload", "refresh"])
async def test_names_that_do_not_exist_are_not_found(route: str, server: Serving) -> None:
    path = f"/admin/adapters/{route}"
    for name in ("none", "one/nothing", "../one"):
        for _ in range(2):
            status, answer = await admin(server, path, adapter_id=name)
            assert (status, answer["error_type"]) == (404, "generation")
    for fields in ({"adapter_id": "one"}, {"adapter_id": "two", "adapter_source": "local"}):
        assert (await admin(server, path, **fields))[0] == 200
    assert (await admin(server, "/v1/load_lora_adapter", lora_name="mine", lora_path="two"))[0] == 200
    shutil.rmtree(server.roots / "two")
    server.service.admission.loading.forget(digest_of(server.loader.asked[0]))
    assert (await admin(server, path, adapter_id="mine"))[0] == 200
    assert (await admin(server, "/admin/adapters/refresh"))[0] == 200
    assert (await admin(server, path, adapter_id="two"))[0] == 404


async def test_vllm_routes(server: Serving) -> None:
    added = await admin(server, "/v1/load_lora_adapter", lora_name="mine", lora_path=str(server.roots / "one"))
    assert added == (200, "Success: LoRA adapter 'mine' added successfully.")
    twice, answer = await admin(server, "/v1/load_lora_adapter", lora_name="mine", lora_path="two")
    assert twice == 400 and "has already been loaded" in answer["error"]["message"]
    assert (await admin(server, "/v1/load_lora_adapter", lora_name="mine", lora_path="two", load_inplace=True))[
        0
    ] == 200
    response = await server.client.post("/v1/completions", json=body("/v1/completions", "mine"))
    assert response.headers["x-adapter-id"] == "mine" and server.shard.submits[-1].adapter.id == "two"
    models = [model["id"] for model in (await server.client.get("/v1/models")).json()["data"]]
    assert "mine" in models
    task = asyncio.create_task(admin(server, "/v1/unload_lora_adapter", lora_name="mine"))
    digest = server.shard.submits[-1].adapter.digest
    await server.shard.until(lambda: any(digest in command.unload_digests for command in server.shard.commands))
    server.shard.tell(pb.AdapterState(digest=digest, residency=pb.AdapterState.ABSENT))
    assert await task == (200, "Success: LoRA adapter 'mine' removed successfully.")
    gone = await server.client.post("/v1/completions", json=body("/v1/completions", "mine"))
    assert gone.status_code == 404
    assert (await admin(server, "/v1/unload_lora_adapter", lora_name="mine"))[0] == 404
    assert (await admin(server, "/v1/load_lora_adapter", lora_name="x"))[0] == 400
    assert (await admin(server, "/v1/load_lora_adapter", lora_name="x", lora_path="/etc"))[0] == 404


@pytest.mark.parametrize("name", ["x" * 257, "x" * 100_000, "a\nb", "a\u202eb"])
async def test_names_that_could_not_be_shown_are_refused(server: Serving, name: str) -> None:
    for path, fields in (
        ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(server.roots / "one")}),
        ("/adapters", {"name": name, "src": str(server.roots / "one")}),
    ):
        status, answer = await admin(server, path, **fields)
        assert (status, answer["error"]["param"]) == (400, "lora_name")
        assert len(answer["error"]["message"]) < 400
    assert not server.loader.asked


async def test_the_number_of_added_names_is_limited(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.router.adapters.selection.MAX_ADDED", 2)
    path = str(server.roots / "one")
    for name, expected in (("a", 200), ("b", 200), ("c", 400)):
        assert (await admin(server, "/v1/load_lora_adapter", lora_name=name, lora_path=path))[0] == expected
    again = await admin(server, "/v1/load_lora_adapter", lora_name="a", lora_path=path, load_inplace=True)
    assert again[0] == 200, "one that is there may be replaced"


@pytest.mark.parametrize("name", [MODEL_ID, "__base_model__"])
async def test_the_base_model_s_name_cannot_be_taken(server: Serving, name: str) -> None:
    fields = {"lora_name": name, "lora_path": str(server.roots / "one"), "load_inplace": True}
    status, answer = await admin(server, "/v1/load_lora_adapter", **fields)
    assert (status, answer["error"]["param"]) == (400, "lora_name")
    assert "base model" in answer["error"]["message"]
    response = await server.client.post("/v1/completions", json=body("/v1/completions", name))
    assert not [header for header in response.headers if header.startswith("x-adapter")]


async def test_an_adapter_was_created_when_it_was_loaded(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    async def created(name: str) -> int:
        return int((await server.client.get(f"/v1/models/{name}")).json()["created"])

    clock = 2_000_000_000
    monkeypatch.setattr(selection, "time", SimpleNamespace(time=lambda: clock, monotonic=time.monotonic))
    for path in ("one", "two", "one"):
        fields = {"lora_name": "mine", "lora_path": str(server.roots / path), "load_inplace": True}
        assert (await admin(server, "/v1/load_lora_adapter", **fields))[0] == 200
        assert await created("mine") == clock
        assert await created(MODEL_ID) < clock
        clock += 100
