"""Adapters on every generation route: which one a request gets, what the shard receives, what the answer names."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from lorikeet.adapters.errors import AdapterInvalid, AdapterNotAllowed, AdapterNotFound, SourceUnreachable
from lorikeet.proto import shard_pb2
from tests.hub_server import Repository, hub
from tests.router.scripted_loader import digest_of, finds_all
from tests.router.serving import MODEL_ID, Serving, parse_events, serving

pytestmark = pytest.mark.anyio

NATIVE = ("/", "/generate", "/invocations")


@pytest.fixture(scope="module")
async def shared(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("serving"), adapters=True) as started:
        for name in ("one", "two", "sub/three"):
            started.adapter(name)
        yield started


@pytest.fixture
async def server(shared: Serving) -> AsyncIterator[Serving]:
    """No request may still run after a test, and no adapter is loaded before one."""
    shared.shard.submits.clear()
    shared.loader.calls.clear()
    shared.loader.answer = finds_all
    assert shared.dispatcher.admission is not None
    shared.dispatcher.admission.loading._known.clear()
    yield shared
    shared.loader.may_answer.set()
    await shared.idle()


def body(path: str, adapter: str | None, **more: Any) -> dict[str, Any]:
    """A small request to `path` for `adapter`."""
    if path == "/v1/completions":
        return {"model": adapter, "prompt": "Hi", "max_tokens": 2, **more}
    if path == "/v1/chat/completions":
        return {"model": adapter, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **more}
    return {"inputs": "Hi", "parameters": {"max_new_tokens": 2, "adapter_id": adapter, **more}}


@pytest.mark.parametrize("path", [*NATIVE, "/v1/completions", "/v1/chat/completions"])
async def test_an_adapter_answers_and_is_named(server: Serving, path: str) -> None:
    response = await server.client.post(path, json=body(path, "one"))
    assert response.status_code == 200, response.text
    (call,) = server.loader.asked
    assert call["fetch"]["source"] == "local" and call["fetch"]["id"] == "one"
    digest = digest_of(call)
    (submit,) = server.shard.submits
    assert (submit.adapter.digest, submit.adapter.id, submit.adapter.source) == (digest, "one", "local")
    assert submit.adapter.revision == call["fetch"]["revision"]
    named = {name: response.headers[f"x-adapter-{name}"] for name in ("id", "source", "revision", "digest")}
    assert named == {"id": "one", "source": "local", "revision": submit.adapter.revision, "digest": digest}
    if path.startswith("/v1/"):
        assert response.json()["model"] == "one"


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_an_upload_that_ends_is_served_at_once(server: Serving, path: str) -> None:
    """Neither the missing folder nor its incomplete content is remembered."""
    name = f"late{path.replace('/', '-')}"
    assert (await server.client.post(path, json=body(path, name))).status_code == 404
    server.adapter(name, **{"adapter_model.safetensors": "incompl"})
    incomplete: list[str] = []

    async def answer(call: dict[str, Any]) -> dict[str, Any]:
        incomplete[:] = incomplete or [call["fetch"]["revision"]]
        if call["fetch"]["revision"] in incomplete:
            raise AdapterInvalid("adapter_model.safetensors is truncated")
        return await finds_all(call)

    server.loader.answer = answer
    for _ in range(2):
        response = await server.client.post(path, json=body(path, name))
        assert response.status_code == 422 and "truncated" in response.text
    server.adapter(name, **{"adapter_model.safetensors": "complete"})
    assert (await server.client.post(path, json=body(path, name))).status_code == 200


@pytest.mark.parametrize("path", ["/generate_stream", "/", "/v1/completions", "/v1/chat/completions"])
async def test_a_stream_names_its_adapter_before_the_first_token(server: Serving, path: str) -> None:
    request = body(path, "two")
    if path != "/generate_stream":
        request["stream"] = True
    response = await server.client.post(path, json=request)
    assert response.status_code == 200
    assert response.headers["x-adapter-id"] == "two"
    assert response.headers["x-adapter-digest"] == digest_of(server.loader.asked[0])
    assert len(parse_events(response.text)) >= 2


@pytest.mark.parametrize("name", [None, "", "__base_model__", MODEL_ID])
async def test_the_base_model_by_all_its_names(server: Serving, name: str | None) -> None:
    response = await server.client.post("/generate", json=body("/generate", name))
    assert response.status_code == 200
    assert not [header for header in response.headers if header.startswith("x-adapter")]
    assert not server.shard.submits[0].HasField("adapter")
    assert server.loader.asked == []


async def test_loaded_adapters_are_not_loaded_again(server: Serving) -> None:
    for _ in range(3):
        assert (await server.client.post("/generate", json=body("/generate", "one"))).status_code == 200
    assert len(server.loader.asked) == 1


@pytest.mark.parametrize("seconds", [0.0, 60.0])
async def test_a_changed_adapter_is_used_once_its_source_is_checked(tmp_path: Path, seconds: float) -> None:
    async with serving(tmp_path, adapters=True, auth_cache_ttl_s=seconds) as server:
        server.adapter("one")
        first = await server.client.post("/generate", json=body("/generate", "one"))
        server.adapter("one", **{"adapter_model.safetensors": "other bytes"})
        again = await server.client.post("/generate", json=body("/generate", "one"))
        changed = again.headers["x-adapter-digest"] != first.headers["x-adapter-digest"]
        assert changed == (seconds == 0.0)


async def test_requests_overtake_one_that_waits_for_its_adapter(server: Serving) -> None:
    server.loader.may_answer.clear()
    waiting = [asyncio.create_task(server.client.post("/generate", json=body("/generate", "one"))) for _ in range(3)]
    await server.shard.until(lambda: len(server.loader.asked) == 1)
    assert (await server.client.post("/generate", json=body("/generate", None))).status_code == 200
    assert len(server.shard.submits) == 1
    server.loader.may_answer.set()
    answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {200}
    assert len(server.loader.asked) == 1, "the same adapter is asked for once"
    assert len({answer.headers["x-adapter-digest"] for answer in answers}) == 1


async def test_the_shard_prefetches_before_the_request_arrives(server: Serving) -> None:
    server.shard.commands.clear()
    await server.client.post("/generate", json=body("/generate", "sub/three"))
    sent = [command for command in server.shard.commands if command.prefetches or command.submits]
    assert sent[0].prefetches[0].digest == sent[-1].submits[0].adapter.digest


async def test_a_disconnect_cancels_the_load(server: Serving) -> None:
    server.loader.may_answer.clear()
    task = asyncio.create_task(server.client.post("/generate", json=body("/generate", "one")))
    await server.shard.until(lambda: len(server.loader.asked) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    number = server.loader.asked[0]["call"]
    await server.shard.until(lambda: any(call.get("cancel") == number for call in server.loader.calls))
    await server.idle()


async def test_a_disconnect_keeps_a_load_that_others_wait_for(server: Serving) -> None:
    server.loader.may_answer.clear()
    tasks = [asyncio.create_task(server.client.post("/generate", json=body("/generate", "one"))) for _ in range(2)]
    await server.shard.until(lambda: server.dispatcher.num_active == 2)
    tasks[0].cancel()
    await server.shard.until(lambda: server.dispatcher.num_active == 1)
    server.loader.may_answer.set()
    assert (await tasks[1]).status_code == 200
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not any("cancel" in call for call in server.loader.calls)


async def test_a_long_wait_makes_a_load_urgent(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.router.adapters.loading.URGENT_S", 0.05)
    server.loader.may_answer.clear()
    task = asyncio.create_task(server.client.post("/generate", json=body("/generate", "one")))
    await server.shard.until(lambda: any("urgent" in call for call in server.loader.calls))
    (urgent,) = [call for call in server.loader.calls if "urgent" in call]
    assert urgent["urgent"] == server.loader.asked[0]["call"]
    server.loader.may_answer.set()
    assert (await task).status_code == 200


async def test_after_a_crash_of_the_loader_the_next_request_loads_again(server: Serving) -> None:
    server.loader.may_answer.clear()
    task = asyncio.create_task(server.client.post("/generate", json=body("/generate", "one")))
    await server.shard.until(lambda: len(server.loader.asked) == 1)
    server.loader.hang_up()
    await server.shard.until(lambda: len(server.loader.asked) == 2)
    server.loader.hang_up()
    answer = await task
    assert (answer.status_code, answer.json()["error_type"]) == (503, "generation")
    assert answer.headers["retry-after"] == "1"
    server.loader.may_answer.set()
    assert (await server.client.post("/generate", json=body("/generate", "one"))).status_code == 200


LEAD = "Request failed during generation: Server error: "


@pytest.mark.parametrize(
    ("error", "status", "openai_type"),
    [
        (AdapterInvalid("its rank is a lie"), 422, "invalid_request_error"),
        (AdapterNotFound("gone since"), 404, "invalid_request_error"),
        (AdapterNotAllowed("not yours"), 403, "permission_error"),
        (AdapterNotAllowed("who are you", status=401), 401, "authentication_error"),
        (SourceUnreachable("no answer"), 503, "server_error"),
    ],
)
async def test_errors_of_the_loader(server: Serving, error: Any, status: int, openai_type: str) -> None:
    async def refuse(call: dict[str, Any]) -> dict[str, Any]:
        raise error

    server.loader.answer = refuse
    native = await server.client.post("/generate", json=body("/generate", "one"))
    assert (native.status_code, native.json()) == (status, {"error": f"{LEAD}{error}", "error_type": "generation"})
    assert ("retry-after" in native.headers) == (status == 503)
    openai = await server.client.post("/v1/completions", json=body("/v1/completions", "one"))
    error_body = openai.json()["error"]
    assert (openai.status_code, error_body["message"], error_body["type"]) == (status, str(error), openai_type)
    (streamed,) = await server.events("/generate_stream", body("/generate_stream", "one"))
    assert streamed == native.json()
    assert server.shard.submits == []


@pytest.mark.parametrize("path", NATIVE)
async def test_a_missing_adapter(server: Serving, path: str) -> None:
    response = await server.client.post(path, json=body(path, "none"))
    assert response.status_code == 404
    assert response.json()["error"].startswith(LEAD + "there is no adapter 'none'")


@pytest.mark.parametrize("name", ["none", "../roots/one", "/etc", "\x00", "a\nb"])
async def test_a_missing_model(server: Serving, name: str) -> None:
    response = await server.client.post("/v1/completions", json=body("/v1/completions", name))
    error_body = response.json()["error"]
    assert (response.status_code, error_body["code"], error_body["param"]) == (404, "model_not_found", "model")
    assert error_body["message"].startswith("The model `")


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({"adapter_source": "pbase"}, "pbase is not served"),
        ({"adapter_source": "ftp"}, "must be one of hub, local, s3"),
        ({"adapter_source": "hub", "adapter_id": "a b"}, "is not a hub id"),
        ({"adapter_id": "x" * 600}, "is not a name"),
    ],
)
async def test_invalid_names_and_sources(server: Serving, parameters: dict[str, Any], part: str) -> None:
    request = {"inputs": "Hi", "parameters": {"adapter_id": "one", **parameters}}
    response = await server.client.post("/generate", json=request)
    assert (response.status_code, response.json()["error_type"]) == (422, "validation")
    assert part in response.json()["error"]


async def test_a_file_that_a_shard_cannot_read_is_verified_and_loaded_again(server: Serving) -> None:
    response = await server.client.post("/generate", json=body("/generate", "one"))
    digest = response.headers["x-adapter-digest"]
    failed = shard_pb2.AdapterState(digest=digest, residency=shard_pb2.AdapterState.FAILED, reason="damaged")
    server.shard.tell(failed)
    await server.shard.until(lambda: any(call.get("verify") == digest for call in server.loader.calls))
    num_asked = len(server.loader.asked)
    assert (await server.client.post("/generate", json=body("/generate", "one"))).status_code == 200
    assert len(server.loader.asked) == num_asked + 1


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("token", ["t" * 4097, "t" * 5_000_000, "tökén", "a\r\nb: c", "a b", "a\x00"])
async def test_a_token_that_no_source_takes(server: Serving, path: str, token: str) -> None:
    """It fails its own request, and neither the load of another nor a later one."""
    server.loader.may_answer.clear()
    other = asyncio.create_task(server.client.post("/generate", json=body("/generate", "two")))
    await server.shard.until(lambda: len(server.loader.asked) == 1)
    response = await server.client.post(path, json=body(path, "one", api_token=token))
    assert response.status_code == 422 and "`api_token`" in response.text, response.text
    if len(token) < 4097 and "\n" not in token and "\x00" not in token:
        headers = {"authorization": f"Bearer {token}".encode()}
        response = await server.client.post(path, json=body(path, "one"), headers=headers)
        assert response.status_code == 422 and "`Authorization`" in response.text
    server.loader.may_answer.set()
    assert (await other).status_code == 200 and len(server.loader.asked) == 1
    assert (await server.client.post(path, json=body(path, "one", api_token="t" * 4096))).status_code == 200


async def test_a_public_adapter_needs_no_valid_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub({"a/public": Repository({"adapter_config.json": b"{}"})}) as source:
        monkeypatch.setattr(constants, "ENDPOINT", source.url)
        source.rejected.add("hf_expired")
        async with serving(tmp_path, adapters=True, adapter_source="hub") as server:
            headers = {"authorization": "Bearer hf_expired"}
            request = body("/v1/chat/completions", "a/public")
            response = await server.client.post("/v1/chat/completions", json=request, headers=headers)
            assert response.status_code == 200, response.text
            assert server.loader.asked[-1]["token"] is None, "others share the load of a public adapter"
            missing = await server.client.post("/generate", json=body("/generate", "a/none"), headers=headers)
            assert missing.status_code == 401 and "does not accept the token" in missing.text


async def test_each_part_of_a_merge_has_its_own_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's goes to the sources of those parts only that are not public."""
    files = {"adapter_config.json": b"{}"}
    with hub({"a/public": Repository(files), "a/private": Repository(files, token="hf_mine")}) as source:
        monkeypatch.setattr(constants, "ENDPOINT", source.url)
        async with serving(tmp_path, adapters=True, adapter_source="hub") as server:
            merged = {"ids": ["a/public", "a/private"], "weights": [0.5, 0.5]}
            request = {"inputs": "Hi", "parameters": {"merged_adapters": merged, "api_token": "hf_mine"}}
            response = await server.client.post("/generate", json=request)
            assert response.status_code == 200, response.text
            assert server.loader.asked[-1]["tokens"] == [None, "hf_mine"]


async def test_adapters_in_s3_are_below_the_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aliases may be anywhere. The store of this test does not answer, so that 503 shows what was looked up."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    (tmp_path / "catalogue.yaml").write_text("ours: {source: s3, id: private/a}")
    fields: dict[str, Any] = {"s3_prefixes": ("team/public",), "catalogue_path": str(tmp_path / "catalogue.yaml")}
    async with serving(tmp_path, adapters=True, **fields) as server:
        cases = (("team/public/a", 503), ("ours", 503), ("private/a", 404), ("team/publica", 404), ("s3://x/a", 404))
        for name, status in (*cases, ("team/public/../secret", 404), (".", 404), ("team/public", 404)):
            source = {} if name == "ours" else {"adapter_source": "s3"}
            response = await server.client.post("/generate", json=body("/generate", name, **source))
            assert response.status_code == status, (name, response.text)
            merged = {"ids": [name], "weights": [1.0]}
            request = {"inputs": "Hi", "parameters": {"merged_adapters": merged, **source}}
            assert (await server.client.post("/generate", json=request)).status_code == status


async def has_factors(call: dict[str, Any]) -> dict[str, Any]:
    """As an adapter that consists of factors alone, all scaled by 2."""
    return {**await finds_all(call), "scaling": 2.0}


@pytest.mark.parametrize("strategy", ["cat", "linear", "lora"])
async def test_a_sum_of_adapters_needs_no_merged_file(server: Serving, strategy: str) -> None:
    """The shard gets the adapters and the weights of the request; other weights load nothing."""
    server.loader.answer = has_factors
    digests: list[str] = []
    for weights in ([0.5, -2.0], [2.0, 0.125]):
        fields: dict[str, Any] = {
            "merged_adapters": {"ids": ["one", "two"], "weights": weights, "merge_strategy": strategy}
        }
        if strategy == "lora":
            pairs = zip(("one", "two"), weights, strict=True)
            fields = {"lora": [{"id": name, "scale": weight} for name, weight in pairs]}
        response = await server.client.post("/generate", json=body("/generate", None, **fields))
        assert response.status_code == 200, response.text
        assert [call["fetch"]["id"] for call in server.loader.asked] == ["one", "two"]
        submit = server.shard.submits[-1]
        composition = submit.composition
        assert list(composition.digests) == [digest_of(call) for call in server.loader.asked]
        assert composition.shares_factors == (strategy == "linear")
        pairs = zip(composition.shrink_weights, composition.expand_weights, strict=True)
        # the scaling of 2 is inside B: what a weight of PEFT's scales is the product
        assert [shrink * expand for shrink, expand in pairs] == pytest.approx(weights)
        assert response.headers["x-adapter-digest"] == submit.adapter.digest
        assert response.headers["x-adapter-id"] == "one,two"
        digests.append(submit.adapter.digest)
    assert len({*digests, *(digest_of(call) for call in server.loader.asked)}) == 4


async def test_what_a_shard_cannot_add_is_merged_into_a_file(server: Serving) -> None:
    merged = {"ids": ["one", "two"], "weights": [1.0, 1.0], "merge_strategy": "cat"}
    await server.client.post("/generate", json=body("/generate", None, merged_adapters=merged))
    assert [next(iter({"fetch", "merge"} & call.keys())) for call in server.loader.asked] == ["fetch", "fetch", "merge"]
    assert not server.shard.submits[-1].HasField("composition")
    server.loader.answer = has_factors
    server.loader.calls.clear()
    many = {"ids": ["one"] * 5, "weights": [1.0] * 5, "merge_strategy": "cat"}  # of more than it can
    await server.client.post("/generate", json=body("/generate", None, merged_adapters=many))
    assert [call.keys() & {"fetch", "merge"} for call in server.loader.asked] == [{"merge"}]


async def test_merged_adapters(server: Serving) -> None:
    merged = {"ids": ["one", "two"], "weights": [0.25, 0.75], "merge_strategy": "TIES", "density": 0.5}
    request = {"inputs": "Hi", "parameters": {"max_new_tokens": 2, "merged_adapters": merged}}
    response = await server.client.post("/generate", json=request)
    assert response.status_code == 200, response.text
    (call,) = server.loader.asked
    merge = call["merge"]
    assert [pin["id"] for pin in merge.pop("pins")] == ["one", "two"]
    assert merge == {"weights": [0.25, 0.75], "strategy": "ties", "density": 0.5, "majority_sign_method": "total"}
    assert response.headers["x-adapter-id"] == "one,two"
    assert len(response.headers["x-adapter-revision"].split(",")) == 2
    other = {**merged, "weights": [0.75, 0.25]}
    await server.client.post("/generate", json={"inputs": "Hi", "parameters": {"merged_adapters": other}})
    assert len(server.loader.asked) == 2


@pytest.mark.parametrize(
    ("merged", "text"),
    [
        ({"ids": [], "weights": []}, "at least one adapter ID must be provided when setting `adapters`"),
        ({"ids": ["one"], "weights": []}, "number of adapter IDs must match number of adapter weights"),
        ({"ids": ["one", ""], "weights": [1, 1]}, "Base model adapter cannot be merged."),
        ({"ids": ["one", MODEL_ID], "weights": [1, 1]}, "Base model adapter cannot be merged."),
        ({"ids": ["one"], "weights": [1], "merge_strategy": "svd"}, "`merge_strategy` must be one of"),
        ({"ids": ["one"], "weights": [1], "majority_sign_method": "x"}, "`majority_sign_method` must be one of"),
        ({"ids": ["one"], "weights": [1], "merge_strategy": "ties"}, "`density` must be > 0 and <= 1 for ties"),
        ({"ids": ["one"] * 40, "weights": [1] * 40}, "`adapters` supports up to 32 adapters. Given: 40"),
    ],
)
async def test_broken_merges(server: Serving, merged: dict[str, Any], text: str) -> None:
    request = {"inputs": "Hi", "parameters": {"merged_adapters": merged}}
    response = await server.client.post("/generate", json=request)
    assert response.status_code == 422
    assert response.json()["error"].startswith(f"Input validation error: {text}")


async def test_best_of_shares_one_adapter(server: Serving) -> None:
    request = body("/generate", "one", best_of=2, do_sample=True)
    response = await server.client.post("/generate", json=request)
    assert response.status_code == 200, response.text
    assert len({submit.adapter.digest for submit in server.shard.submits}) == 1
    assert len(server.shard.submits) == 2


async def test_overload_of_one_adapter_rejects_only_its_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, adapters=True, max_queued_per_adapter=3) as server:
        for name in ("one", "two"):
            server.adapter(name)
        server.loader.may_answer.clear()
        tasks = [asyncio.create_task(server.client.post("/generate", json=body("/generate", "one"))) for _ in range(3)]
        await server.shard.until(lambda: server.dispatcher.num_active == 3)
        refused = await server.client.post("/generate", json=body("/generate", "one"))
        assert (refused.status_code, refused.json()["error_type"]) == (429, "overloaded")
        assert "retry-after" in refused.headers
        tasks.append(asyncio.create_task(server.client.post("/generate", json=body("/generate", "two"))))
        await server.shard.until(lambda: server.dispatcher.num_active == 4)
        server.loader.may_answer.set()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}


async def test_the_default_adapter_serves_requests_without_one(tmp_path: Path) -> None:
    (tmp_path / "roots" / "one").mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "roots" / "one" / name).write_text("{}")
    async with serving(tmp_path, adapters=True, adapter_id="one") as server:
        for path, name in (("/generate", None), ("/generate", ""), ("/v1/completions", "")):
            response = await server.client.post(path, json=body(path, name))
            assert response.headers["x-adapter-id"] == "one", response.text
        for path, name in (("/generate", "__base_model__"), ("/generate", MODEL_ID), ("/v1/completions", MODEL_ID)):
            response = await server.client.post(path, json=body(path, name))
            assert response.status_code == 200 and "x-adapter-id" not in response.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("model", [MODEL_ID, "", "__base_model__", "one"])
async def test_adapter_id_on_openai_s_routes(server: Serving, path: str, model: str) -> None:
    response = await server.client.post(path, json=body(path, model, adapter_id="one"))
    assert response.status_code == 200, response.text
    assert response.headers["x-adapter-id"] == response.json()["model"] == "one"
    (submit,) = server.shard.submits
    assert submit.adapter.id == "one"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_merged_adapters_on_openai_s_routes(server: Serving, path: str) -> None:
    merged = {"ids": ["one", "two"], "weights": [0.5, 0.25], "merge_strategy": "ties", "density": 0.5}
    response = await server.client.post(path, json=body(path, MODEL_ID, merged_adapters=merged))
    assert response.status_code == 200, response.text
    (call,) = server.loader.asked
    assert [pin["id"] for pin in call["merge"]["pins"]] == ["one", "two"]
    assert (call["merge"]["weights"], call["merge"]["strategy"]) == ([0.5, 0.25], "ties")
    assert response.headers["x-adapter-id"] == "one,two"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("model", "fields", "status", "param"),
    [
        ("two", {"adapter_id": "one"}, 400, "model"),
        ("two", {"merged_adapters": {"ids": ["one"], "weights": [1]}}, 400, "model"),
        (MODEL_ID, {"adapter_id": "one", "merged_adapters": {"ids": ["one"], "weights": [1]}}, 400, "adapter_id"),
        (MODEL_ID, {"merged_adapters": {"ids": ["one"], "weights": [1, 2]}}, 400, "merged_adapters"),
        (MODEL_ID, {"merged_adapters": {"ids": ["one"], "weights": [1] * 100_000}}, 400, "merged_adapters"),
        (MODEL_ID, {"merged_adapters": {}}, 400, "merged_adapters"),
        (MODEL_ID, {"adapter_id": "none"}, 404, "adapter_id"),
        (MODEL_ID, {"merged_adapters": {"ids": ["none"], "weights": [1]}}, 404, "merged_adapters"),
    ],
)
async def test_invalid_adapters_on_openai_s_routes(
    server: Serving, path: str, model: str, fields: dict[str, Any], status: int, param: str
) -> None:
    response = await server.client.post(path, json=body(path, model, **fields))
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
    assert not server.shard.submits


async def test_the_tier_says_where_the_adapter_was(tmp_path: Path) -> None:
    async with serving(tmp_path, adapters=True) as server:
        server.adapter("near")
        [link] = server.dispatcher.links
        seen = []
        for residency in (None, None, shard_pb2.AdapterState.RESIDENT, shard_pb2.AdapterState.HOST_MEMORY):
            if residency is not None:
                [(_, content)] = server.service.admission.loading.contents()
                link.residency.update(shard_pb2.AdapterState(digest=content.digest, residency=residency))
            for path in ("/generate", "/generate_stream"):
                response = await server.client.post(path, json=body(path, "near"))
                seen.append(response.headers["x-lorikeet-adapter-tier"])
        assert seen == ["source", *["disk"] * 3, *["slot"] * 2, *["host"] * 2]
        metrics = (await server.client.get("/metrics")).text
        for tier, number in (("source", 1), ("disk", 3), ("slot", 2), ("host", 2)):
            assert f'lorikeet_adapter_hits_total{{tier="{tier}"}} {number}.0' in metrics
