"""`speculative_history`: which tenant reaches the shard, and what is rejected with an error."""

from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.router.requests.request import Caller
from tests.router.api.routes.test_catalogue import bearer, made, open_keys, write
from tests.router.api.routes.test_openai import BOTH
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

KEYS = (
    f"- {{name: team, sha256: {sha256('secret team')}, isolate: true}}\n"
    f"- {{name: other, sha256: {sha256('secret other')}}}\n"
)


async def tenants(server: Serving, headers: dict[str, str] | None = None, **fields: Any) -> list[str]:
    """What the shard receives from LoRAX's route and OpenAI's two."""
    server.shard.submits.clear()
    server.says(" there")
    bodies: list[tuple[str, dict[str, Any]]] = [("/generate", {"inputs": "Hi", "parameters": fields})]
    for path, body in [*bodies, *((path, {**body, **fields}) for path, body in BOTH)]:
        response = await server.client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
    return [submit.tenant for submit in server.shard.submits]


async def error(server: Serving, headers: dict[str, str] | None = None, **fields: Any) -> str:
    body = {"inputs": "Hi", "parameters": {"speculative_history": True, **fields}}
    response = await server.client.post("/generate", json=body, headers=headers)
    assert response.status_code == 422, response.text
    return str(response.json()["error"])


async def test_it_is_off_unless_the_request_asks(server: Serving) -> None:
    assert await tenants(server) == await tenants(server, speculative_tokens=3) == [""] * 3
    asked = await tenants(server, speculative_history=True)
    assert len(set(asked)) == 1 and len(asked[0]) == 32
    assert [submit.speculation.num_tokens for submit in server.shard.submits] == [3] * 3


async def test_without_keys_the_salt_is_the_tenant(server: Serving) -> None:
    first, again, other = [
        (await tenants(server, speculative_history=True, cache_salt=salt))[0] for salt in ("a", "a", "b")
    ]
    assert first == again != other != ""
    assert first not in (await tenants(server, speculative_history=True))


async def test_with_a_key_its_name_is_the_tenant_and_isolated_keys_have_none(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    server_wide = {"speculative_history": True, "speculative_tokens": 2}
    async with serving(tmp_path, **open_keys(tmp_path), **server_wide) as server:
        other, team = bearer("secret other"), bearer("secret team")
        salts = [await tenants(server, other, cache_salt=salt) for salt in ("a", "b")]
        assert salts[0] == salts[1] and salts[0][0]
        assert salts[0] != await tenants(server)
        assert await tenants(server, team) == [""] * 3
        assert "`speculative_history` is not available to an API key that is marked `isolate`" in await error(
            server, team
        )
        assert await tenants(server, other, speculative_history=False) == [""] * 3


def test_a_tenant_s_id_does_not_show_its_name() -> None:
    caller = Caller("id", address="192.0.2.1")
    assert "secret" not in caller.tenant("secret") and caller.tenant("x") == Caller("2").tenant("x")


async def test_an_alias_may_enable_it(tmp_path: Path) -> None:
    made(tmp_path, "v1")
    path = write(tmp_path, "answers: {id: v1, parameters: {speculative_history: true, speculative_tokens: 2}}")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:
        server.says(" there")
        for name in ("answers", ""):
            server.shard.submits.clear()
            body = {"model": name, "prompt": "Hi", "max_tokens": 1}
            assert (await server.client.post("/v1/completions", json=body)).status_code == 200
            assert bool(server.shard.submits[0].tenant) == (name == "answers")


async def test_an_alias_does_not_enable_it_for_isolated_keys(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    made(tmp_path, "v1")
    path = write(tmp_path, "answers: {id: v1, parameters: {speculative_history: true, speculative_tokens: 2}}")
    async with serving(tmp_path, adapters=True, catalogue_path=path, **open_keys(tmp_path)) as server:
        for key in ("secret team", "secret other"):
            assert [bool(t) for t in await tenants(server, bearer(key), model="answers", adapter_id="answers")] == [
                key == "secret other"
            ] * 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"speculative_method": "medusa"}, "`speculative_history` needs `speculative_method` lookup or auto"),
        (
            {"speculative_tokens": 0},
            "`speculative_history` needs `speculative_method` lookup or auto, and draft tokens",
        ),
        ({"speculative_method": "off"}, "`speculative_history` needs"),
    ],
)
async def test_what_would_be_without_effect_is_rejected(server: Serving, fields: dict[str, Any], words: str) -> None:
    assert words in await error(server, **fields)


async def test_a_shard_without_an_index_rejects_it(server: Serving) -> None:
    info = server.service.dispatcher.info
    assert info is not None
    info.history = False
    try:
        assert "needs a shard with --history-memory" in await error(server)
    finally:
        info.history = True
