"""Fields of speculative decoding: what reaches the shard, and what answers report."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.api.routes.test_catalogue import made, write
from tests.router.api.routes.test_native import generate
from tests.router.api.routes.test_openai import BOTH
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio


FIELDS = ("method", "num_tokens", "num_heads", "schedule", "verify")
DEFAULTS = {"num_tokens": 0, "num_heads": 0, "verify": "shared-noise"}
"""What an empty field stands for on the wire."""


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
    """The speculation settings that the shard received, by request; empty where there were none."""
    return [
        tuple(getattr(submit.speculation, name) or DEFAULTS.get(name, "") for name in FIELDS)
        if submit.HasField("speculation")
        else ()
        for submit in server.shard.submits
    ]


async def ask_all(server: Serving, **parameters: Any) -> list[tuple[Any, ...]]:
    """The settings that the shard received from each of the routes."""
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
        ({"speculative_tokens": 4}, ("auto", 4, 4, "auto", "shared-noise")),
        ({"speculative_tokens": 16, "speculative_method": "lookup"}, ("lookup", 16, 0, "auto", "shared-noise")),
        ({"speculative_tokens": 2, "speculative_method": "ngram"}, ("lookup", 2, 0, "auto", "shared-noise")),
        ({"speculative_method": "ngram"}, ("lookup", 3, 0, "auto", "shared-noise")),
        ({"speculative_method": "auto"}, ("auto", 3, 255, "auto", "shared-noise")),
        ({"speculative_tokens": 0, "speculative_method": "lookup"}, ()),
        ({"speculative_tokens": 4, "speculative_method": "off"}, ()),
        ({"speculative_tokens": None, "speculative_method": None, "speculative_schedule": None}, ()),
        ({"speculative_tokens": 1, "speculative_schedule": "heuristic"}, ("auto", 1, 1, "heuristic", "shared-noise")),
        (
            {"speculative_tokens": 1, "speculative_verification": "shared-noise"},
            ("auto", 1, 1, "auto", "shared-noise"),
        ),
        ({"speculative_tokens": 1, "speculative_verify": "coupled"}, ("auto", 1, 1, "auto", "shared-noise")),
    ],
)
async def test_speculative_fields_reach_the_shard(server: Serving, parameters: dict[str, Any], sent: Any) -> None:
    assert await ask_all(server, **parameters) == [sent] * 5


@pytest.mark.parametrize(
    ("parameters", "sent"),
    [
        ({}, ("auto", 4, 255, "auto", "shared-noise")),
        ({"speculative_method": "draft"}, ("draft", 4, 0, "auto", "shared-noise")),
        ({"speculative_tokens": 2, "speculative_verification": "rejection"}, ("auto", 2, 2, "auto", "rejection")),
        ({"speculative_method": "draft", "speculative_verification": "google"}, ("draft", 4, 0, "auto", "rejection")),
        ({"speculative_method": "draft", "speculative_verify": "deepmind"}, ("draft", 4, 0, "auto", "rejection")),
        (
            {"speculative_method": "lookup", "speculative_verification": "rejection"},
            ("lookup", 4, 0, "auto", "shared-noise"),
        ),
        ({"speculative_verification": "rejection", "seed": 5}, ("auto", 4, 255, "auto", "shared-noise")),
        ({"speculative_verification": "rejection", "seed": None}, ("auto", 4, 255, "auto", "rejection")),
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


async def test_the_operators_defaults_apply_where_a_request_sets_none(tmp_path: Path) -> None:
    async with serving(tmp_path, **OPERATORS) as server:
        assert set(await ask_all(server)) == {("draft", 5, 0, "heuristic", "rejection")}
        server.shard.submits.clear()
        own = {"speculative_method": "auto", "speculative_schedule": "auto", "speculative_verification": "shared-noise"}
        assert set(await ask_all(server, **own)) == {("auto", 5, 255, "auto", "shared-noise")}
        server.shard.submits.clear()
        assert set(await ask_all(server, speculative_tokens=0)) == {()}
        body = {"inputs": "Hi", "parameters": {"speculative_tokens": 7}}
        assert (await server.client.post("/generate", json=body)).status_code == 422


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({"speculative_tokens": 17}, "`speculative_tokens` must be <= 16. Given: 17"),
        (
            {"speculative_method": "oracle"},
            "`speculative_method` must be one of auto, lookup, ngram, medusa, draft, off",
        ),
        ({"speculative_schedule": "slow"}, "`speculative_schedule` must be one of constant, heuristic, auto"),
        (
            {"speculative_verification": "typical"},
            "must be one of shared-noise, rejection, google, deepmind. Given: typical",
        ),
        ({"speculative_method": "draft"}, "`speculative_method` draft requires --draft-model-id"),
        ({"speculative_verification": "google"}, "`speculative_verification` google requires --draft-model-id"),
        ({"speculative_method": "medusa"}, "`speculative_method` medusa needs heads"),
    ],
)
async def test_rejected_fields(server: Serving, parameters: dict[str, Any], part: str) -> None:
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


async def test_a_field_and_its_deprecated_name_are_duplicates(server: Serving) -> None:
    fields = {"speculative_verify": "coupled", "speculative_verification": "shared-noise"}
    response = await server.client.post("/generate", json={"inputs": "Hi", "parameters": fields})
    assert response.status_code == 422 and "duplicate field `speculative_verification`" in response.text


PREDICTIONS = (
    {"type": "content", "content": "Hi there"},
    {"type": "content", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]},
)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prediction_is_looked_up_and_reported(server: Serving, prediction: Any, stream: bool) -> None:
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
        {"type": "image", "content": "x"},
        {"type": "content"},
        {"type": "content", "content": 5},
        {"type": "content", "content": [{"type": "image", "text": "x"}]},
    ],
)
async def test_invalid_predictions(server: Serving, prediction: Any) -> None:
    for path, body in BOTH:
        response = await server.client.post(path, json={**body, "prediction": prediction})
        assert response.status_code in (400, 422)
        assert response.json()["error"]["param"] == "prediction"


@pytest.mark.parametrize("method", ["medusa", "draft", "off"])
async def test_a_prediction_that_the_method_would_ignore_is_rejected(server: Serving, method: str) -> None:
    fields = {"prediction": PREDICTIONS[0], "speculative_method": method}
    for path, body in BOTH:
        response = await server.client.post(path, json={**body, **fields})
        assert response.status_code == 400 and response.json()["error"]["param"] == "prediction"


async def test_a_request_overrides_the_defaults_of_an_alias(tmp_path: Path) -> None:
    words = "speculative_tokens: 5, speculative_method: ngram, speculative_schedule: heuristic"
    made(tmp_path, "v1")
    path = write(tmp_path, f"copy: {{id: v1, parameters: {{{words}}}}}")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:
        server.says(" there")
        for own, sent in (
            ({}, ("lookup", 5, 0, "heuristic", "shared-noise")),
            (
                {"speculative_tokens": 2, "speculative_schedule": "constant"},
                ("lookup", 2, 0, "constant", "shared-noise"),
            ),
            ({"speculative_tokens": 0}, ()),
        ):
            server.shard.submits.clear()
            await generate(server, max_new_tokens=1, adapter_id="copy", **own)
            for route, body in BOTH:
                response = await server.client.post(route, json={**body, "model": "copy", **own})
                assert response.status_code == 200, response.text
            assert sent_of(server) == [sent] * 3


async def test_a_draft_model_that_only_the_shard_reports(tmp_path: Path) -> None:
    async with serving(tmp_path, shards_draft_model="test/draft", speculative_tokens_max=3) as server:
        info = (await server.client.get("/info")).json()
        assert (info["speculate"], info["speculative_method"], info["draft_model_id"]) == (3, "auto", "test/draft")
        assert set(await ask_all(server, speculative_verification="google")) == {("auto", 3, 255, "auto", "rejection")}


async def test_info_shows_the_defaults_of_speculation(server: Serving, drafting: Serving) -> None:
    info = (await server.client.get("/info")).json()
    assert (info["speculate"], info["speculative_method"], info["draft_model_id"]) == (0, "auto", None)
    info = (await drafting.client.get("/info")).json()
    assert (info["speculate"], info["speculative_method"], info["draft_model_id"]) == (4, "auto", "test/draft")


async def test_an_answer_names_its_verification(drafting: Serving) -> None:
    drafting.says(" there")
    for own, verification in (
        ({}, "rejection"),
        ({"seed": 5}, "shared-noise"),
        ({"speculative_method": "lookup"}, "shared-noise"),
    ):
        asked = {"max_new_tokens": 1, "details": True, "speculative_verification": "google", **own}
        assert (await generate(drafting, **asked))["details"]["speculation"]["verification"] == verification
        for path, body in BOTH:
            request = {**body, "speculative_verification": "google", **own}
            usage = (await drafting.client.post(path, json=request)).json()["usage"]
            assert usage["completion_tokens_details"]["speculation"]["verification"] == verification


async def test_a_request_overrides_speculation_disabled_by_the_operator(tmp_path: Path) -> None:
    async with serving(tmp_path, speculative_method="off", speculative_tokens=3) as server:
        for own, sent in (
            ({}, ()),
            ({"speculative_tokens": 2}, ("auto", 2, 2, "auto", "shared-noise")),
            ({"speculative_method": "lookup"}, ("lookup", 3, 0, "auto", "shared-noise")),
            ({"speculative_tokens": 0}, ()),
        ):
            server.shard.submits.clear()
            assert set(await ask_all(server, **own)) == {sent}
