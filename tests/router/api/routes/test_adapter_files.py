"""Adapters of the local roots: those that `/v1/models` lists, and those that an administrator sends."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.router.adapters import selection
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

KEY = {"authorization": "Bearer admin"}
PATH = "/admin/adapters/files"
TEMPLATE = (
    "---\nlibrary_name: peft\n---\n# Model Card for Model ID\n\n<!-- Provide a quick summary. -->\n\n\n## Details\n"
)
CARD = (
    "---\nbase_model: x\ntags: [y]\n---\n\n# Pirate\n\n[![badge](b.svg)](x)\n\n"
    "Answers as a pirate,\nin short sentences.\n\nMore."
)


@pytest.fixture(autouse=True)
def always_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "LOOKUP_S", 0.0)


@pytest.fixture
async def server(anyio_backend: str, tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, adapters=True, admin_key_sha256=sha256("admin")) as started:
        yield started


async def listed(server: Serving, **headers: str) -> list[tuple[str, str, str | None]]:
    """(name, source, description) of every adapter."""
    data = (await server.client.get("/v1/models", headers=headers)).json()["data"]
    return [(line["id"], line["adapter_source"], line["description"]) for line in data if "parent" in line]


async def test_adapters_below_the_roots_are_listed_with_their_descriptions(server: Serving) -> None:
    assert await listed(server) == []
    server.adapter("pirate", **{"README.md": CARD})
    server.adapter("plain", **{"README.md": TEMPLATE})
    (server.roots / "no adapter").mkdir()
    assert await listed(server) == [
        ("pirate", "local", "Answers as a pirate, in short sentences."),
        ("plain", "local", None),
    ]
    (server.roots / "elsewhere").symlink_to(server.roots.parent)
    assert len(await listed(server)) == 2


async def test_an_alias_hides_its_folder(tmp_path: Path, anyio_backend: str) -> None:
    catalogue = tmp_path / "catalogue.yaml"
    catalogue.write_text("sea: {source: local, id: pirate, description: Talks of the sea}\n")
    async with serving(tmp_path, adapters=True, catalogue_path=str(catalogue)) as server:
        server.adapter("pirate", **{"README.md": CARD})
        assert await listed(server) == [("sea", "local", "Talks of the sea")]


async def test_a_key_sees_what_it_may_use(tmp_path: Path, anyio_backend: str) -> None:
    keys, catalogue = tmp_path / "keys.yaml", tmp_path / "catalogue.yaml"
    keys.write_text(
        f"- {{name: some, sha256: {sha256('some')}, adapters: [pirate]}}\n"
        f"- {{name: all, sha256: {sha256('all')}}}\n- {{name: root, sha256: {sha256('root')}, admin: true}}\n"
    )
    catalogue.write_text("sea: {source: local, id: secret, keys: [all]}\n")
    async with serving(tmp_path, adapters=True, keys_path=str(keys), catalogue_path=str(catalogue)) as server:
        for name in ("pirate", "plain", "secret"):
            server.adapter(name)

        async def names(key: str) -> list[str]:
            return [name for name, *_ in await listed(server, authorization=f"Bearer {key}")]

        assert await names("some") == ["pirate"]
        assert await names("all") == ["sea", "pirate", "plain"]
        assert await names("root") == ["sea", "pirate", "plain"]


async def send(server: Serving, path: str, content: bytes | str = b"") -> tuple[int, Any]:
    answer = await server.client.post(f"{PATH}/{path}", content=content, headers=KEY)
    return answer.status_code, answer.json() if answer.headers.get("content-type") == "application/json" else None


async def test_files_become_an_adapter_all_at_once(server: Serving) -> None:
    assert await send(server, "mine/adapter_config.json", "{}") == (204, None)
    assert await send(server, "mine/adapter_model.safetensors", b"early") == (204, None)
    assert await send(server, "mine/adapter_model.safetensors", b"weights") == (204, None)
    assert await listed(server) == [], "it is not complete"
    status, answer = await send(server, "mine")
    assert (status, Path(answer["path"])) == (200, server.roots / "mine")
    assert (server.roots / "mine" / "adapter_model.safetensors").read_bytes() == b"weights"
    assert await listed(server) == [("mine", "local", None)]
    body = {"lora_name": "mine", "lora_path": answer["path"]}
    loaded = await server.client.post("/v1/load_lora_adapter", json=body, headers=KEY)
    assert loaded.status_code == 200, loaded.text
    server.says("x")
    parameters = {"adapter_id": "mine", "max_new_tokens": 1}
    generated = await server.client.post("/generate", json={"inputs": "Hi", "parameters": parameters})
    assert generated.status_code == 200 and server.shard.submits[-1].adapter.digest


async def test_a_folder_is_never_replaced(server: Serving) -> None:
    server.adapter("mine", **{"adapter_model.safetensors": "old"})
    await send(server, "mine/adapter_model.safetensors", b"new")
    status, answer = await send(server, "mine")
    assert status == 409 and "choose another name" in json.dumps(answer)
    assert (server.roots / "mine" / "adapter_model.safetensors").read_text() == "old"
    assert [path.name for path in server.roots.iterdir()] == ["mine"], "nothing is left of what was sent"


@pytest.mark.parametrize(
    "path",
    ["mine/evil.py", "mine/..", ".hidden/adapter_config.json", "a b/adapter_config.json", "..%2Fx/README.md", "none"],
)
async def test_other_names_are_rejected(server: Serving, path: str) -> None:
    status, _ = await send(server, path, "{}")
    assert status in (404, 405, 422)
    assert list(server.roots.iterdir()) == []


async def test_too_large_a_file_leaves_nothing(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, adapters=True, admin_key_sha256=sha256("admin")) as server:
        settings = server.service.config.sources
        object.__setattr__(settings, "max_adapter_bytes", 10)
        status, _ = await send(server, "mine/adapter_model.safetensors", b"x" * 11)
        assert status == 413
        assert list(server.roots.iterdir()) == []


async def test_files_that_arrive_are_no_adapter_yet(server: Serving) -> None:
    await send(server, "mine/adapter_config.json", "{}")
    for name in (".arriving-mine", str(server.roots / ".arriving-mine")):
        parameters = {"adapter_id": name, "adapter_source": "local", "max_new_tokens": 1}
        generated = await server.client.post("/generate", json={"inputs": "Hi", "parameters": parameters})
        assert generated.status_code == 404, generated.text


async def test_a_file_that_is_being_received_is_waited_for(server: Serving) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def content() -> AsyncIterator[bytes]:
        yield b"first "
        begun.set()
        await go_on.wait()
        yield b"second"

    path = f"{PATH}/mine/adapter_model.safetensors"
    sending = asyncio.create_task(server.client.post(path, content=content(), headers=KEY))
    await begun.wait()
    async with asyncio.timeout(10):
        while not list(server.roots.glob(".arriving-mine/*")):  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
    for name in ("mine", "mine/adapter_model.safetensors"):
        status, answer = await send(server, name, b"other")
        assert status == 409 and "adapter_model.safetensors of 'mine'" in json.dumps(answer)
    go_on.set()
    assert (await sending).status_code == 204
    assert (await send(server, "mine"))[0] == 200
    assert (server.roots / "mine" / "adapter_model.safetensors").read_bytes() == b"first second"


async def test_what_was_never_completed_is_deleted_after_a_while(server: Serving) -> None:
    for name in ("old", "new"):
        await send(server, f"{name}/adapter_config.json", "{}")
    an_hour_ago = time.time() - 3700
    for path in (server.roots / ".arriving-old" / "adapter_config.json", server.roots / ".arriving-old"):
        os.utime(path, (an_hour_ago, an_hour_ago))
    await send(server, "third/adapter_config.json", "{}")
    assert {path.name for path in server.roots.iterdir()} == {".arriving-new", ".arriving-third"}


async def test_only_administrators_send_files(server: Serving) -> None:
    for headers in ({}, {"authorization": "Bearer other"}):
        for path in ("mine", "mine/adapter_config.json"):
            assert (await server.client.post(f"{PATH}/{path}", content=b"{}", headers=headers)).status_code == 403
    assert list(server.roots.iterdir()) == []
