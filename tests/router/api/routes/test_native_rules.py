"""Every rule on LoRAX's fields: its exact text, status and order, also as an event of a stream."""

import itertools
from typing import Any

import pytest

from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

MERGED = {"ids": ["a", "b"], "weights": [0.5, 0.5]}

RULES: list[tuple[dict[str, Any], str]] = [
    ({"adapter_id": "a", "merged_adapters": MERGED}, "at most one of `adapter_id` or `adapters` may be provided"),
    (
        {"merged_adapters": {"ids": [], "weights": []}},
        "at least one adapter ID must be provided when setting `adapters`",
    ),
    (
        {"merged_adapters": {"ids": ["a", "b"], "weights": [0.5]}},
        "number of adapter IDs must match number of adapter weights",
    ),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 0}, "`best_of` must be > 0 and <= 2. Given: 0"),
    ({"temperature": -0.1}, "`temperature` must be non-negative"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"repetition_penalty": -1.0}, "`repetition_penalty` must be strictly positive"),
    ({"repetition_penalty": 1e-30}, "`repetition_penalty` must be >= 1e-10 and <= 1e+10"),
    ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"frequency_penalty": -2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"presence_penalty": 2.1}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 1.1}, "`top_p` must be > 0.0 and < 1.0"),
    ({"min_p": -0.1}, "`min_p` must be >= 0.0 and <= 1.0"),
    ({"typical_p": 0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"return_k_alternatives": 0}, "`return_k_alternatives` must be strictly positive"),
    ({"return_k_alternatives": 257}, "`return_k_alternatives` must be <= 256"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": ["x" * 1025]}, "a stop sequence of `stop` may have 1024 bytes"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 2047. Given: 0"),
    ({"truncate": 2048}, "`truncate` must be strictly positive and less than 2047. Given: 2048"),
    (
        {"max_new_tokens": 10000},
        "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 2 `inputs` tokens and 10000 `max_new_tokens`",
    ),
    ({"adapter_id": "org/a"}, "`adapter_id` is not supported by this server, which serves its base model alone"),
    ({"merged_adapters": MERGED}, "`merged_adapters` is not supported by this server"),
    ({"response_format": {"type": "xml"}}, "`response_format.type` must be text, json_object or json_schema"),
    ({"speculation": "off"}, "`speculation` is not supported by this server: use `speculative_tokens`"),
    ({"tools": [{}]}, "`tools` is applied by /v1/chat/completions"),
]
"""In the order of the rules; unsupported fields are checked after all of LoRAX's rules."""


def failure(text: str) -> dict[str, str]:
    return {"error": f"Input validation error: {text}", "error_type": "validation"}


@pytest.mark.parametrize(("parameters", "text"), RULES)
@pytest.mark.parametrize("path", ["/", "/invocations", "/generate"])
async def test_broken_rule(server: Serving, path: str, parameters: dict[str, Any], text: str) -> None:
    response = await server.client.post(path, json={"inputs": "Hi", "parameters": parameters})
    assert (response.status_code, response.json()) == (422, failure(text))
    assert not server.shard.submits


@pytest.mark.parametrize(("parameters", "text"), RULES)
async def test_broken_rule_in_a_stream_is_an_event(server: Serving, parameters: dict[str, Any], text: str) -> None:
    events = await server.events("/generate_stream", {"inputs": "Hi", "parameters": parameters})
    if "best_of" in parameters:
        text = "`best_of` != 1 is not supported when streaming tokens"
    assert events == [failure(text)]


async def test_prompt_details_are_not_streamed(server: Serving) -> None:
    events = await server.events("/generate_stream", {"inputs": "Hi", "parameters": {"decoder_input_details": True}})
    assert events == [failure("`decoder_input_details` == true is not supported when streaming tokens")]


async def test_the_first_broken_rule_is_reported(server: Serving) -> None:
    """If two rules with different fields are broken, the earlier rule is reported."""
    ordered = [(fields, text) for fields, text in RULES[:29] if "merged_adapters" not in fields]
    for (first, text), (second, _) in itertools.pairwise(ordered):
        if not first.keys() & second.keys() and "seed" not in second:
            body = {"inputs": "Hi", "parameters": {**second, **first}}
            response = await server.client.post("/generate", json=body)
            assert response.json() == failure(text), body


async def test_empty_inputs(server: Serving) -> None:
    for path in ("/", "/generate"):
        response = await server.client.post(path, json={"inputs": ""})
        assert (response.status_code, response.json()) == (422, failure("`inputs` cannot be empty"))


async def test_inputs_of_the_maximum_length_and_one_more(server: Serving) -> None:
    server.says("x")
    body = {"inputs": "a" * 2047}
    assert (await server.client.post("/generate", json=body)).status_code == 200
    body = {"inputs": "a" * 2048}
    response = await server.client.post("/generate", json=body)
    assert response.json() == failure("`inputs` must have less than 2047 tokens. Given: 2048")
    body = {"inputs": "a" * 2049}
    response = await server.client.post("/generate", json=body)
    text = "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 2049 `inputs` tokens and 0 `max_new_tokens`"
    assert response.json() == failure(text)


async def test_best_of_disabled_by_the_operator(tmp_path: Any, anyio_backend: str) -> None:
    async with serving(tmp_path, max_best_of=1) as server:
        body = {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}}
        response = await server.client.post("/generate", json=body)
        assert response.json() == failure("`best_of` != 1 is not allowed for this endpoint")


async def test_a_tool_choice_of_none_and_a_text_format_are_accepted(server: Serving) -> None:
    server.says("x")
    parameters = {"tool_choice": "none", "response_format": {"type": "text"}}
    assert (await server.client.post("/generate", json={"inputs": "Hi", "parameters": parameters})).status_code == 200


async def test_a_request_without_a_limit_ends_at_loraxs_default_length(tmp_path: Any, anyio_backend: str) -> None:
    async with serving(tmp_path, default_total_tokens=64) as server:
        answer = await server.client.post("/generate", json={"inputs": "a " * 10, "parameters": {"details": True}})
        details = answer.json()["details"]
        assert details["generated_tokens"] + details["prompt_tokens"] == 64
        body = {"inputs": "a " * 100, "parameters": {"max_new_tokens": 100}}
        assert (await server.client.post("/generate", json=body)).status_code == 200
        answer = await server.client.post("/generate", json={"inputs": "a " * 100})
        assert answer.status_code == 422
        assert "give `max_new_tokens`. Without it, `inputs` and output have at most 64 tokens" in answer.json()["error"]
        chat = {"model": "", "messages": [{"role": "user", "content": "a " * 100}]}
        answer = await server.client.post("/v1/chat/completions", json=chat)
        assert answer.json()["usage"]["total_tokens"] == 2048
