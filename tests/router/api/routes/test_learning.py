"""`/admin/learning` and `--learn-heads`: whose outputs are learned from, and what an administrator sees."""

from pathlib import Path
from typing import Any

import pytest
import structlog

from lorikeet.adapters.keys import sha256
from lorikeet.proto import shard_pb2 as pb
from tests.router.api.routes.test_catalogue import bearer, made, open_keys, write
from tests.router.api.routes.test_history import KEYS
from tests.router.api.routes.test_openai import BOTH
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer admin"}
LEARNING: dict[str, Any] = {"learn_heads": True}


async def learners(server: Serving, headers: dict[str, str] | None = None, **fields: Any) -> list[str]:
    """What the shard receives from LoRAX's route and OpenAI's two."""
    server.shard.submits.clear()
    server.says(" there")
    bodies: list[tuple[str, dict[str, Any]]] = [("/generate", {"inputs": "Hi", "parameters": fields})]
    for path, body in [*bodies, *((path, {**body, **fields}) for path, body in BOTH)]:
        response = await server.client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
    return [submit.learning_tenant for submit in server.shard.submits]


async def test_it_is_off_by_default_and_where_the_shard_cannot_learn(server: Serving, tmp_path: Path) -> None:
    assert await learners(server) == [""] * 3
    (tmp_path / "on").mkdir()
    async with serving(tmp_path / "on", **LEARNING) as on:
        (link,) = on.dispatcher.links
        assert link.info is not None
        link.info.learning = False
        assert await learners(on) == [""] * 3


async def test_the_tenant_of_a_request_learns(tmp_path: Path) -> None:
    async with serving(tmp_path, **LEARNING) as server:
        asked = await learners(server)
        assert len(set(asked)) == 1 and len(asked[0]) == 32
        assert all(submit.speculation.num_heads == 255 for submit in server.shard.submits)
        assert asked[0] not in await learners(server, cache_salt="other")
        body = {"inputs": "Hi", "parameters": {"details": True}}
        details = (await server.client.post("/generate", json=body)).json()["details"]
        assert details["speculation"]["sources"]  # learned heads may draft
        for excluding in ({"speculative_tokens": 0}, {"speculative_method": "lookup", "speculative_tokens": 2}):
            assert await learners(server, **excluding) == [""] * 3


async def test_keys_that_are_marked_isolate_take_no_part(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    async with serving(tmp_path, **open_keys(tmp_path), **LEARNING) as server:
        assert await learners(server, bearer("secret team")) == [""] * 3
        assert "" not in await learners(server, bearer("secret other"))


@pytest.mark.parametrize("is_on", [True, False])
async def test_an_alias_decides_for_itself(tmp_path: Path, is_on: bool) -> None:
    made(tmp_path, "v1")
    path = write(tmp_path, f"answers: {{id: v1, learn_heads: {str(is_on).lower()}}}")
    async with serving(tmp_path, adapters=True, catalogue_path=path, learn_heads=not is_on) as server:
        named = await learners(server, model="answers", adapter_id="answers")
        assert [bool(learner) for learner in named] == [is_on] * 3
        assert [bool(learner) for learner in await learners(server)] == [not is_on] * 3


async def test_the_log_names_each_alias_once_that_asks_for_heads_where_shards_cannot_learn(tmp_path: Path) -> None:
    made(tmp_path, "v1")
    path = write(tmp_path, "asks: {id: v1, learn_heads: true}\nalso: {id: v1, learn_heads: true}\nnot: {id: v1}")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:
        (link,) = server.dispatcher.links
        assert link.info is not None
        link.info.learning = False
        with structlog.testing.capture_logs() as lines:
            for alias in ("asks", "also", "not"):
                assert await learners(server, model=alias, adapter_id=alias) == [""] * 3
        aliases = [line["alias"] for line in lines if line["event"] == "learn_heads_unavailable"]
        assert aliases == ["asks", "also"]


async def test_an_administrator_sees_and_deletes_what_was_learned(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    keys = {**open_keys(tmp_path), "admin_key_sha256": sha256("admin")}
    async with serving(tmp_path, adapters=True, **keys, **LEARNING) as server:
        (tenant, *_) = await learners(server, bearer("secret other"))
        decision = pb.LearningDecision(decision="adopted", reason="better", tokens_per_step=2.5)
        pair = pb.LearnedPair(tenant=tenant, num_rows=7, heads_digest="d" * 64, decisions=[decision])
        server.shard.learning = pb.LearningReply(max_bytes=100, trainer="idle", pairs=[pair])
        for headers, status in (({}, 403), (bearer("secret other"), 403), (ADMIN, 200)):
            for method in ("GET", "DELETE"):
                response = await server.client.request(method, "/admin/learning", headers=headers)
                assert response.status_code == status, response.text
        assert server.shard.purges == [False, True]
        (shown,) = (await server.client.get("/admin/learning", headers=ADMIN)).json()["shards"]
        assert (shown["enabled"], shown["trainer"], shown["pairs"][0]["key"]) == (True, "idle", "other")
        assert shown["pairs"][0]["decisions"][0]["tokens_per_step"] == 2.5
        (link,) = server.dispatcher.links
        assert link.info is not None
        link.info.learning = False
        (shown,) = (await server.client.get("/admin/learning", headers=ADMIN)).json()["shards"]
        assert shown == {"shard": link.address, "enabled": False}
