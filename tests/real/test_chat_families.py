"""Chats, tools, reasoning, schemas and patterns over seven tokenizers and their chat templates.

The models are random and draw among all tokens that a grammar allows, so that they write what no trained model would.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import date
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from lorikeet.router.output.formats import format_of
from tests.real import families
from tests.real.families import closed

pytestmark = pytest.mark.real

CONCURRENCY = 16
MAX_TOKENS = 120
SEEDS = 3
FORCED: dict[str, dict[str, Any]] = {
    "required": {"tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False},
    "parallel": {"tool_choice": "required", "parallel_tool_calls": True},
}


WEATHER = {**closed(city={"type": "string", "enum": ["Paris", "Rome", "a <b> \u6771\u4eac"]}, days={"type": "integer",
           "minimum": 1, "maximum": 14}, exact={"type": "boolean"}), "required": ["city", "days"]}  # fmt: skip
PARAMETERS = {"weather": WEATHER, "clock": closed(zone={"const": "</end>"})}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema, "strict": True}}
    for name, schema in PARAMETERS.items()
]
LOOSE = [
    {"type": "function", "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
    for tool in TOOLS
]
"""The same, not strict."""
SHORT = {"type": "string", "maxLength": 5}
SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": closed(word={"enum": ["<think>", "</tool_call>", "<|im_end|>", "plain", "\u6771\u4eac", "\U0001f600"]}),
    "constant": closed(word={"const": "<|channel|>final"}),
    "integer": closed(number={"type": "integer"}),
    "bounded integer": closed(number={"type": "integer", "minimum": -3, "maximum": 4000}),
    "large bounds": closed(number={"type": "integer", "minimum": 2**53 + 1, "maximum": 2**64}),
    "number": closed(number={"type": "number", "minimum": 0, "exclusiveMaximum": 1}),
    "multiple": closed(number={"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}),
    "pattern": closed(code={"type": "string", "pattern": r"^\d{3}-\w{2}$"}),
    "pattern of other scripts": closed(code={"type": "string", "pattern": "^[\u3041-\u3096]{2,4}$"}),
    "string": closed(text=SHORT),
    "long enough string": closed(text={"type": "string", "minLength": 4, "maxLength": 9}),
    "date": closed(day={"type": "string", "format": "date"}),
    "uuid": closed(id={"type": "string", "format": "uuid"}),
    "boolean": closed(yes={"type": "boolean"}),
    "null": closed(nothing={"type": "null"}),
    "several types": closed(value={"type": ["boolean", "null"]}),
    "array": closed(items={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}),
    "array of arrays": closed(
        rows={
            "type": "array",
            "items": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2},
            "minItems": 2,
            "maxItems": 2,
        }
    ),
    "prefix items": closed(
        pair={"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2}
    ),
    "nested": closed(inner=closed(kind={"const": "x"}), other={"anyOf": [{"type": "null"}, {"type": "boolean"}]}),
    "reference": {
        **closed(tree={"$ref": "#/$defs/tree"}),
        "$defs": {"tree": closed(leaf={"enum": [1, 2, "three"]})},
    },
    "recursion": {
        **closed(list={"$ref": "#/$defs/list"}),
        "$defs": {"list": {"anyOf": [{"type": "null"}, closed(next={"$ref": "#/$defs/list"})]}},
    },
    "optional": {**closed(a={"type": "boolean"}, b=SHORT, c={"type": "null"}), "required": ["a"]},
    "nothing required": {**closed(a={"type": "boolean"}), "required": []},
    "any of objects": {"anyOf": [closed(kind={"const": "a"}, n={"enum": [1]}), closed(kind={"const": "b"})]},
    "one of": closed(shape={"oneOf": [closed(side={"enum": [1]}), closed(radius={"enum": [2]})]}),
    "all of": closed(n={"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}),
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "top level array": {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2},
    "escapes": closed(**{'a "quoted" \\ key': {"enum": ['"', "\\", "\n", "\u2028", "\u007f"]}}),
}
PATTERNS = (
    r"\d{4}-\d{2}",
    r"(yes|no|<\|im_end\|>)",
    r"[\u4e00-\u9fa5]{2,5}",
    r"\w+@\w+\.com|none",
    "(\U0001f600|\u00e9){3}",
)
QUESTION = {"role": "user", "content": "The weather in Paris?"}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": f"call{index:05}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city, "days": 2})},
        }
        for index, city in enumerate(("Paris", "Rome"))
    ],
}
TURNS = [
    QUESTION,
    CALLS,
    *({"role": "tool", "tool_call_id": f"call{index:05}", "content": "sunny \u2600"} for index in range(2)),
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "And tomorrow?"},
]


ONE_CALL = [QUESTION, {**CALLS, "tool_calls": CALLS["tool_calls"][:1]}, *TURNS[3:]]


class Served(NamedTuple):
    """A family's server."""

    name: str
    url: str
    tokenizer: Any
    """transformers'."""

    @property
    def family(self) -> families.Family:
        return families.FAMILIES[self.name]

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Several turns with calls and results. Some templates reject several calls at once."""
        return ONE_CALL if self.name in ("llama3_1", "gptoss") else TURNS

    def bias(self) -> dict[str, float]:
        """So that reasoning, calls and answers end within a few tokens."""
        return {str(self.tokenizer.convert_tokens_to_ids(text)): 8 for text in self.family.ends}


@pytest.fixture(scope="module", params=families.FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = families.model(request.param)
    with families.serving(folder, tmp_path_factory.mktemp(request.param)) as url:
        yield Served(request.param, url, PreTrainedTokenizerFast.from_pretrained(folder))


async def _answers(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    turns = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def ask(number: int, body: dict[str, Any]) -> dict[str, Any]:
            async with turns:
                answer = await _posted(client, {**body, "stream": number % 2 == 1})
            assert answer.status_code == 200, (answer.status_code, answer.text, body)
            if number % 2 == 1:
                return _joined(answer.text)
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        return list(await asyncio.gather(*(ask(number, body) for number, body in enumerate(bodies))))


async def _posted(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """The answer; a busy machine checks few grammars at once and refuses others, as documented."""
    while (answer := await client.post("/v1/chat/completions", json=body)).status_code == 429:  # noqa: ASYNC110
        await asyncio.sleep(float(answer.headers["retry-after"]))
    return answer


def _joined(text: str) -> dict[str, Any]:
    """The choice that a stream adds up to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]", text[-500:]
    for event in map(json.loads, events):
        assert "error" not in event, event
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            message["content"] += choice["delta"].get("content") or ""
            message["reasoning_content"] += choice["delta"].get("reasoning_content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": finish}


def ask(served: Served, bodies: list[dict[str, Any]], num_seeds: int = SEEDS) -> list[dict[str, Any]]:
    """The choices of each body, `num_seeds` each, in order; every second one is streamed."""
    common = {"model": "", "messages": [QUESTION], "temperature": 1, "max_tokens": MAX_TOKENS}
    every = [{**common, "seed": seed, **body} for body in bodies for seed in range(num_seeds)]
    return asyncio.run(_answers(served.url, every))


def thinking(served: Served) -> list[dict[str, Any]]:
    """Fields of requests, one for each way to reason."""
    if not served.family.thinks:
        return [{}]
    if served.name == "gptoss":
        return [{"chat_template_kwargs": {"reasoning_effort": effort}} for effort in ("low", "high")]
    return [{"chat_template_kwargs": {"enable_thinking": each}} for each in (True, False)]


def finished(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that ended by themselves, which most must."""
    ended = [choice["message"] for choice in choices if choice["finish_reason"] != "length"]
    assert 2 * len(ended) > len(choices), f"{len(choices) - len(ended)} of {len(choices)} did not end"
    return ended


def test_prompts_are_those_of_transformers(served: Served) -> None:
    """With and without system text, and of several turns with calls and results where the template knows tools."""
    system = {"role": "system", "content": "Be brief. \u6771\u4eac"}
    chats: list[dict[str, Any]] = [
        {"messages": [QUESTION]},
        {"messages": [system, QUESTION]},
        {"messages": [system, QUESTION, {"role": "assistant", "content": "Sunny."}, QUESTION]},
    ]
    if served.family.has_tools:
        chats += [{"messages": [QUESTION], "tools": LOOSE}]
        turns = served.turns
        chats += [{"messages": turns, "tools": LOOSE}, {"messages": [system, *turns], "tools": LOOSE}]
    with httpx.Client(base_url=served.url, timeout=60) as client:
        for chat in chats:
            for more in thinking(served):
                answer = client.post("/tokenize", json={**chat, **more})
                assert answer.status_code == 200, (answer.text, chat)
                expected = served.tokenizer.apply_chat_template(
                    [_for_transformers(message) for message in chat["messages"]],
                    tools=chat.get("tools"),
                    add_generation_prompt=True,
                    tokenize=False,
                    **more.get("chat_template_kwargs", {}),
                )
                text = client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
                ids = served.tokenizer(expected, add_special_tokens=False).input_ids
                assert answer.json()["tokens"] == ids, (text, expected)


def _for_transformers(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: arguments are objects."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("kind", FORCED)
def test_every_forced_call_is_valid(served: Served, kind: str) -> None:
    bodies = [
        {"tools": TOOLS, "logit_bias": served.bias(), "messages": messages, **FORCED[kind], **more}
        for more in thinking(served)
        for messages in ([QUESTION], served.turns)
    ]
    for message in finished(ask(served, bodies)):
        calls = message["tool_calls"]
        assert calls and not message["content"], message
        assert len(calls) == 1 or kind == "parallel"
        for call in calls:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            assert name == "weather" or (name == "clock" and kind != "named")
            jsonschema.validate(arguments, PARAMETERS[name])


def test_every_chosen_call_is_valid(served: Served) -> None:
    """`tool_choice` auto and none, in one and several turns."""
    choices: tuple[dict[str, Any], ...] = ({}, {"parallel_tool_calls": False}, {"tool_choice": "none"})
    if served.name == "gptoss":  # whose form is enforced for required calls only
        choices = ({"tools": LOOSE}, {"tool_choice": "none"})
    bodies = [
        {"tools": TOOLS, "logit_bias": served.bias(), "messages": messages, "max_tokens": 60, **choice, **more}
        for choice in choices
        for messages in ([QUESTION], served.turns)
        for more in thinking(served)
    ]
    for body, choice in zip((body for body in bodies for _ in range(2)), ask(served, bodies, 2), strict=True):
        for call in choice["message"].get("tool_calls") or () if choice["finish_reason"] != "length" else ():
            assert body.get("tool_choice") != "none"
            if body["tools"] is LOOSE:
                continue
            jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS[call["function"]["name"]])


def test_every_structured_answer_matches_its_schema(served: Served) -> None:
    assert len(SCHEMAS) == 30
    names = [name for name in SCHEMAS for _ in thinking(served)]
    bodies = [
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            "logit_bias": served.bias(),
            **more,
        }
        for schema in SCHEMAS.values()
        for more in thinking(served)
    ]
    choices = ask(served, bodies, 2)
    assert finished(choices)
    for name, choice in zip((name for name in names for _ in range(2)), choices, strict=True):
        if choice["finish_reason"] == "length":
            continue
        answer = json.loads(choice["message"]["content"])
        if name == "pattern":  # Python's \d and \w have digits and letters of all scripts
            assert re.fullmatch(SCHEMAS[name]["properties"]["code"]["pattern"], answer["code"], re.ASCII)
        if name == "date":
            date.fromisoformat(answer["day"])
        jsonschema.validate(answer, SCHEMAS[name])


def test_every_answer_matches_its_pattern(served: Served) -> None:
    bodies = [
        {"structured_outputs": {"regex": pattern}, "logit_bias": served.bias(), **more}
        for pattern in PATTERNS
        for more in thinking(served)
    ]
    asked = (body["structured_outputs"]["regex"] for body in bodies for _ in range(2))
    choices = ask(served, bodies, 2)
    assert finished(choices)
    for pattern, choice in zip(asked, choices, strict=True):
        if choice["finish_reason"] != "length":
            assert re.fullmatch(pattern, choice["message"]["content"]), (pattern, choice)


def test_answers_with_stop_texts_inside_tokens(served: Served) -> None:
    """The text ends before the stop text, wherever that begins and ends in tokens and characters."""
    wanted = ("ab\u6771\u4eac\U0001f600cd", "<|im_start|>x</s>y<end_of_turn>z<\uff5cUser\uff5c>w")
    bodies = [
        {"structured_outputs": {"choice": [text]}, "stop": [text[at : at + 3]], **more}
        for text in wanted
        for at in range(1, len(text) - 3, 2)
        for more in thinking(served)[-1:]
    ]
    for body, choice in zip(bodies, ask(served, bodies, 1), strict=True):
        [text], [stop] = body["structured_outputs"]["choice"], body["stop"]
        if choice["finish_reason"] == "stop":
            assert choice["message"]["content"] == text[: text.index(stop)], (body, choice)


def test_each_family_has_the_form_that_it_is_tested_in(served: Served) -> None:
    form = format_of(served.tokenizer.chat_template)
    assert (form is not None and form.has_tools) == served.family.has_tools
    assert (form is not None and form.has_reasoning) == served.family.thinks
