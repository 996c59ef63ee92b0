"""LoRAX's Python client against the server, unchanged. It uses `/` only and validates the answers strictly."""

import os
from typing import Any

import pytest

from tests.router.api import lorax_client
from tests.router.serving import Serving

INTERPRETER = lorax_client.python()

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        INTERPRETER is None and "LORIKEET_REQUIRE_LORAX_CLIENT" not in os.environ,
        reason="lorax-client is not installed: python -m tests.router.api.lorax_client install",
    ),
]


async def calls(server: Serving, *operations: dict[str, Any]) -> list[Any]:
    assert INTERPRETER is not None, "lorax-client is required: python -m tests.router.api.lorax_client install"
    both = [{**operation, "is_async": is_async} for operation in operations for is_async in (False, True)]
    answers = await lorax_client.calls(INTERPRETER, server.url, both)
    assert _unseeded(answers[::2]) == _unseeded(answers[1::2]), "the two clients see the same"
    return answers[::2]


def _unseeded(value: Any) -> Any:
    """Without the seeds that the server generated."""
    if isinstance(value, dict):
        return {name: _unseeded(item) for name, item in value.items() if name != "seed"}
    return [_unseeded(item) for item in value] if isinstance(value, list) else value


async def test_generate(server: Serving) -> None:
    server.says(" there!", per_step=2, logprobs=[-0.5, -0.25])
    [answer] = await calls(
        server,
        {"call": "generate", "prompt": "Hi", "max_new_tokens": 2, "decoder_input_details": True},
    )
    assert answer["generated_text"] == " there!"
    details = answer["details"]
    assert (details["finish_reason"], details["prompt_tokens"], details["generated_tokens"]) == ("length", 2, 2)
    assert details["seed"] is None
    assert [token["logprob"] for token in details["prefill"]] == [None, -0.5]
    assert [token["text"] for token in details["tokens"]] == [" there", "!"]


async def test_generate_with_every_parameter(server: Serving) -> None:
    server.says("abc", ends=True)
    [answer] = await calls(
        server,
        {
            "call": "generate",
            "prompt": "Hi",
            "do_sample": True,
            "max_new_tokens": 8,
            "ignore_eos_token": False,
            "best_of": 2,
            "repetition_penalty": 1.1,
            "return_full_text": True,
            "stop_sequences": ["zzz"],
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.9,
            "truncate": 100,
            "typical_p": 0.9,
            "watermark": True,
            "return_k_alternatives": 2,
        },
    )
    assert answer["generated_text"] == "Hiabc"
    assert len(answer["details"]["best_of_sequences"]) == 1
    assert len(answer["details"]["tokens"][0]["alternative_tokens"]) == 2
    assert answer["details"]["finish_reason"] == "eos_token"


async def test_generate_stream(server: Serving) -> None:
    server.says(" there!")
    [events] = await calls(server, {"call": "generate_stream", "prompt": "Hi", "max_new_tokens": 2})
    assert [event["token"]["text"] for event in events] == [" there", "!"]
    assert events[-1]["generated_text"] == " there!"
    assert events[-1]["details"]["generated_tokens"] == 2


async def test_response_format(server: Serving) -> None:
    server.says('{"a": 1}', ends=True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked = {"prompt": "Hi", "max_new_tokens": 8, "response_format": {"type": "json_object", "schema": schema}}
    answer, events = await calls(server, {"call": "generate", **asked}, {"call": "generate_stream", **asked})
    assert answer["generated_text"] == events[-1]["generated_text"] == '{"a": 1}'
    assert all('"integer"' in submit.grammar.text for submit in server.shard.submits) and server.shard.submits


async def test_errors(server: Serving) -> None:
    server.says("ab", error="broken")
    long = "a" * 3000
    operations = [{"call": call, "prompt": prompt} for call in ("generate", "generate_stream") for prompt in ("", long)]
    operations += [{"call": call, "prompt": "Hi"} for call in ("generate", "generate_stream")]
    operations.append({"call": "generate", "prompt": "Hi", "adapter_id": "org/a"})
    answers = await calls(server, *operations)
    names = [answer["raised"] for answer in answers]
    assert names == ["ValidationError"] * 4 + ["GenerationError"] * 2 + ["ValidationError"]
    assert answers[1]["message"].startswith("Input validation error: `inputs` tokens + `max_new_tokens` must be <=")
    assert answers[4]["message"] == "Request failed during generation: broken"


async def test_a_response_format(server: Serving) -> None:
    """The client's own model of it, with a schema as text or as an object."""
    server.says('{"a": 1}', ends=True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    [answer] = await calls(
        server,
        {"call": "generate", "prompt": "Hi", "response_format": {"type": "json_object", "schema": schema}},
    )
    assert answer["generated_text"] == '{"a": 1}'
    assert "integer" in server.shard.submits[-1].grammar.text
