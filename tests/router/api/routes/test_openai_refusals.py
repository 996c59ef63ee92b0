"""Rejected requests of OpenAI's routes: the field, OpenAI's status and shape, and that nothing reaches the shard."""

from typing import Any

import pytest

from tests.router.api.routes.test_openai import BOTH, CHAT, COMPLETION
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio


REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    ("temperature", {"temperature": 2.1}, None),
    ("temperature", {"temperature": "hot"}, None),
    ("top_p", {"top_p": 1.1}, None),
    ("min_p", {"min_p": -1}, None),
    ("typical_p", {"typical_p": 0}, None),
    ("top_k", {"top_k": -2}, None),
    ("repetition_penalty", {"repetition_penalty": 0}, None),
    ("frequency_penalty", {"frequency_penalty": -2.5}, None),
    ("presence_penalty", {"presence_penalty": 2.5}, None),
    ("logit_bias", {"logit_bias": {"a": 1}}, None),
    ("logit_bias", {"logit_bias": {"1": 101}}, None),
    ("logit_bias", {"logit_bias": {str(token): 1 for token in range(1025)}}, None),
    ("n", {"n": 0}, None),
    ("n", {"n": 129}, None),
    ("stop", {"stop": ["x"] * 65}, None),
    ("stop", {"stop": "é" * 513}, None),
    ("stop", {"stop": ["x" * 1024] * 9}, None),
    ("repetition_penalty", {"repetition_penalty": 1e-30}, None),
    ("repetition_penalty", {"repetition_penalty": 1e30}, None),
    ("logit_bias", {"logit_bias": {"999999": 1}}, None),
    ("stop", {"stop": ""}, None),
    ("seed", {"seed": "x"}, None),
    ("max_tokens", {"max_tokens": 0}, None),
    ("max_tokens", {"max_tokens": 3000}, "context_length_exceeded"),
    ("stream_options", {"stream_options": {"include_usage": True}}, None),
    ("guided_json", {"guided_json": {"not": {"type": "string"}}}, None),
    ("functions", {"functions": [{"name": "f"}]}, "unsupported_parameter"),
    ("function_call", {"function_call": "auto"}, "unsupported_parameter"),
    ("suffix", {"suffix": "x"}, "unsupported_parameter"),
    ("adapter_id", {"adapter_id": "a"}, "unsupported_parameter"),
    ("merged_adapters", {"merged_adapters": {"ids": ["a"], "weights": [1]}}, "unsupported_parameter"),
    ("request_id", {"request_id": "a b"}, None),
    ("model", {"model": None}, None),
]


@pytest.mark.parametrize(("param", "fields", "code"), REFUSED)
@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("stream", [False, True])
async def test_rejected_fields(
    server: Serving, path: str, body: dict[str, Any], param: str, fields: dict[str, Any], code: str | None, stream: bool
) -> None:
    if param == "stream_options":
        stream = False
    response = await server.client.post(path, json={**body, "stream": stream, **fields})
    assert response.status_code == (422 if code == "unsupported_parameter" else 400), response.text
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert param in error["message"]
    assert not server.shard.submits


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt"),
        ("/v1/completions", {"prompt": [True]}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": [300]}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"best_of": 1, "n": 2}, "best_of"),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 65}, "n"),
        ("/v1/completions", {"best_of": 3}, "best_of"),
        ("/v1/completions", {"best_of": 2, "stream": True}, "best_of"),
        ("/v1/completions", {"prompt": ["a"] * 1025}, "n"),
        ("/v1/chat/completions", {"messages": None}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": ["Hi"]}, "messages[0]"),
        ("/v1/chat/completions", {"messages": [{"content": "Hi"}]}, "messages[0]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi", "name": 5}]},
            "messages[0].name",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}] * 2048}, "messages"),
        ("/v1/chat/completions", {"documents": {}}, "documents"),
        ("/v1/chat/completions", {"documents": ["a"]}, "documents"),
        ("/v1/chat/completions", {"chat_template": "{{ messages }}"}, "chat_template"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"a": "x" * (16 << 10)}}, "chat_template_kwargs"),
        (
            "/v1/chat/completions",
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            "/v1/chat/completions",
            {"continue_final_message": True, "messages": [{"role": "user", "content": ""}]},
            "continue_final_message",
        ),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ],
)
async def test_rejected_fields_of_one_route(server: Serving, path: str, fields: dict[str, Any], param: str) -> None:
    body = COMPLETION if path == "/v1/completions" else CHAT
    response = await server.client.post(path, json={**body, **fields})
    error = response.json()["error"]
    assert response.status_code == (422 if error["code"] == "unsupported_parameter" else 400), response.text
    assert error["param"] == param
    assert not server.shard.submits


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_unknown_models(server: Serving, path: str, body: dict[str, Any]) -> None:
    response = await server.client.post(path, json={**body, "model": "gpt-5"})
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "The model `gpt-5` does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    server.says("x")
    assert (await server.client.post(path, json={**body, "model": ""})).status_code == 200


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_unknown_fields_are_ignored_and_named(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("x")
    response = await server.client.post(path, json={**body, "store": True, "safety_identifier": "x"})
    assert response.headers["x-ignored-fields"] == "store, safety_identifier"


@pytest.mark.parametrize(("path", "name"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
async def test_prompts_that_are_too_long(server: Serving, path: str, name: str) -> None:
    long = "a" * 2048
    body = {"model": MODEL_ID, name: long if name == "prompt" else [{"role": "user", "content": long}]}
    response = await server.client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_template_errors(server: Serving) -> None:
    body = {**CHAT, "messages": [{"role": "critic", "content": "Hi"}]}
    response = await server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "Failed applying chat template to inputs: no critics here"


async def test_a_model_without_a_template(tmp_path: Any, anyio_backend: str) -> None:
    async with serving(tmp_path, chat_template=False) as server:
        response = await server.client.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 400
        message = "Failed applying chat template to inputs: the model has no chat template"
        assert response.json()["error"]["message"] == message
