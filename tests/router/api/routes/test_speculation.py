"""Guessing ahead as requests ask for it and answers tell of it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.api.routes.test_catalogue import made, write
from tests.router.api.routes.test_native import generate
from tests.router.api.routes.test_openai import BOTH
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio


WORDS = ("method", "num_tokens", "num_heads", "schedule", "verify")


@pytest.fixture(scope="module")
async def shared_drafting(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("drafting"), draft_model_id="test/draft") as started:
        yield started


@pytest.fixture
async def drafting(shared_drafting: Serving) -> AsyncIterator[Serving]:
    """A server with a draft model."""
    shared_drafting.shard.submits.clear()
    yield shared_drafting
    await shared_drafting.idle()


def sent_of(server: Serving) -> list[tuple[Any, ...]]:
    """What the shard was told of guessing, by request; empty where it was told nothing."""
    return [
        tuple(getattr(submit.speculation, word) for word in WORDS) if submit.HasField("speculation") else ()
        for submit in server.shard.submits
    ]


async def ask_all(server: Serving, **parameters: Any) -> list[tuple[Any, ...]]:
    """What the shard was told by each of the routes."""
    server.says(" there")
    await generate(server, max_new_tokens=1, **parameters)
    await server.events("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 1, **parameters}})
    response = await server.client.post("/", json={"inputs": "Hi", "parameters": {"max_new_tokens": 1, **parameters}})
    assert response.status_code == 200, response.text
    for path, body in BOTH:
        response = await server.client.post(path, json={**body, **parameters})
        assert response.status_code == 200, response.text
    return sent_of(server)


@pytest.mark.parametrize(
    ("parameters", "sent"),
    [
        ({}, ()),
        ({"speculative_tokens": 4}, ("auto", 4, 4, "auto", "coupled")),
        ({"speculative_tokens": 16, "speculative_method": "lookup"}, ("lookup", 16, 0, "auto", "coupled")),
        ({"speculative_tokens": 2, "speculative_method": "ngram"}, ("lookup", 2, 0, "auto", "coupled")),
        ({"speculative_method": "ngram"}, ("lookup", 3, 0, "auto", "coupled")),
        ({"speculative_method": "auto"}, ("auto", 3, 255, "auto", "coupled")),
        ({"speculative_tokens": 0, "speculative_method": "lookup"}, ()),
        ({"speculative_tokens": 4, "speculative_method": "off"}, ()),
        ({"speculative_tokens": None, "speculative_method": None, "speculative_schedule": None}, ()),
        ({"speculative_tokens": 1, "speculative_schedule": "heuristic"}, ("auto", 1, 1, "heuristic", "coupled")),
        ({"speculative_tokens": 1, "speculative_verify": "coupled"}, ("auto", 1, 1, "auto", "coupled")),
    ],
)
async def test_what_is_asked_reaches_the_shard(server: Serving, parameters: dict[str, Any], sent: Any) -> None:
    assert await ask_all(server, **parameters) == [sent] * 5


@pytest.mark.parametrize(
    ("parameters", "sent"),
    [
        ({}, ("auto", 4, 255, "auto", "coupled")),
        ({"speculative_method": "draft"}, ("draft", 4, 0, "auto", "coupled")),
        ({"speculative_tokens": 2, "speculative_verify": "rejection"}, ("auto", 2, 2, "auto", "rejection")),
        ({"speculative_method": "draft", "speculative_verify": "google"}, ("draft", 4, 0, "auto", "rejection")),
        ({"speculative_method": "draft", "speculative_verify": "deepmind"}, ("draft", 4, 0, "auto", "rejection")),
        ({"speculative_method": "lookup", "speculative_verify": "rejection"}, ("lookup", 4, 0, "auto", "coupled")),
        ({"speculative_verify": "rejection", "seed": 5}, ("auto", 4, 255, "auto", "coupled")),
        ({"speculative_verify": "rejection", "seed": None}, ("auto", 4, 255, "auto", "rejection")),
    ],
)
async def test_with_a_draft_model(drafting: Serving, parameters: dict[str, Any], sent: Any) -> None:
    assert await ask_all(drafting, **parameters) == [sent] * 5


OPERATORS = {
    "speculative_tokens": 5,
    "speculative_tokens_max": 6,
    "speculative_method": "draft",
    "speculative_schedule": "heuristic",
    "speculative_verification": "rejection",
    "draft_model_id": "test/draft",
}


async def test_the_operators_words_hold_where_a_request_has_none(tmp_path: Path) -> None:
    async with serving(tmp_path, **OPERATORS) as server:
        assert set(await ask_all(server)) == {("draft", 5, 0, "heuristic", "rejection")}
        server.shard.submits.clear()
        own = {"speculative_method": "auto", "speculative_schedule": "auto", "speculative_verify": "coupled"}
        assert set(await ask_all(server, **own)) == {("auto", 5, 255, "auto", "coupled")}
        server.shard.submits.clear()
        assert set(await ask_all(server, speculative_tokens=0)) == {()}
        body = {"inputs": "Hi", "parameters": {"speculative_tokens": 7}}
        assert (await server.client.post("/generate", json=body)).status_code == 422


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({"speculative_tokens": 17}, "`speculative_tokens` must be <= 16. Given: 17"),
        (
            {"speculative_method": "guess"},
            "`speculative_method` must be one of auto, lookup, ngram, medusa, draft, off",
        ),
        ({"speculative_schedule": "slow"}, "`speculative_schedule` must be one of constant, heuristic, auto"),
        ({"speculative_verify": "typical"}, "must be one of coupled, rejection, google, deepmind. Given: typical"),
        ({"speculative_method": "draft"}, "`speculative_method` draft needs a draft model"),
        ({"speculative_verify": "google"}, "`speculative_verify` google needs a draft model"),
        ({"speculative_method": "medusa"}, "`speculative_method` medusa needs heads"),
    ],
)
async def test_refusals(server: Serving, parameters: dict[str, Any], part: str) -> None:
    for path in ("/generate", "/"):
        response = await server.client.post(path, json={"inputs": "Hi", "parameters": parameters})
        assert response.status_code == 422
        assert part in response.json()["error"]
    [event] = await server.events("/generate_stream", {"inputs": "Hi", "parameters": parameters})
    assert part in event["error"]
    for path, body in BOTH:
        response = await server.client.post(path, json={**body, **parameters})
        assert response.status_code in (400, 422)
        assert part in response.json()["error"]["message"]
    assert server.shard.submits == []


PREDICTIONS = (
    {"type": "content", "content": "Hi there"},
    {"type": "content", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]},
)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prediction_is_guessed_from_and_told(server: Serving, prediction: Any, stream: bool) -> None:
    for path, body in BOTH:
        server.says(" there!", per_step=2, num_rejected=2)
        asked = {**body, "prediction": prediction, "max_tokens": 2, "stream": stream}
        if stream:
            asked["stream_options"] = {"include_usage": True}
            usage = (await server.events(path, asked))[-2]["usage"]
        else:
            usage = (await server.client.post(path, json=asked)).json()["usage"]
        submit = server.shard.submits[-1]
        assert list(submit.prediction_ids) == server.ids("Hi there")
        assert (submit.speculation.method, submit.speculation.num_tokens) == ("auto", 8)
        details = usage["completion_tokens_details"]
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (1, 2)


@pytest.mark.parametrize(
    "prediction",
    [
        {"type": "guess", "content": "x"},
        {"type": "content"},
        {"type": "content", "content": 5},
        {"type": "content", "content": [{"type": "image", "text": "x"}]},
    ],
)
async def test_what_is_no_prediction(server: Serving, prediction: Any) -> None:
    for path, body in BOTH:
        response = await server.client.post(path, json={**body, "prediction": prediction})
        assert response.status_code in (400, 422)
        assert response.json()["error"]["param"] == "prediction"


@pytest.mark.parametrize("method", ["medusa", "draft", "off"])
async def test_a_prediction_that_the_method_would_ignore_is_refused(server: Serving, method: str) -> None:
    wanted = {"prediction": PREDICTIONS[0], "speculative_method": method}
    for path, body in BOTH:
        response = await server.client.post(path, json={**body, **wanted})
        assert response.status_code == 400 and response.json()["error"]["param"] == "prediction"


async def test_an_alias_has_defaults_and_a_request_goes_before_them(tmp_path: Path) -> None:
    words = "speculative_tokens: 5, speculative_method: ngram, speculative_schedule: heuristic"
    made(tmp_path, "v1")
    path = write(tmp_path, f"copy: {{id: v1, parameters: {{{words}}}}}")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:
        server.says(" there")
        for own, sent in (
            ({}, ("lookup", 5, 0, "heuristic", "coupled")),
            ({"speculative_tokens": 2, "speculative_schedule": "constant"}, ("lookup", 2, 0, "constant", "coupled")),
            ({"speculative_tokens": 0}, ()),
        ):
            server.shard.submits.clear()
            await generate(server, max_new_tokens=1, adapter_id="copy", **own)
            for route, body in BOTH:
                response = await server.client.post(route, json={**body, "model": "copy", **own})
                assert response.status_code == 200, response.text
            assert sent_of(server) == [sent] * 3


async def test_a_draft_model_that_only_the_shard_tells_of(tmp_path: Path) -> None:
    async with serving(tmp_path, shards_draft_model="test/draft", speculative_tokens_max=3) as server:
        info = (await server.client.get("/info")).json()
        assert (info["speculate"], info["speculative_method"], info["draft_model_id"]) == (3, "auto", "test/draft")
        assert set(await ask_all(server, speculative_verify="google")) == {("auto", 3, 255, "auto", "rejection")}


async def test_what_a_server_says_of_itself(server: Serving, drafting: Serving) -> None:
    info = (await server.client.get("/info")).json()
    assert (info["speculate"], info["speculative_method"], info["draft_model_id"]) == (0, "auto", None)
    info = (await drafting.client.get("/info")).json()
    assert (info["speculate"], info["speculative_method"], info["draft_model_id"]) == (4, "auto", "test/draft")


async def test_an_answer_says_by_which_rule_it_was_verified(drafting: Serving) -> None:
    drafting.says(" there")
    for own, verify in (({}, "rejection"), ({"seed": 5}, "coupled"), ({"speculative_method": "lookup"}, "coupled")):
        asked = {"max_new_tokens": 1, "details": True, "speculative_verify": "google", **own}
        assert (await generate(drafting, **asked))["details"]["speculation"]["verify"] == verify
        for path, body in BOTH:
            request = {**body, "speculative_verify": "google", **own}
            usage = (await drafting.client.post(path, json=request)).json()["usage"]
            assert usage["completion_tokens_details"]["speculation"]["verify"] == verify


async def test_where_the_operator_wants_nothing_guessed_who_asks_gets_it(tmp_path: Path) -> None:
    async with serving(tmp_path, speculative_method="off", speculative_tokens=3) as server:
        for own, sent in (
            ({}, ()),
            ({"speculative_tokens": 2}, ("auto", 2, 2, "auto", "coupled")),
            ({"speculative_method": "lookup"}, ("lookup", 3, 0, "auto", "coupled")),
            ({"speculative_tokens": 0}, ()),
        ):
            server.shard.submits.clear()
            assert set(await ask_all(server, **own)) == {sent}
