"""Rights of adapters: those that the catalogue closes, and those that a key names."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from lorikeet.adapters.keys import sha256
from tests.hub_server import Repository, hub
from tests.router.api.routes.test_adapters import body
from tests.router.api.routes.test_catalogue import KEYS, bearer, made, write
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


def merged(*ids: str) -> dict[str, Any]:
    merge = {"ids": list(ids), "weights": [1.0] * len(ids), "merge_strategy": "linear"}
    parameters = {"merged_adapters": merge, "adapter_source": "local", "max_new_tokens": 2}
    return {"inputs": "Hi", "parameters": parameters}


def closed(folder: Path, text: str = "support: {source: local, id: teamonly, keys: [team-a]}", **fields: Any) -> Any:
    """A server whose catalogue closes `teamonly`."""
    made(folder, "teamonly", "open")
    (folder / "roots" / "link").symlink_to(folder / "roots" / "teamonly")
    (folder / "keys.yaml").write_text(KEYS)
    paths = {"catalogue_path": write(folder, text), "keys_path": str(folder / "keys.yaml")}
    return serving(folder, adapters=True, **{"keys_optional": True, **paths, **fields})


def spellings(folder: Path) -> list[str]:
    roots = folder / "roots"
    return [
        "teamonly",
        "./teamonly",
        "teamonly/",
        "open/../teamonly",
        "link",
        str(roots / "teamonly"),
        f"{roots}/./link/",
    ]


async def refused(server: Serving, headers: dict[str, str], path: str, name: str, **words: Any) -> str:
    response = await server.client.post(path, json=body(path, name, **words), headers=headers)
    assert response.status_code == 404, (path, name, response.text)
    return response.text.replace(name, "NAME")


@pytest.mark.parametrize("key", [None, "secret b"])
async def test_a_closed_adapter_does_not_exist_under_any_spelling(tmp_path: Path, key: str | None) -> None:
    headers = {} if key is None else bearer(key)
    async with closed(tmp_path) as server:
        for route in ROUTES:
            absent = await refused(server, headers, route, "absent", adapter_source="local")
            for name in spellings(tmp_path):
                assert await refused(server, headers, route, name, adapter_source="local") == absent
            assert await refused(server, headers, route, "support") == absent
            heads = [
                await refused(server, headers, route, "open", adapter_source="local", heads_id=name)
                for name in ("absent", *spellings(tmp_path))
            ]
            assert "there is no adapter" in heads[0]
        for name in ("support", *spellings(tmp_path)):
            response = await server.client.post("/generate", json=merged("open", name), headers=headers)
            assert response.status_code == 404, response.text
        assert not server.shard.submits and not [call for call in server.loader.asked if "teamonly" in str(call)]
        # Others are served.
        response = await server.client.post("/generate", json=body("/generate", "open"), headers=headers)
        assert response.status_code == 200, response.text


async def test_its_holders_and_administrators_use_every_spelling(tmp_path: Path) -> None:
    async with closed(tmp_path) as server:
        for key in ("secret a", "secret root"):
            for name in ("support", "teamonly", "link"):
                response = await server.client.post("/generate", json=body("/generate", name), headers=bearer(key))
                assert response.status_code == 200, response.text
            response = await server.client.post("/generate", json=merged("open", "support"), headers=bearer(key))
            assert response.status_code == 200, response.text


async def test_what_is_below_a_closed_folder_is_closed(tmp_path: Path) -> None:
    async with closed(tmp_path) as server:
        server.adapter("teamonly/checkpoint-1")
        await refused(server, {}, "/generate", "link/checkpoint-1")


async def test_a_link_that_is_moved_closes_its_new_folder(tmp_path: Path) -> None:
    async with closed(tmp_path, "support: {id: link, keys: [team-a]}", auth_cache_ttl_s=0.0) as server:
        await refused(server, {}, "/generate", "teamonly")
        server.adapter("second")
        (tmp_path / "roots" / "link").unlink()
        (tmp_path / "roots" / "link").symlink_to(tmp_path / "roots" / "second")
        await refused(server, {}, "/generate", "second")


async def test_an_open_alias_of_a_closed_adapter_stays_open(tmp_path: Path) -> None:
    text = "support: {id: teamonly, keys: [team-a]}\nours: {id: teamonly}"
    async with closed(tmp_path, text) as server:
        assert (await server.client.post("/generate", json=body("/generate", "ours"))).status_code == 200
        await refused(server, {}, "/generate", "teamonly")


async def test_defaults_of_a_closed_alias_do_not_show(tmp_path: Path) -> None:
    async with closed(tmp_path, "support: {id: teamonly, keys: [team-a], parameters: {temperature: -1.0}}") as server:
        assert await refused(server, {}, "/generate", "support") == await refused(server, {}, "/generate", "absent")


async def test_entries_that_cannot_be_read_are_for_administrators(tmp_path: Path) -> None:
    async with closed(tmp_path, "support: {id: teamonly, keys: [team-a], weight: heavy}") as server:
        everything = ["support", "link", "open", "teamonly"]  # folders too, since the entry may close any of them
        for headers, names in (({}, []), (bearer("secret a"), []), (bearer("secret root"), everything)):
            shown = [model["id"] for model in (await server.client.get("/v1/models", headers=headers)).json()["data"]]
            assert shown == [MODEL_ID, *names]
            for folder in everything:
                response = await server.client.get(f"/v1/models/{folder}", headers=headers)
                assert response.status_code == (200 if folder in names else 404)
        await refused(server, bearer("secret a"), "/generate", "support")


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("fields", ["weight: heavy", "revisions: {teamonly: 0.5, open: 0.5}", "revision: v1", "idd: x"])
async def test_an_entry_that_cannot_be_read_closes_its_adapter(tmp_path: Path, fields: str, optional: bool) -> None:
    text = f"support: {{id: teamonly, keys: [team-a], {fields}}}"
    async with closed(tmp_path, text, keys_optional=optional) as server:
        for headers in (*([{}] if optional else []), bearer("secret a"), bearer("secret b")):
            absent = await refused(server, headers, "/generate", "absent", adapter_source="local")
            for name in spellings(tmp_path):
                assert await refused(server, headers, "/generate", name, adapter_source="local") == absent
                response = await server.client.post("/generate", json=merged("open", name), headers=headers)
                assert response.status_code == 404, response.text
            request = body("/generate", "open")
            response = await server.client.post("/generate", json=request, headers=headers)
            # Where the adapter cannot be read either, the entry may close any.
            assert response.status_code == (200 if fields == "weight: heavy" else 404), response.text
        for name in ("teamonly", "open"):
            request = body("/generate", name)
            response = await server.client.post("/generate", json=request, headers=bearer("secret root"))
            assert response.status_code == 200, response.text


@pytest.mark.parametrize("shares_token", [True, False])
async def test_an_entry_that_cannot_be_read_closes_the_hub_where_all_share_the_servers_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares_token: bool
) -> None:
    with hub({"gpt-lora": Repository({"adapter_config.json": b"{}"})}) as source:
        monkeypatch.setattr(constants, "ENDPOINT", source.url)
        async with closed(tmp_path, "support: {idd: x}", use_hub_token_for_all=shares_token) as server:
            for headers, status in (({}, 404 if shares_token else 200), (bearer("secret root"), 200)):
                request = body("/generate", "hub:gpt-lora")
                response = await server.client.post("/generate", json=request, headers=headers)
                assert response.status_code == status, response.text


async def test_without_keys_an_entry_that_cannot_be_read_closes_nothing(tmp_path: Path) -> None:
    async with closed(tmp_path, "support: {weight: heavy}", keys_path=None, keys_optional=False) as server:
        response = await server.client.post("/generate", json=body("/generate", "teamonly"))
        assert response.status_code == 200, response.text


async def test_a_key_with_adapters_uses_no_others(tmp_path: Path) -> None:
    async with closed(tmp_path, "support: {id: teamonly}\nother: {id: open}") as server:
        keys = f"- {{name: narrow, sha256: {sha256('secret n')}, adapters: [support, v1]}}\n"
        (tmp_path / "keys.yaml").write_text(keys)
        await server.service.reloading.reload()
        server.adapter("v1")
        narrow = bearer("secret n")
        for name in ("support", "v1", MODEL_ID):
            response = await server.client.post("/v1/completions", json=body("/v1/completions", name), headers=narrow)
            assert response.status_code == 200, response.text
        for name in ("other", "open", "teamonly", "./v1"):
            await refused(server, narrow, "/v1/completions", name)
        models = (await server.client.get("/v1/models", headers=narrow)).json()["data"]
        assert [model["id"] for model in models] == [MODEL_ID, "support", "v1"]
        for name in ("other", "open", "teamonly", "link"):
            assert (await server.client.get(f"/v1/models/{name}", headers=narrow)).status_code == 404


@pytest.mark.parametrize("key", [None, "secret b"])
async def test_folders_of_a_closed_adapter_are_not_listed(tmp_path: Path, key: str | None) -> None:
    async with closed(tmp_path) as server:
        for headers, names in (
            (bearer(key) if key else {}, ["open"]),
            (bearer("secret a"), ["support", "link", "open"]),
        ):
            shown = [model["id"] for model in (await server.client.get("/v1/models", headers=headers)).json()["data"]]
            assert shown == [MODEL_ID, *names]


async def test_metrics_name_only_what_the_catalogue_shows(tmp_path: Path) -> None:
    """All numbers are there; those of closed adapters are those of `other`."""
    text = "support: {source: local, id: teamonly, keys: [team-a]}\nall: {source: local, id: open}"
    flags = {"metrics_prefix": ("vllm",), "public_configuration": {"max-active-adapters": 4}}
    async with closed(tmp_path, text, **flags) as server:
        for name in ("support", "all"):
            asked = await server.client.post("/generate", json=body("/generate", name), headers=bearer("secret a"))
            assert asked.status_code == 200, asked.text
        server.says("abc", hangs=True)
        running = asyncio.create_task(
            server.client.post("/generate", json=body("/generate", "support"), headers=bearer("secret a"))
        )
        await server.shard.until(lambda: server.shard.num_running == 1)
        for accept in ("text/plain", "application/json"):
            owner, other, nobody = [
                (await server.client.get("/metrics", headers={"accept": accept, **headers})).text.replace("\\", "")
                for headers in (bearer("secret a"), bearer("secret b"), {})
            ]
            assert 'adapter="support"' in owner and 'adapter="all"' in owner
            for shown in (other, nobody):
                assert "support" not in shown and 'adapter="all"' in shown and 'adapter="other"' in shown
        lines = (await server.client.get("/metrics", headers=bearer("secret b"))).text.splitlines()
        assert 'lorikeet_adapter_requests_total{adapter="other"} 2.0' in lines
        running.cancel()
        await server.idle()
