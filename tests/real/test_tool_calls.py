"""Calls and structured answers with Qwen3's own tokenizer and chat template, over a tiny random model.

The model draws among all tokens that a grammar allows, so that it writes what no trained model would.
"""

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.e2e.launched import Launched
from tests.real import families
from tests.real.families import closed

pytestmark = pytest.mark.real

VOCAB = 151936
END, THINK, END_THINK, CALL, END_CALL = 151645, 151667, 151668, 151657, 151658
SEEDS = 48
CONCURRENCY = 16
MAX_TOKENS = 200
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "a <tool_call> b"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {"zone": {"const": "</think>"}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in (("weather", WEATHER), ("clock", {**CLOCK, "additionalProperties": False}))
]
FORCED: dict[str, dict[str, Any]] = {
    "required": {"tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "parallel": {"tool_choice": "required", "parallel_tool_calls": True},
}


SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": closed(word={"enum": ["<think>", "</tool_call>", "<|im_end|>", "plain"]}),
    "integer": closed(number={"type": "integer"}),
    "bounded integer": closed(number={"type": "integer", "minimum": -3, "maximum": 4000}),
    "large bounds": closed(number={"type": "integer", "minimum": 2**53 + 1, "maximum": 2**64}),
    "number": closed(number={"type": "number", "minimum": 0, "exclusiveMaximum": 1}),
    "pattern": closed(code={"type": "string", "pattern": r"^\d{3}-\w{2}$"}),
    "string": closed(text={"type": "string", "maxLength": 6}),
    "array": closed(items={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}),
    "nested": closed(inner=closed(kind={"const": "x"}), other={"anyOf": [{"type": "null"}, {"type": "boolean"}]}),
    "reference": {
        **closed(tree={"$ref": "#/$defs/tree"}),
        "$defs": {"tree": closed(leaf={"enum": [1, 2, "three"]})},
    },
}
BIAS = {str(END_THINK): 10, str(THINK): 7, str(CALL): 3, str(END_CALL): 3, str(END): 6}
"""So that reasoning, calls and answers end within a few tokens."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a tiny random Qwen3 with the real tokenizer."""
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for path in families.tokenizer_files("qwen3").iterdir():
        shutil.copy(path, folder)
    flags = ("--model-id", str(folder), "--dtype", "float32", "--threads", "1", "--cpu-memory", "1GiB")
    with Launched(*flags, "--adapter-source", "local") as launched:
        yield launched.wait_until_ready().url


async def _answers(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices, `CONCURRENCY` at a time; every second one is streamed."""
    turns = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def ask(number: int, body: dict[str, Any]) -> dict[str, Any]:
            async with turns:
                answer = await client.post("/v1/chat/completions", json={**body, "stream": number % 2 == 1})
            assert answer.status_code == 200, answer.text
            if number % 2 == 0:
                choice: dict[str, Any] = answer.json()["choices"][0]
                return choice
            return _joined(answer.text)

        return list(await asyncio.gather(*(ask(number, body) for number, body in enumerate(bodies))))


def _joined(text: str) -> dict[str, Any]:
    """The choice that a stream adds up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]", text[-500:]
    for event in map(json.loads, events):
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            message["content"] += choice["delta"].get("content") or ""
            message["reasoning_content"] += choice["delta"].get("reasoning_content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": finish}


def _choices(url: str, thinking: bool, **more: Any) -> list[dict[str, Any]]:
    """Those of all seeds, streamed and not."""
    asked = {
        "model": "",
        "messages": [{"role": "user", "content": "The weather in Paris?"}],
        "temperature": 1,
        "max_tokens": MAX_TOKENS,
        "logit_bias": BIAS,
        "chat_template_kwargs": {"enable_thinking": thinking},
        **more,
    }
    return asyncio.run(_answers(url, [{**asked, "seed": seed} for seed in range(SEEDS) for _ in range(2)]))


def _check(choices: list[dict[str, Any]], thinking: bool) -> list[dict[str, Any]]:
    """The messages of the finished answers."""
    assert any(choice["message"].get("reasoning_content") for choice in choices) == thinking
    finished = [choice["message"] for choice in choices if choice["finish_reason"] != "length"]
    assert len(finished) > len(choices) // 2
    return finished


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "direct"])
@pytest.mark.parametrize("kind", FORCED)
def test_every_forced_call_is_valid(url: str, kind: str, thinking: bool) -> None:
    for message in _check(_choices(url, thinking, tools=TOOLS, **FORCED[kind]), thinking):
        calls = message["tool_calls"]
        assert calls and not message["content"], message
        assert len(calls) == 1 or kind == "parallel"
        for call in calls:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            assert name == "weather" or (name == "clock" and kind != "named")
            jsonschema.validate(arguments, WEATHER if name == "weather" else CLOCK)


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "direct"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_structured_answer_matches_its_schema(url: str, name: str, thinking: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[name]}}
    for message in _check(_choices(url, thinking, response_format=schema), thinking):
        answer = json.loads(message["content"])
        jsonschema.validate(answer, SCHEMAS[name])
        if name == "integer":
            assert abs(answer["number"]) < 2**63
        if name == "pattern":  # Python's \\d and \\w have digits and letters of all scripts
            assert re.fullmatch(SCHEMAS[name]["properties"]["code"]["pattern"], answer["code"], re.ASCII)
