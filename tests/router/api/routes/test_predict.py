"""`/predict` as clients of LLMSpeculativeSampling's server call it: from a prompt to a JSON string."""

from pathlib import Path
from typing import Any

import pytest

from tests.router.api.routes.test_catalogue import made, write
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio


async def predict(server: Serving, **body: Any) -> Any:
    response = await server.client.post("/predict", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


async def test_the_answer_is_a_text_with_its_prompt(server: Serving) -> None:
    server.says(" there!")
    assert await predict(server, prompt="Hi") == "Hi there!"


async def test_constants_of_that_server_are_defaults(server: Serving) -> None:
    server.says(" there!")
    await predict(server, prompt="Hi", top_p=None)
    [submit] = server.shard.submits
    assert submit.max_new_tokens == 40
    assert submit.sampling.do_sample and submit.sampling.temperature == 1.0
    assert (submit.sampling.top_k, round(submit.sampling.top_p, 3)) == (10, 0.9)
    assert (submit.speculation.method, submit.speculation.num_tokens) == ("auto", 4)


async def test_every_parameter_may_be_given(server: Serving) -> None:
    server.says(" there!")
    parameters = {"max_new_tokens": 1, "temperature": 0, "speculative_tokens": 2, "speculative_method": "lookup"}
    assert await predict(server, prompt="Hi", return_full_text=False, **parameters) == " there"
    [submit] = server.shard.submits
    assert not submit.sampling.do_sample
    assert (submit.speculation.method, submit.speculation.num_tokens) == ("lookup", 2)


async def test_an_alias_overrides_defaults_and_a_request_both(tmp_path: Path) -> None:
    made(tmp_path, "v1")
    path = write(tmp_path, "short: {id: v1, parameters: {max_new_tokens: 3, top_k: 7}}")
    async with serving(tmp_path, adapters=True, catalogue_path=path, speculative_tokens_max=3) as server:
        await predict(server, prompt="Hi", adapter_id="short", top_k=5)
        [submit] = server.shard.submits
        assert (submit.adapter.id, submit.max_new_tokens, submit.sampling.top_k) == ("v1", 3, 5)
        assert (round(submit.sampling.top_p, 3), submit.speculation.num_tokens) == (0.9, 3)


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        ({}, 422, "prompt: Field required"),
        ({"prompt": None}, 422, "prompt: Field required"),
        ({"prompt": ["Hi"]}, 422, "prompt: Input should be a valid string"),
        ({"prompt": ""}, 422, "`prompt` cannot be empty"),
        ({"prompt": "Hi", "top_k": 0}, 422, "`top_k` must be strictly positive"),
        ({"prompt": "Hi", "max_new_tokens": 5000}, 422, "must be <= 2048"),
        ({"prompt": "Hi", "details": True}, 422, "`details` is not supported by this route"),
        ({"prompt": "Hi", "stream": True}, 422, "`stream` is not supported by this route"),
        ({"prompt": "Hi", "speculative_method": "draft"}, 422, "requires --draft-model-id"),
        ([], 422, "expected a JSON object"),
    ],
)
async def test_invalid_bodies(server: Serving, body: Any, status: int, part: str) -> None:
    response = await server.client.post("/predict", json=body)
    assert response.status_code == status
    assert part in response.text


async def test_other_bodies_and_methods(server: Serving) -> None:
    plain = await server.client.post("/predict", content=b'{"prompt": "Hi"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    broken = await server.client.post("/predict", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400
    assert (await server.client.get("/predict")).status_code == 405


async def test_a_failing_shard_is_an_error_with_a_message(server: Serving) -> None:
    server.says("ab", error="broken")
    response = await server.client.post("/predict", json={"prompt": "Hi"})
    assert (response.status_code, response.json()["error_type"]) == (424, "generation")


async def test_ignored_fields_are_named(server: Serving) -> None:
    server.says(" there")
    response = await server.client.post("/predict", json={"prompt": "Hi", "gamma": 4, "max_new_tokens": 1})
    assert response.headers["x-ignored-fields"] == "gamma"
