"""Calls and structured answers where the marks of calls and reasoning are added tokens, as in Qwen's tokenizers.

The shard draws each token among those that the grammar of the request allows, as a random model would.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest

from lorikeet.proto.grammars import read_grammar_tokenizer
from tests.router.drawn_answers import DrawnAnswers
from tests.router.serving import Serving, serving

ROUTE = "/v1/chat/completions"
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = (
    "{% if tools %}[tools]{% endif %}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if opens %}<think>\n{% elif enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{# <tool_call> #}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "a<tool_call>b", "x</think>"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}}
    for name in ("weather", "clock")
]
NAMED = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PARAMETERS}}
REQUESTS: dict[str, dict[str, Any]] = {
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": NAMED},
    "one call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "call or schema": {"tools": TOOLS, "response_format": SCHEMA},
    "schema": {"response_format": SCHEMA},
    "choice": {"guided_choice": ["<tool_call>", "yes</think>", "no"]},
    "expression": {"guided_regex": "(<think>|[a-c]){2,4}"},
    "grammar": {"guided_grammar": 'start: A "</think>"\nA: /[ab]{1,3}/ | <tool_call>'},
    "GBNF": {"guided_grammar": 'root ::= "a" | "<tool_call>b"'},
}
THINKING: dict[str, dict[str, Any]] = {"on": {}, "open": {"opens": True}, "off": {"enable_thinking": False}}
SEEDS = 5


@pytest.fixture(scope="module")
async def server(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("added")
    async with serving(folder, chat_template=TEMPLATE, added_tokens=ADDED) as running:
        tokenizer = read_grammar_tokenizer(folder / "model", running.shard.vocab_size)
        running.shard.answer = DrawnAnswers(tokenizer, frozenset(map(running.backend.token_to_id, ADDED)))
        yield running


def body(name: str, thinking: str, seed: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "?"}]
    asked = {"messages": messages, "max_tokens": 1200, "seed": seed, "chat_template_kwargs": THINKING[thinking]}
    return {"model": "test/model", **asked, **REQUESTS[name]}


def joined(events: list[Any]) -> dict[str, Any]:
    """The choice that a stream adds up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for event in events[:-1]:
        assert "error" not in event, event
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": finish}


def check(name: str, thinking: str, choice: dict[str, Any]) -> bool:
    """Whether the answer is finished; then it is valid."""
    message, calls = choice["message"], choice["message"].get("tool_calls") or []
    if thinking == "off":
        assert not message.get("reasoning_content"), message
    if choice["finish_reason"] == "length":
        return False
    for call in calls:
        assert call["function"]["name"] in ("clock",) if name == "named" else ("weather", "clock")
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
    content = message["content"] or ""
    if name in ("required", "named", "one call"):
        assert calls and not content, message
        assert len(calls) == 1 or name == "required"
    elif name in ("schema", "call or schema"):
        assert bool(calls) != bool(content), message
        jsonschema.validate(json.loads(content), PARAMETERS) if content else None
    elif name == "choice":
        assert content in REQUESTS[name]["guided_choice"]
    else:
        assert content, message
    return True


@pytest.mark.parametrize("thinking", THINKING)
@pytest.mark.parametrize("name", REQUESTS)
async def test_every_finished_answer_is_valid(server: Serving, name: str, thinking: str) -> None:
    num_finished = num_reasoned = 0
    for seed in range(SEEDS):
        request = body(name, thinking, seed)
        if seed % 2:
            choice = joined(await server.events(ROUTE, {**request, "stream": True}))
        else:
            answer = await server.client.post(ROUTE, json=request)
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
        num_reasoned += bool(choice["message"].get("reasoning_content"))
        num_finished += check(name, thinking, choice)
    assert num_finished > SEEDS // 2
    assert (num_reasoned > 0) == (thinking != "off")
