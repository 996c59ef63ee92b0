"""Guessing ahead as requests ask for it and answers tell of it."""

from typing import Any

import pytest

from tests.router.routes.test_native import generate
from tests.router.routes.test_openai import BOTH
from tests.router.serving import Serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("parameters", "sent"),
    [
        ({}, ("", 0)),
        ({"speculative_tokens": 4}, ("auto", 4)),
        ({"speculative_tokens": 16, "speculative_method": "lookup"}, ("lookup", 16)),
        ({"speculative_tokens": 2, "speculative_method": "ngram"}, ("lookup", 2)),
        ({"speculative_method": "ngram"}, ("lookup", 3)),
        ({"speculative_tokens": 0, "speculative_method": "lookup"}, ("", 0)),
        ({"speculative_tokens": 4, "speculative_method": "off"}, ("", 0)),
        ({"speculative_tokens": None, "speculative_method": None}, ("", 0)),
    ],
)
async def test_what_is_asked_reaches_the_shard(server: Serving, parameters: dict[str, Any], sent: Any) -> None:
    server.says(" there")
    await generate(server, max_new_tokens=1, **parameters)
    for path, body in BOTH:
        server.says(" there")
        response = await server.client.post(path, json={**body, **parameters})
        assert response.status_code == 200, response.text
    submits = server.shard.submits
    assert [(each.speculation.method, each.speculation.num_tokens) for each in submits] == [sent] * 3


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({"speculative_tokens": 17}, "`speculative_tokens` must be <= 16. Given: 17"),
        ({"speculative_tokens": 1, "speculative_method": "guess"}, "must be one of auto, lookup, ngram, off"),
        ({"speculative_method": "medusa"}, "`speculative_method` medusa"),
        ({"speculative_schedule": "auto"}, "`speculative_schedule`"),
    ],
)
async def test_refusals(server: Serving, parameters: dict[str, Any], part: str) -> None:
    response = await server.client.post("/generate", json={"inputs": "Hi", "parameters": parameters})
    assert response.status_code == 422
    assert part in response.json()["error"]
    for path, body in BOTH:
        response = await server.client.post(path, json={**body, **parameters})
        assert response.status_code in (400, 422)
        assert part in response.json()["error"]["message"]


async def test_an_answer_tells_what_guessing_gave(server: Serving) -> None:
    server.says(" there!", per_step=2)
    answer = await generate(server, max_new_tokens=2, details=True, speculative_tokens=3)
    report = answer["details"]["speculation"]
    assert (report["method"], report["steps"]) == ("auto", 1)
    assert sum(report["sources"].values()) == answer["details"]["generated_tokens"] == 2
    server.says(" there!")
    assert "speculation" not in (await generate(server, max_new_tokens=2, details=True))["details"]


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
        assert usage["completion_tokens_details"] == {
            "accepted_prediction_tokens": 1,
            "rejected_prediction_tokens": 2,
        }


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
