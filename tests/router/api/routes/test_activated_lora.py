"""Activated LoRA on the routes: where it begins in the prompt, and what is reported where it is not activated."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.router.api.routes.test_adapters import body
from tests.router.scripted_loader import digest_of, finds_all
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

METRIC = "lorikeet_adapter_not_activated_total"


async def finds_activated(ids: list[int], call: dict[str, Any]) -> dict[str, Any]:
    return {**await finds_all(call), "invocation_ids": ids}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, adapters=True) as started:
        started.adapter("one")
        yield started


async def invocation_of(server: Serving, text: str) -> list[int]:
    return await server.service.tokenizer.encode(text, False, caller="")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_it_begins_at_the_last_occurrence_of_its_tokens(server: Serving, path: str) -> None:
    ids = await invocation_of(server, " there")
    server.loader.answer = partial(finds_activated, ids)
    name = "inputs" if path == "/generate" else "prompt"
    response = await server.client.post(path, json={**body(path, "one"), name: "Hi there you there Hi"})
    assert response.status_code == 200 and response.headers["x-lorikeet-adapter-activated"] == "true"
    (submit,) = server.shard.submits
    prompt = list(submit.prompt_ids)
    assert submit.adapter.digest == digest_of(server.loader.asked[0])
    assert prompt[submit.adapter_start : submit.adapter_start + len(ids)] == ids
    assert submit.adapter_start > prompt.index(ids[0])


async def test_without_its_tokens_the_base_model_answers_and_that_is_reported(server: Serving) -> None:
    server.loader.answer = partial(finds_activated, await invocation_of(server, " there"))
    for stream in (False, True):
        server.shard.submits.clear()
        response = await server.client.post(
            "/v1/completions", json={**body("/v1/completions", "one"), "stream": stream}
        )
        assert response.status_code == 200 and response.headers["x-lorikeet-adapter-activated"] == "false"
        assert response.headers["x-adapter-id"] == "one"
        (submit,) = server.shard.submits
        assert not submit.HasField("adapter") and submit.adapter_start == 0
    lines = (await server.client.get("/metrics")).text.splitlines()
    assert [line.rpartition(" ")[2] for line in lines if line.startswith(METRIC + "{")] == ["2.0"]


async def test_other_adapters_have_no_such_header(server: Serving) -> None:
    response = await server.client.post("/generate", json=body("/generate", "one"))
    assert response.status_code == 200 and "x-lorikeet-adapter-activated" not in response.headers
    assert server.shard.submits[0].HasField("adapter")
