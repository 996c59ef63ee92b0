"""A router that replaces one begins in recovery: requests wait for shards, and probes keep it alive."""

import asyncio
import inspect
from pathlib import Path

import pytest

from lorikeet.adapters import errors as adapter_errors
from lorikeet.router import errors
from lorikeet.router.error_answers import ANSWERS, failure_headers
from tests.router.scripted_shard import Script, ScriptedShard
from tests.router.serving import serving

pytestmark = pytest.mark.anyio

BODY = {"inputs": "Hi", "parameters": {"max_new_tokens": 1, "speculative_method": "draft"}}


async def test_requests_wait_for_the_shards_of_the_router_before(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    (tmp_path / "later").mkdir()
    later = ScriptedShard(tmp_path / "later", lambda submit: Script([5]), draft_model_id="a/draft")
    async with serving(
        tmp_path, connected=False, ready_file=str(tmp_path / "ready"), shard_addresses=(later.address,)
    ) as server:
        await server.dispatcher.start()
        asked = asyncio.create_task(server.client.post("/generate", json=BODY))
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/ready")).status_code == 503
        await asyncio.sleep(0.1)
        assert not asked.done()
        async with later:
            answer = await asked
            assert answer.status_code == 200, "the shard was known when the request was read: it has a draft model"
            assert (await server.client.get("/ready")).status_code == 200
        await server.dispatcher.stop()


async def test_a_router_whose_shards_do_not_come_back_says_when_to_repeat(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()
    nowhere = f"unix:{tmp_path}/nowhere.sock"
    async with serving(
        tmp_path,
        connected=False,
        ready_file=str(tmp_path / "ready"),
        shard_addresses=(nowhere,),
        recovery_timeout_s=0.2,
    ) as server:
        await server.dispatcher.start()
        for path in ("/generate", "/health", "/ready", "/startup"):
            ask = server.client.post(path, json=BODY) if path == "/generate" else server.client.get(path)
            answer = await ask
            if path == "/generate":
                assert answer.status_code == 503
            assert answer.status_code != 503 or int(answer.headers["retry-after"]) >= 1, path
        assert (await server.client.get("/health")).status_code == 503
        await server.dispatcher.stop()


async def test_a_first_router_has_no_shards_to_wait_for(tmp_path: Path) -> None:
    nowhere = f"unix:{tmp_path}/nowhere.sock"
    async with serving(
        tmp_path, connected=False, ready_file=str(tmp_path / "ready"), shard_addresses=(nowhere,)
    ) as server:
        await server.dispatcher.start()
        answer = await server.client.post("/generate", json=BODY)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        await server.dispatcher.stop()


def made(kind: type[errors.RouterError]) -> errors.RouterError:
    """An error with any arguments."""
    parameters = list(inspect.signature(kind).parameters.values())
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return kind(
        *(1.0 if parameter.annotation is float else 1 if parameter.annotation is int else "x" for parameter in needed)
    )


def test_every_503_says_when_to_repeat() -> None:
    for kind, row in ANSWERS.items():
        if 503 in (row.status, row.openai_status):
            assert int(failure_headers(made(kind))["retry-after"]) >= 1, kind
    for kind in adapter_errors.KINDS.values():
        for status in (502, 503):
            problem = errors.adapter_problem(kind("x", status=status))
            assert int(failure_headers(problem)["retry-after"]) >= 1, kind
    for seconds in (float("inf"), 1e300, -5.0):
        assert 1 <= int(failure_headers(errors.KeyLimitReached("1 request", seconds))["retry-after"]) <= 3600
