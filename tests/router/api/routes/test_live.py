"""`/v1/live`: what it shows, to which callers, and that viewers share snapshots."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.proto import shard_pb2 as pb
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio


async def snapshots(client: httpx.AsyncClient, number: int, **options: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    text = ""
    async with client.stream("GET", "/v1/live", **options) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for part in response.aiter_text():
            text += part
            while "\n\n" in text and len(events) < number:
                event, _, text = text.partition("\n\n")
                if event.startswith("data: "):
                    events.append(json.loads(event.removeprefix("data: ")))
            if len(events) == number:
                break
    return events


async def test_requests_are_shown_by_adapter_without_their_text(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, adapters=True) as server:
        server.adapter("legal")
        server.says("secret output", hangs=True)
        parameters = [{}, {"adapter_id": "legal"}, {"adapter_id": "legal"}]
        asked = [
            asyncio.create_task(
                server.client.post("/generate", json={"inputs": "secret prompt", "parameters": parameter})
            )
            for parameter in parameters
        ]
        await server.shard.until(lambda: server.shard.num_running == 3)
        [shown] = await snapshots(server.client, 1)
        assert shown["requests"] == {"running": 3, "waiting": 0, "preempted": 0}
        assert (shown["shards"][0]["resident_adapters"], shown["shards"][0]["adapter_slots"]) == (0, 16)
        assert [(adapter["name"], adapter["running"]) for adapter in shown["adapters"]] == [("legal", 2), (None, 1)]
        assert "secret" not in json.dumps(shown)
        for task in asked:
            task.cancel()
        await server.idle()


async def test_the_step_and_preempted_requests_are_those_that_the_shard_describes(server: Serving) -> None:
    server.says("ab", hangs=True)
    asked = [asyncio.create_task(server.client.post("/generate", json={"inputs": "Hi"})) for _ in range(2)]
    await server.shard.until(lambda: server.shard.num_running == 2)
    [link] = server.dispatcher.links
    first, second = link.running
    detail = pb.StepDetail(ids=[first, 99], num_tokens=[7, 1], num_drafts=[3, 0], preempted_ids=[second])
    link.update(pb.StepOutput(step_detail=detail), 0.0)
    [shown] = await snapshots(server.client, 1)
    assert shown["requests"] == {"running": 1, "waiting": 0, "preempted": 1}
    number = link.running[first].routing.number
    step = {"request": number, "adapter": None, "tokens": 7, "drafts": 3, "prefill": True}
    if "step" in shown["shards"][0]:  # the scripted shard reports no load before its first heartbeat
        assert shown["shards"][0]["step"] == [step]
    await server.shard.until(lambda: any(command.watch_ms for command in server.shard.commands))
    for task in asked:
        task.cancel()
    await server.idle()


async def test_failures_are_counted_by_kind(server: Serving) -> None:
    await server.client.post("/generate", json={"inputs": ""})
    await server.client.post("/generate", json={"inputs": ""})
    [shown] = await snapshots(server.client, 1)
    assert shown["failures"][0].items() >= {"kind": "validation", "status": 422, "count": 2}.items()


async def test_ten_viewers_share_snapshots_and_none_cost_nothing(server: Serving) -> None:
    live = server.service.live
    made = live.num_made
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        seen = await asyncio.gather(*(snapshots(client, 3) for _ in range(10)))
    assert live.num_made - made <= 5
    assert all(len(sample) == 3 for sample in seen)
    await server.shard.until(lambda: live._task is None)
    made = live.num_made
    await asyncio.sleep(0.7)
    assert live.num_made == made


@pytest.mark.parametrize("has_admin", [True, False])
async def test_with_keys_it_is_for_administrators(tmp_path: Path, anyio_backend: str, has_admin: bool) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: one, sha256: {sha256('one')}}}\n")
    admin = {"admin_key_sha256": sha256("root")} if has_admin else {}
    async with serving(tmp_path, keys_path=str(keys), **admin) as server:
        for key in ("one", "root") if not has_admin else ("one",):
            answer = await server.client.get("/v1/live", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code in (401, 403)
        if has_admin:
            assert await snapshots(server.client, 1, headers={"authorization": "Bearer root"})
