"""A server that API keys close: who is admitted, limits of keys, and invalid keys."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from huggingface_hub import constants

from lorikeet.adapters.keys import Key, sha256
from lorikeet.router.api.access import FAILURE_S, MAX_FAILURES, KeyLimits
from lorikeet.router.errors import KeyLimitReached
from lorikeet.router.requests.request import Caller
from lorikeet.router.schemas.adapters import AdapterFields
from tests.router.api.routes.test_adapters import body
from tests.router.api.routes.test_catalogue import bearer
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

KEYS = (
    f"- {{name: one, sha256: {sha256('secret one')}}}\n"
    f"- {{name: root, sha256: {sha256('secret root')}, admin: true}}\n"
    f"- {{name: former, sha256: {sha256('secret former')}, removed: true}}\n"
)
OPEN = ("/health", "/ready", "/startup", "/ping", "/docs", "/docs/assets/swagger-ui.css", "/openapi.json")
CLOSED = ("/info", "/metrics", "/v1/models", f"/v1/models/{MODEL_ID}", "/admin/adapters", "/nowhere", "//info/")
POSTS = ("/", "/invocations", "/generate", "/generate_stream", "/predict", "/tokenize", "/v1/completions",
         "/v1/chat/completions", "/v1/embeddings", "/v1/load_lora_adapter", "/admin/catalogue/reload")  # fmt: skip


def closed(folder: Path, keys: str = KEYS, **fields: Any) -> Any:
    (folder / "keys.yaml").write_text(keys)
    return serving(folder, adapters=True, keys_path=str(folder / "keys.yaml"), **fields)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with closed(tmp_path) as started:
        yield started


async def test_requests_without_a_valid_key_get_401(server: Serving) -> None:
    for headers in (
        {},
        bearer("wrong"),
        {"x-api-key": "wrong"},
        {"authorization": "Basic eDp5"},
        bearer("secret former"),
    ):
        paths = CLOSED if not headers else CLOSED[:3]
        answers = [await server.client.get(path, headers=headers) for path in paths]
        if not headers:
            answers += [await server.client.post(path, json={"stream": True}) for path in POSTS]
            answers.append(await server.client.post("/generate", content=b"x" * (1 << 20)))
            answers.append(await server.client.options("/v1/completions"))
        for answer in answers:
            assert answer.status_code == 401, (answer.url, answer.text)
            assert answer.headers["www-authenticate"] == "Bearer"
            if "/v1/" in answer.url.path:
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            else:
                assert answer.json()["error_type"] == "unauthorized"
    assert not server.shard.submits


async def test_a_valid_key_opens_it(server: Serving) -> None:
    for headers in (bearer("secret one"), {"x-api-key": "secret one"}, bearer("hf_x") | {"x-api-key": "secret one"}):
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            answer = await server.client.post(path, json=body(path, MODEL_ID), headers=headers)
            assert answer.status_code == 200, answer.text
        assert (await server.client.get("/v1/models", headers=headers)).status_code == 200


async def test_what_is_open_without_a_key(server: Serving) -> None:
    for path in OPEN:
        answer = await server.client.get(path)
        assert answer.status_code == 200, (path, answer.text)
    asked = {"origin": "http://page", "access-control-request-method": "POST"}
    assert (await server.client.options("/v1/completions", headers=asked)).status_code == 200


async def test_metrics_by_a_flag(tmp_path: Path) -> None:
    async with closed(tmp_path, metrics_without_key=True) as server:
        assert (await server.client.get("/metrics")).status_code == 200
        assert (await server.client.get("/info")).status_code == 401


async def test_optional_keys(tmp_path: Path) -> None:
    async with closed(tmp_path, keys_optional=True) as server:
        for headers in ({}, bearer("anything")):
            answer = await server.client.post("/generate", json=body("/generate", MODEL_ID), headers=headers)
            assert answer.status_code == 200, answer.text


async def test_keys_are_reloaded(tmp_path: Path) -> None:
    async with closed(tmp_path) as server:
        (tmp_path / "keys.yaml").write_text(f"- {{name: two, sha256: {sha256('secret two')}}}\n")
        await server.service.reloading.reload()
        assert (await server.client.get("/v1/models", headers=bearer("secret one"))).status_code == 401
        assert (await server.client.get("/v1/models", headers=bearer("secret two"))).status_code == 200
        # A former key is still known, so that it is never sent to a source.
        assert server.service.selection.keys.knew("secret one")


async def test_invalid_keys_are_limited_per_address(tmp_path: Path) -> None:
    async with closed(tmp_path) as server:
        for number in range(MAX_FAILURES):
            assert (await server.client.get("/v1/models", headers=bearer(f"invalid {number}"))).status_code == 401
        answer = await server.client.get("/v1/models", headers=bearer("invalid"))
        assert answer.status_code == 429
        assert 0 < int(answer.headers["retry-after"]) <= FAILURE_S
        assert (await server.client.get("/v1/models")).status_code == 401


async def test_a_valid_key_is_not_limited_by_the_failures_of_others(tmp_path: Path) -> None:
    """Nor is one that was never seen from that address, which many clients may have."""
    async with closed(tmp_path) as server:
        for number in range(MAX_FAILURES + 1):
            await server.client.get("/v1/models", headers=bearer(f"invalid {number}"))
        for headers in (bearer("secret one"), {"x-api-key": "secret root"}, bearer("secret root")):
            assert (await server.client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "attempt",
    [
        lambda number: bearer(f"attempt {number}") | {"x-api-key": "secret one"},
        lambda number: bearer("secret one") | {"x-api-key": f"attempt {number}"},
        lambda number: bearer("secret root") | {"x-api-key": "secret one"},
        lambda number: bearer(f"hf_{number}") | {"x-api-key": f"attempt {number}"},
    ],
    ids=["Authorization", "x-api-key", "two valid keys", "both"],
)
async def test_a_wrong_credential_counts_wherever_it_stands(tmp_path: Path, attempt: Any) -> None:
    async with closed(tmp_path) as server:
        answers = [await server.client.get("/v1/models", headers=attempt(number)) for number in range(MAX_FAILURES)]
        assert {answer.status_code for answer in answers} == {401}
        assert len({answer.text for answer in answers}) == 1 and "two different credentials" in answers[0].text
        assert (await server.client.get("/v1/models", headers=attempt(99))).status_code == 429
        both = bearer("secret one") | {"x-api-key": "secret one"}
        assert (await server.client.get("/v1/models", headers=both)).status_code == 200


async def test_refused_administrators_are_logged_with_their_address(tmp_path: Path) -> None:
    async with serving(tmp_path, adapters=True, admin_key_sha256=sha256("admin")) as server:
        with structlog.testing.capture_logs() as lines:
            await server.client.get("/admin/adapters", headers=bearer("invalid"))
            await server.client.get("/v1/models")
        (line,) = [line for line in lines if line.get("path") == "/admin/adapters"]
        assert (line["log_level"], line["client"], line["reason"]) == ("info", "127.0.0.1", "admin_only")
        for _ in range(MAX_FAILURES):
            await server.client.get("/admin/adapters", headers=bearer("invalid"))
        assert (await server.client.get("/admin/adapters", headers=bearer("invalid"))).status_code == 429
        assert (await server.client.get("/admin/adapters", headers=bearer("admin"))).status_code == 200


async def test_limits_of_a_key(tmp_path: Path) -> None:
    keys = "".join(
        f"- {{name: {name}, sha256: {sha256(name)}, {limit}}}\n"
        for name, limit in (
            ("rate", "requests_per_minute: 2"),
            ("tokens", "tokens_per_minute: 3"),
            ("one", "concurrency: 1"),
            ("free", "isolate: false"),
        )
    )
    async with closed(tmp_path, keys) as server:

        async def ask(key: str) -> httpx.Response:
            return await server.client.post(
                "/v1/completions", json=body("/v1/completions", MODEL_ID), headers=bearer(key)
            )

        assert [(await ask("rate")).status_code for _ in range(4)] == [200, 200, 429, 429]
        assert [(await ask("tokens")).status_code for _ in range(2)] == [200, 429]
        refused = await ask("rate")
        assert 0 < int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        server.says("x" * 64, step_seconds=0.01)
        running = asyncio.create_task(ask("one"))
        await server.shard.until(lambda: server.shard.num_running == 1)
        assert (await ask("one")).status_code == 429
        assert (await ask("free")).status_code == 200
        assert (await running).status_code == 200
        assert (await ask("one")).status_code == 200


def test_rates_refill() -> None:
    now = 0.0
    limits, key = KeyLimits(lambda: now), Key("k", requests_per_minute=60)
    for _ in range(60):
        limits.begin(key)
    with pytest.raises(KeyLimitReached) as caught:
        limits.begin(key)
    assert caught.value.retry_after == pytest.approx(1.0)
    now = 1.0
    limits.begin(key)
    with pytest.raises(KeyLimitReached):
        limits.begin(key)
    slow = Key("slow", requests_per_minute=0.5)
    limits.begin(slow)
    with pytest.raises(KeyLimitReached):
        limits.begin(slow)


@pytest.mark.parametrize("share", [False, True])
async def test_keys_share_prefixes_only_where_a_flag_says_so(tmp_path: Path, share: bool) -> None:
    async with closed(tmp_path, share_prefixes=share) as server:
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            for cache_salt, salt in ((None, ""), ("mine", "\0mine")):
                request = body(path, MODEL_ID, **({} if cache_salt is None else {"cache_salt": cache_salt}))
                answer = await server.client.post(path, json=request, headers=bearer("secret one"))
                assert answer.status_code == 200, answer.text
                assert "cache_salt" not in answer.headers.get("x-ignored-fields", "")
                assert server.shard.submits[-1].cache_salt == ("" if share else "key:one") + salt
            for wrong in ("", 3, "x" * 257):
                answer = await server.client.post(
                    path, json=body(path, MODEL_ID, cache_salt=wrong), headers=bearer("secret one")
                )
                assert answer.status_code in (400, 422) and "cache_salt" in answer.text


@pytest.mark.parametrize(
    ("endpoint", "forward", "sent"),
    [
        ("https://huggingface.co", False, {"hf_x"}),
        ("https://hub.example", False, {"hf_x", "other"}),
        ("https://huggingface.co", True, {"hf_x", "other", "sk-x"}),
    ],
)
async def test_which_bearer_tokens_go_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, forward: bool, sent: set[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    keys = f"- {{name: a, sha256: {sha256('own')}}}\n- {{name: b, sha256: {sha256('former')}, removed: true}}\n"
    async with closed(tmp_path, keys, keys_optional=True, forward_bearer=forward) as server:
        selection = server.service.selection
        tokens = ("hf_x", "other", "sk-x", "own", "former")
        chosen = {selection._token(AdapterFields("a/b"), Caller("id", token=token)) for token in tokens}
        assert chosen - {None} == sent
        for token in ("sk-x", "other"):  # in the body, any token that is not the server's
            assert selection._token(AdapterFields("a/b", token=token), Caller("id")) == token
        for token in ("own", "former"):
            assert selection._token(AdapterFields("a/b", token=token), Caller("id")) is None
