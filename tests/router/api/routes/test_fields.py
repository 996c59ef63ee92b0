"""Every field of OpenAI, vLLM, SGLang, TGI and LoRAX, on each generation route: none that would change the text or the
answer is ignored, and docs/fields.md says what happens.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import fields as field_document
from tests.docs.pages.fields import behaviour, fields_of
from tests.router.api.routes.test_openai import CHAT as CHAT_BODY
from tests.router.api.routes.test_openai import COMPLETION
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]
CHAT, COMPLETIONS, NATIVE = "chat", "completions", "generate"
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions", NATIVE: "/generate"}

A, R, I = "applied", "rejected", "ignored"  # noqa: E741
FIELDS: dict[str, tuple[Any, str, str, str, tuple[Any, ...]]] = {
    # OpenAI
    "audio": ({"voice": "x"}, R, R, R, ()),
    "best_of": (2, R, A, A, (1,)),
    "echo": (True, R, A, R, (False,)),
    "frequency_penalty": (0.5, A, A, A, (0,)),
    "function_call": ("auto", R, R, R, ("none",)),
    "functions": ([{"name": "f"}], R, R, R, ([],)),
    "logit_bias": ({"5": 1}, A, A, A, ({},)),
    "logprobs": (1, A, A, I, ()),
    "max_completion_tokens": (2, A, A, R, ()),
    "max_tokens": (2, A, A, R, ()),
    "metadata": ({"a": "b"}, A, A, I, ()),
    "modalities": (["text", "audio"], R, R, R, (["text"],)),
    "moderation": ({}, I, I, I, ()),
    "n": (2, A, A, R, (1,)),
    "parallel_tool_calls": (False, A, I, I, ()),
    "prediction": ({"type": "content", "content": "x"}, A, A, R, ()),
    "presence_penalty": (0.5, A, A, A, (0,)),
    "prompt_cache_key": ("x", I, I, I, ()),
    "prompt_cache_options": ({}, I, I, I, ()),
    "prompt_cache_retention": ("24h", I, I, I, ()),
    "reasoning_effort": ("low", I, I, I, ()),
    "response_format": ({"type": "json_object"}, A, A, A, ({"type": "text"},)),
    "safety_identifier": ("x", I, I, I, ()),
    "seed": (1, A, A, A, ()),
    "service_tier": ("flex", A, A, I, ()),
    "stop": (["x"], A, A, A, ([],)),
    "store": (True, I, I, I, ()),
    "suffix": ("x", R, R, R, ("",)),
    "temperature": (0.5, A, A, A, (1,)),
    "tool_choice": ("auto", A, R, R, ("none",)),
    "tools": ([{"type": "function", "function": {"name": "f"}}], A, R, R, ([],)),
    "top_logprobs": (0, A, I, I, ()),
    "top_p": (0.5, A, A, A, (1,)),
    "user": ("x", A, A, I, ()),
    "verbosity": ("low", I, I, I, ()),
    "web_search_options": ({}, I, I, I, ()),
    # vLLM
    "add_generation_prompt": (False, R, R, R, (True,)),
    "add_special_tokens": (None, A, A, A, ()),
    "allowed_token_ids": ([5], A, A, A, ([],)),
    "bad_words": (["x"], A, A, A, ([],)),
    "cache_salt": ("x", A, A, A, ()),
    "chat_template": ("{{ messages }}", R, R, R, ("",)),
    "chat_template_kwargs": ({"foo": 1}, I, R, R, ({},)),
    "continue_final_message": (True, A, R, R, (False,)),
    "documents": ([{"text": "x"}], R, R, R, ([],)),
    "guided_json": ({"type": "object"}, A, A, A, ()),
    "guided_regex": ("x", A, A, A, ()),
    "guided_choice": (["x"], A, A, A, ([],)),
    "guided_grammar": ('start: "x"', A, A, A, ()),
    "guided_decoding_backend": ("x", I, I, I, ()),
    "guided_whitespace_pattern": ("x", R, R, R, ()),
    "ignore_eos": (True, A, A, A, (False,)),
    "include_reasoning": (True, I, I, I, ()),
    "include_stop_str_in_output": (True, A, A, A, (False,)),
    "kv_transfer_params": ({}, I, I, I, ()),
    "length_penalty": (2.0, R, R, R, (1, 1.0)),
    "logprob_token_ids": ([5], A, A, R, ()),
    "media_io_kwargs": ({}, I, I, I, ()),
    "min_p": (0.5, A, A, A, (0,)),
    "min_tokens": (2, A, A, A, (0,)),
    "mm_processor_kwargs": ({}, I, I, I, ()),
    "priority": (-1, A, A, A, (0,)),
    "prompt_embeds": ("x", R, R, R, ()),
    "prompt_logprobs": (1, A, A, R, ()),
    "repetition_detection": ({}, R, R, R, ()),
    "repetition_penalty": (1.5, A, A, A, (1,)),
    "request_id": ("x", A, A, I, ()),
    "return_prompt_text": (True, I, I, I, ()),
    "return_token_ids": (True, A, A, R, (False,)),
    "return_token_offsets": (True, I, I, I, ()),
    "return_tokens_as_token_ids": (True, A, A, I, ()),
    "session_id": ("x", I, I, I, ()),
    "skip_special_tokens": (False, A, A, A, (True,)),
    "spaces_between_special_tokens": (False, A, A, A, (True,)),
    "stop_token_ids": ([5], A, A, A, ([],)),
    "stream_interval": (2, I, I, I, ()),
    "structured_outputs": ({"regex": "x"}, A, A, A, ({},)),
    "thinking_token_budget": (5, R, R, R, ()),
    "top_k": (5, A, A, A, ()),
    "truncate_prompt_tokens": (5, A, A, R, ()),
    "truncation_side": ("right", A, A, R, ("left",)),
    "use_beam_search": (True, R, R, R, (False,)),
    "vllm_xargs": ({}, I, I, I, ()),
    "watermarking": (True, R, R, R, (False,)),
    # SGLang
    "custom_logit_processor": ("x", R, R, R, ("",)),
    "custom_params": ({}, I, I, I, ()),
    "ebnf": ('root ::= "x"', A, A, A, ()),
    "json_schema": ("{}", A, A, A, ()),
    "lora_path": ("x", R, R, R, ("",)),
    "min_new_tokens": (2, A, A, A, (0,)),
    "no_stop_trim": (True, A, A, A, (False,)),
    "regex": ("x", A, A, A, ()),
    "rid": ("x", I, I, I, ()),
    "sampling_params": ({"temperature": 0}, R, R, I, ()),
    "separate_reasoning": (True, I, I, I, ()),
    "stop_regex": ("x", R, R, R, ("",)),
    "stream_reasoning": (True, I, I, I, ()),
    # LoRAX, TGI
    "adapter_id": ("one", A, A, A, ("",)),
    "adapter_name": ("x", R, R, R, ("",)),
    "adapter_parameters": ({"ids": ["x"]}, R, R, R, ({},)),
    "adapter_source": ("local", A, A, A, ()),
    "api_token": ("x", A, A, A, ()),
    "apply_chat_template": (True, I, I, I, ()),
    "decoder_input_details": (True, I, I, A, (False,)),
    "details": (True, A, A, A, (False,)),
    "do_sample": (True, A, A, A, (False,)),
    "grammar": ({"type": "regex", "value": "x"}, A, A, A, ()),
    "guideline": ("x", R, R, R, ()),
    "ignore_eos_token": (True, A, A, A, (False,)),
    "max_new_tokens": (2, R, R, A, ()),
    "merged_adapters": ({"ids": ["one", "two"], "weights": [1, 1]}, A, A, A, ()),
    "return_full_text": (True, I, I, A, (False,)),
    "return_k_alternatives": (2, I, I, A, ()),
    "stop_sequences": (["x"], R, R, A, ([],)),
    "tool_prompt": ("x", A, R, R, ()),
    "top_n_tokens": (2, R, R, A, (0,)),
    "truncate": (5, R, R, A, ()),
    "typical_p": (0.5, A, A, A, ()),
    "use_cache": (False, I, I, I, ()),
    "watermark": (True, R, R, A, (False,)),
    # Lorikeet
    "heads_id": ("", A, A, A, ()),
    "receipt": (True, A, A, A, (False,)),
    "speculation": ("off", R, R, R, ()),
    "speculative_tokens": (2, A, A, A, (0,)),
    "speculative_method": ("lookup", A, A, A, ("off",)),
    "speculative_schedule": ("constant", A, A, A, ()),
    "speculative_verification": ("shared-noise", A, A, A, ()),
    "speculative_verify": ("coupled", A, A, A, ()),
    "unknown_field": (1, I, I, I, ()),
}
"""A value that asks for something, what chat, completions and generate do with it, and values that ask for nothing."""
WITH: dict[str, dict[str, Any]] = {
    "best_of": {"do_sample": True},
    "top_logprobs": {"logprobs": True},
    "tool_prompt": {"tools": [{"type": "function", "function": {"name": "f"}}]},
}
"""Fields without which a field is not valid."""
TAKEN_BY_TEMPLATES = (
    "chat_template_kwargs",
    "reasoning_effort",
    "verbosity",
    "documents",
    "add_generation_prompt",
    "chat_template",
)
"""Applied where the chat template reads them; that of these tests does not. For the last one there is a flag.

In the same way `suffix` needs tokens that the tokenizer of these tests does not have.
"""


@pytest.fixture(scope="module")
async def shared(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    async with serving(tmp_path_factory.mktemp("serving"), adapters=True, speculative_tokens_max=4) as started:
        for name in ("one", "two"):
            started.adapter(name)
        yield started


def request(route: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, body) of a short request with `fields`."""
    if route is NATIVE:
        return PATHS[route], {"inputs": "Hi", "parameters": {"max_new_tokens": 2, **fields}}
    base = CHAT_BODY if route is CHAT else COMPLETION
    if "logprob_token_ids" in fields:
        base = {**base, "logprobs": True if route is CHAT else 1}
    lengths = {} if "max_completion_tokens" in fields else {"max_tokens": 2}
    return PATHS[route], {**base, **lengths, **fields}


def cases() -> list[tuple[str, str, str, Any]]:
    """(field, route, behaviour, value) for each value that asks for something."""
    ignored = []
    for (name, (usual, *behaviours, _)), (place, route) in itertools.product(FIELDS.items(), enumerate(PATHS)):
        value = usual
        if name == "add_special_tokens":
            value = route is CHAT  # the opposite of the default
        if name == "logprobs" and route is CHAT:
            value = True
        ignored.append((name, route, behaviours[place], value))
    return ignored


def ignored(response: Any) -> list[str]:
    names = response.headers.get("x-ignored-fields", "")
    return [name.removeprefix("parameters.").partition(".")[0] for name in names.split(", ") if name]


@pytest.mark.parametrize(
    ("name", "route", "behaviour", "value"),
    [
        pytest.param(*case, marks=() if (row + row // 3) % 3 == 0 else pytest.mark.long)
        for row, case in enumerate(cases())
    ],
)
async def test_a_field_that_asks_for_something(
    server: Serving, name: str, route: str, behaviour: str, value: Any
) -> None:
    server.says("ab")
    server.shard.submits.clear()
    path, body = request(route, {name: value, **(WITH.get(name, {}) if behaviour == A else {})})
    response = await server.client.post(path, json=body)
    if behaviour == R:
        assert response.status_code == 422, response.text
        assert f"`{name}`" in response.text and not server.shard.submits
        if route is not NATIVE:
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        return
    assert response.status_code == 200, response.text
    assert ignored(response) == ([name] if behaviour == I else [])


@pytest.mark.parametrize(
    "route", [pytest.param(route, marks=() if route is CHAT else pytest.mark.long) for route in PATHS]
)
async def test_fields_that_ask_for_nothing(server: Serving, route: str) -> None:
    server.says("ab")
    for name, (_, *behaviours, neutral) in FIELDS.items():
        for value in [None, *neutral]:
            path, body = request(route, {name: value})
            response = await server.client.post(path, json=body)
            assert response.status_code == 200, (name, value, response.text)
            assert not ignored(response) or behaviours[list(PATHS).index(route)] == I, (name, value)


async def test_all_fields_that_ask_for_nothing_together(server: Serving) -> None:
    """As clients that send every field they know."""
    server.says("ab")
    for route in PATHS:
        path, body = request(route, dict.fromkeys(FIELDS))
        body["model"] = MODEL_ID
        if route is NATIVE:
            body["parameters"]["max_new_tokens"] = 2
        response = await server.client.post(path, json=body)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("route", list(PATHS))
def test_the_bodies_declare_these_fields(route: str) -> None:
    declared = {name: behaviour(field) for name, (field, _) in fields_of(route).items()}
    for name, _, expected, _ in (case for case in cases() if case[1] is route):
        is_template_s = (name in TAKEN_BY_TEMPLATES and route is CHAT) or (name, route) == ("suffix", COMPLETIONS)
        assert declared.get(name, I) == (A if is_template_s else expected), name


def test_the_documentation_is_that_of_the_bodies() -> None:
    """`make docs` writes it."""
    assert (ROOT / "docs" / "fields.md").read_text() == field_document.text()


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (
            PATHS[CHAT],
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}], "foo": 1},
                    {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "annotations": []},
                ]
            },
            ["messages[0].foo", "messages[0].content[0].cache_control", "messages[1].annotations"],
        ),
        (
            PATHS[CHAT],
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
            ["chat_template_kwargs.enable_thinking", "reasoning_effort"],
        ),
        (
            PATHS[COMPLETIONS],
            {"prediction": {"type": "content", "content": [{"type": "text", "text": "x", "foo": 1}], "bar": 2}},
            ["prediction.bar", "prediction.content[0].foo"],
        ),
        (
            PATHS[COMPLETIONS],
            {"merged_adapters": {"ids": ["one", "two"], "weights": [1, 1], "foo": 1}},
            ["merged_adapters.foo"],
        ),
        (
            PATHS[COMPLETIONS],
            {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": True}},
            ["stream_options.include_obfuscation"],
        ),
        (
            PATHS[NATIVE],
            {"parameters": {"merged_adapters": {"ids": ["one", "two"], "weights": [1, 1], "foo": 1}}, "foo": 1},
            ["foo", "parameters.merged_adapters.foo"],
        ),
    ],
)
async def test_nested_fields_are_named_by_path(
    server: Serving, path: str, fields: dict[str, Any], names: list[str]
) -> None:
    server.says("x")
    base = {PATHS[CHAT]: CHAT_BODY, PATHS[COMPLETIONS]: COMPLETION}.get(path, {"inputs": "Hi"})
    response = await server.client.post(path, json={**base, **fields})
    assert response.status_code == 200, response.text
    assert sorted(response.headers["x-ignored-fields"].split(", ")) == sorted(names)


@pytest.mark.parametrize(
    ("field", "value", "is_rejected"),
    [
        ("function_call", {}, True),
        ("audio", {"id": "x"}, True),
        ("refusal", "no", True),
        ("reasoning", "hm", True),
        ("prefix", True, True),
        ("tool_calls", [], False),
        ("refusal", None, False),
        ("reasoning_content", "", False),
        ("prefix", False, False),
    ],
)
async def test_fields_of_a_message(server: Serving, field: str, value: Any, is_rejected: bool) -> None:
    server.says("x")
    message = {"role": "assistant", "content": "x", field: value}
    response = await server.client.post(PATHS[CHAT], json={**CHAT_BODY, "messages": [message]})
    assert response.status_code == (422 if is_rejected else 200), response.text
    if is_rejected:
        assert response.json()["error"]["param"] == f"messages[0].{field}"
    assert "x-ignored-fields" not in response.headers


async def test_many_ignored_fields_are_named_in_part(server: Serving) -> None:
    server.says("x")
    messages = [{"role": "user", "content": "x", "foo": 1}] * 100
    response = await server.client.post(PATHS[CHAT], json={**CHAT_BODY, "messages": messages})
    assert len(response.headers["x-ignored-fields"].split(", ")) == 32


@pytest.mark.parametrize("field", ["max_new_tokens", "temperature", "adapter_id", "min_tokens", "tools"])
async def test_parameters_next_to_parameters(server: Serving, field: str) -> None:
    response = await server.client.post("/generate", json={"inputs": "Hi", field: 5})
    assert response.status_code == 422
    assert response.json()["error"] == f"Input validation error: `{field}` belongs in `parameters`"
    server.says("x")
    for value in (None, False, []):
        response = await server.client.post("/generate", json={"inputs": "Hi", field: value})
        assert response.status_code == 200, response.text


async def test_unknown_fields_are_ignored_as_in_lorax(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, unknown_fields="ignore") as server:
        server.says("x")
        body = {"inputs": "Hi", "parameters": {"stop_regex": "x", "suffix": "x", "tools": [{}]}, "top_k": 5}
        response = await server.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        assert ignored(response) == ["top_k", "stop_regex", "suffix", "tools"]
        body = {"inputs": "Hi", "parameters": {"response_format": {"type": "xml"}}}
        assert (await server.client.post("/generate", json=body)).status_code == 422
        response = await server.client.post(PATHS[CHAT], json={**CHAT_BODY, "functions": [{}]})
        assert response.status_code == 422


async def test_errors_name_what_to_use(server: Serving) -> None:
    response = await server.client.post("/generate", json={"inputs": "Hi", "parameters": {"n": 2}})
    expected = "Input validation error: `n` is not supported by this route: use `best_of`, or /v1/completions"
    assert response.json()["error"] == expected


@pytest.mark.parametrize("field", [{"allowed_token_ids": [5]}, {"bad_words": ["x"]}, {"min_tokens": 2}])
async def test_fields_that_exclude_tokens_cannot_be_set_with_a_grammar(server: Serving, field: dict[str, Any]) -> None:
    fields = {**field, "guided_regex": "a+"}
    response = await server.client.post("/generate", json={"inputs": "Hi", "parameters": fields})
    assert response.status_code == 422 and "cannot be set together" in response.json()["error"]
    response = await server.client.post("/v1/completions", json={**COMPLETION, **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(field))
