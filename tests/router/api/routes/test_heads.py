"""Medusa heads of requests and of operators: which ones reach the shard, and what is rejected."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from tests.router.api.routes.test_adapters import body
from tests.router.api.routes.test_catalogue import bearer, made, write
from tests.router.scripted_loader import digest_of, finds_all
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

PATHS = ("/", "/generate", "/predict", "/v1/completions", "/v1/chat/completions")
HOLDS = {"lora": (8, 0), "heads": (0, 3), "more": (0, 5), "both": (8, 2)}
"""Rank and number of heads of each adapter."""


async def finds_heads(call: dict[str, Any]) -> dict[str, Any]:
    asked = call.get("fetch") or call["check"]
    rank, num_heads = HOLDS[asked["id"]]
    return {**await finds_all(call), "rank": rank, "num_heads": num_heads}


@pytest.fixture(scope="module")
async def shared(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("heads")
    made(folder, *HOLDS)
    async with serving(folder, adapters=True, loader_answer=finds_heads) as started:
        yield started


@pytest.fixture(scope="module")
async def shared_default(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("default")
    made(folder, *HOLDS)
    async with serving(folder, adapters=True, loader_answer=finds_heads, adapter_id="heads") as started:
        assert started.service.preloader is not None
        await started.service.preloader.settled.wait()
        yield started


@pytest.fixture
async def server(shared: Serving) -> AsyncIterator[Serving]:
    shared.shard.submits.clear()
    yield shared
    await shared.idle()


@pytest.fixture
async def default(shared_default: Serving) -> AsyncIterator[Serving]:
    """A server whose default adapter has heads only."""
    shared_default.shard.submits.clear()
    yield shared_default
    await shared_default.idle()


def request_to(path: str, adapter: str | None, **more: Any) -> dict[str, Any]:
    if path == "/predict":
        return {"prompt": "Hi", "adapter_id": adapter, "speculative_tokens": None, "max_new_tokens": 2, **more}
    if path.startswith("/v1/"):
        return body(path, adapter or MODEL_ID, **more)
    return body(path, adapter, **more)


async def sent(server: Serving, path: str, adapter: str | None, **more: Any) -> tuple[str, str, int]:
    """What the shard received of one request: the ids of adapter and heads, and the maximum number of heads."""
    response = await server.client.post(path, json=request_to(path, adapter, **more))
    assert response.status_code == 200, response.text
    submit = server.shard.submits[-1]
    for pin in (submit.adapter, submit.heads):
        assert pin.digest == (digest_of({"fetch": _pin(pin)}) if pin.id else "")
    assert submit.HasField("adapter") == bool(submit.adapter.id)
    return submit.adapter.id, submit.heads.id, submit.speculation.num_heads


def _pin(pin: Any) -> dict[str, Any]:
    return {"source": pin.source, "id": pin.id, "revision": pin.revision}


@pytest.mark.parametrize("path", PATHS)
async def test_heads_with_an_adapter(server: Serving, path: str) -> None:
    most = 4 if path == "/predict" else 255
    assert await sent(server, path, "lora", heads_id="heads") == ("lora", "heads", most)
    assert server.shard.submits[-1].speculation.method == "auto"
    assert await sent(server, path, "lora", heads_id="more", speculative_tokens=2) == ("lora", "more", 2)
    assert await sent(server, path, "lora", heads_id="both") == ("lora", "both", most)
    assert await sent(server, path, "both", heads_id="heads") == ("both", "heads", most)
    assert await sent(server, path, None, heads_id="heads") == ("", "heads", most)


@pytest.mark.parametrize("path", PATHS)
async def test_adapters_with_heads(server: Serving, path: str) -> None:
    most = 4 if path == "/predict" else 255
    assert await sent(server, path, "both") == ("both", "", most)
    # Heads alone do not change the base model, so its pages are shared.
    assert await sent(server, path, "heads") == ("", "heads", most)
    assert await sent(server, path, "heads", heads_id="more") == ("", "more", most)
    assert await sent(server, path, "heads", speculative_tokens=0) == ("", "", 0)
    assert await sent(server, path, "heads", speculative_method="off") == ("", "", 0)


async def test_an_adapter_of_heads_only_is_named_in_the_answer(server: Serving) -> None:
    response = await server.client.post("/generate", json=body("/generate", "heads", details=True))
    assert response.headers["x-adapter-id"] == "heads"
    assert response.headers["x-adapter-digest"] == server.shard.submits[-1].heads.digest
    assert response.json()["details"]["speculation"]["method"] == "auto"
    response = await server.client.post("/generate", json=body("/generate", "lora", details=True))
    assert "speculation" not in response.json()["details"]


@pytest.mark.parametrize("path", PATHS)
async def test_default_heads_serve_all_requests_without_heads(default: Serving, path: str) -> None:
    most = 4 if path == "/predict" else 255
    assert await sent(default, path, None) == ("", "heads", most)
    assert await sent(default, path, "__base_model__") == ("", "heads", most)
    assert await sent(default, path, "lora") == ("lora", "heads", most)
    assert await sent(default, path, "both") == ("both", "", most)
    assert await sent(default, path, "more") == ("", "more", most)
    assert await sent(default, path, "lora", heads_id="more") == ("lora", "more", most)
    assert await sent(default, path, "lora", heads_id="__base_model__") == ("lora", "", 4 if path == "/predict" else 0)
    assert await sent(default, path, "lora", speculative_method="medusa") == ("lora", "heads", most)
    assert await sent(default, path, "lora", speculative_method="lookup") == ("lora", "", 0)
    assert await sent(default, path, "lora", speculative_tokens=0) == ("lora", "", 0)


async def test_default_heads_are_shown(default: Serving) -> None:
    assert (await default.client.get("/info")).json()["speculate"] == 3
    assert (await default.client.get("/v1/capabilities")).json()["speculation"]["heads"] is True
    response = await default.client.post("/generate", json=body("/generate", "lora", details=True))
    assert response.json()["details"]["speculation"]["sources"] == {"target": 2}
    assert response.headers["x-adapter-id"] == "lora"


async def test_an_alias_may_name_heads(tmp_path: Path) -> None:
    made(tmp_path, *HOLDS)
    path = write(tmp_path, "fast: {id: lora, parameters: {heads_id: extra}}\nextra: {id: heads}")
    async with serving(tmp_path, adapters=True, loader_answer=finds_heads, catalogue_path=path) as server:
        for route in ("/generate", "/v1/chat/completions"):
            assert await sent(server, route, "fast") == ("lora", "heads", 255)
            assert await sent(server, route, "fast", heads_id="more") == ("lora", "more", 255)
            assert await sent(server, route, "fast", speculative_method="lookup") == ("lora", "", 0)
            assert await sent(server, route, "fast", speculative_tokens=0) == ("lora", "", 0)


@pytest.mark.parametrize(
    "words", [{"speculative_method": "ngram"}, {"speculative_tokens": 0}, {"speculative_method": "off"}]
)
async def test_heads_that_could_not_be_used_are_rejected(server: Serving, words: dict[str, Any]) -> None:
    for path in PATHS:
        response = await server.client.post(path, json=request_to(path, "lora", heads_id="heads", **words))
        assert (
            response.status_code in (400, 422)
            and "`heads_id` needs `speculative_method` medusa or auto" in response.text
        )
        none = request_to(path, "lora", heads_id="__base_model__", **words)  # no heads
        assert (await server.client.post(path, json=none)).status_code == 200


async def test_heads_are_authorised_like_adapters(tmp_path: Path) -> None:
    made(tmp_path, *HOLDS)
    (tmp_path / "keys.yaml").write_text(f"- {{name: team-a, sha256: {sha256('secret a')}}}\n")
    path = write(tmp_path, "mine: {id: heads, keys: [team-a]}")
    fields = {"catalogue_path": path, "keys_path": str(tmp_path / "keys.yaml"), "keys_optional": True}
    async with serving(tmp_path, adapters=True, loader_answer=finds_heads, **fields) as server:
        for route in ("/generate", "/v1/completions"):
            for headers, status in ((bearer("secret a"), 200), ({}, 404)):
                request = body(route, "lora", heads_id="mine")
                response = await server.client.post(route, json=request, headers=headers)
                assert response.status_code == status, response.text
            assert "there is no adapter 'mine'" in response.text
            if route == "/v1/completions":
                assert response.json()["error"]["param"] == "heads_id"


@pytest.mark.parametrize(
    ("parameters", "statuses", "part"),
    [
        ({"heads_id": "nowhere"}, (404, 404), "there is no adapter 'nowhere'"),
        ({"heads_id": "lora"}, (422, 400), "`heads_id` lora brings no heads"),
        ({"speculative_method": "medusa"}, (422, 422), "`speculative_method` medusa needs heads"),
    ],
)
async def test_rejected_heads(server: Serving, parameters: dict[str, Any], statuses: Any, part: str) -> None:
    for path in ("/generate", "/predict"):
        response = await server.client.post(path, json=request_to(path, "lora", **parameters))
        assert response.status_code == statuses[0], response.text
        assert part in response.text
    [event] = await server.events("/generate_stream", body("/generate_stream", "lora", **parameters))
    assert part in event["error"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        for stream in (False, True):
            response = await server.client.post(path, json={**body(path, "lora", **parameters), "stream": stream})
            assert response.status_code == statuses[1], response.text
            assert part in response.json()["error"]["message"]
    assert server.shard.submits == []
    await server.idle()


async def test_a_server_of_the_base_model_alone_rejects_heads(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for path in ("/generate", "/v1/completions"):
            response = await server.client.post(path, json=request_to(path, None, heads_id="heads"))
            assert response.status_code == 422
            assert "`heads_id` is not supported" in response.text


async def test_admin_routes_show_the_number_of_heads(tmp_path: Path) -> None:
    made(tmp_path, *HOLDS)
    fields: dict[str, Any] = {"loader_answer": finds_heads, "admin_key_sha256": sha256("admin")}
    async with serving(tmp_path, adapters=True, **fields) as server:
        await sent(server, "/generate", "lora", heads_id="heads")
        loaded = (await server.client.get("/admin/adapters", headers=bearer("admin"))).json()["loaded"]
        assert sorted((adapter["rank"], adapter["num_heads"]) for adapter in loaded) == [(0, 3), (8, 0)]


async def test_a_disconnect_while_heads_load_leaks_nothing(server: Serving) -> None:
    loading = server.service.admission.loading
    assert await sent(server, "/generate", "lora") == ("lora", "", 0)
    loading._known = type(loading._known)(
        (name, content) for name, content in loading._known.items() if ":lora@" in name
    )
    server.loader.may_answer.clear()
    for adapter in ("lora", None):
        request = body("/generate", adapter, heads_id="heads")
        asking = asyncio.create_task(server.client.post("/generate", json=request))
        await server.shard.until(lambda: loading.num_loading == 1)
        asking.cancel()
        await server.shard.until(lambda: loading.num_loading == 0 and server.dispatcher.num_active == 0)
    assert loading._num_waiting == {}
    server.loader.may_answer.set()
    assert await sent(server, "/generate", "lora", heads_id="heads") == ("lora", "heads", 255)


async def test_no_request_waits_for_default_heads(tmp_path: Path) -> None:
    """Neither for their source nor for the loader, whose failure would block requests for the base model."""
    made(tmp_path, *HOLDS)
    fields: dict[str, Any] = {"loader_answer": finds_heads, "adapter_id": "heads", "auth_cache_ttl_s": 0.0}
    async with serving(tmp_path, adapters=True, **fields) as server:
        assert server.service.preloader is not None
        await server.service.preloader.settled.wait()
        assert await sent(server, "/generate", "lora") == ("lora", "heads", 255)
        server.service.admission.loading._known.clear()
        server.loader.may_answer.clear()
        shutil.rmtree(tmp_path / "roots" / "heads")
        assert await sent(server, "/generate", None) == ("", "heads", 255)
        server.loader.may_answer.set()
        assert await sent(server, "/generate", "lora") == ("lora", "heads", 255)


async def test_default_heads_may_be_an_alias_of_the_catalogue(tmp_path: Path) -> None:
    made(tmp_path, *HOLDS)
    path = write(tmp_path, "general: {id: more}\nfast: {id: heads}")
    fields: dict[str, Any] = {"loader_answer": finds_heads, "catalogue_path": path, "adapter_id": "general"}
    async with serving(tmp_path, adapters=True, **fields) as server:
        assert server.service.preloader is not None
        await server.service.preloader.settled.wait()
        assert await sent(server, "/generate", None) == ("", "more", 255)
        assert await sent(server, "/generate", "lora") == ("lora", "more", 255)
        (tmp_path / "catalogue.yaml").write_text("general: {id: heads}")
        await server.service.reloading.reload()
        await server.shard.until(lambda: server.service.selection.directory.default_heads is not None)
        assert await sent(server, "/generate", "lora") == ("lora", "heads", 255)
