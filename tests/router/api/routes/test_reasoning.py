"""Answers after reasoning: where they begin, what stop strings apply to, and grammars that follow it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lorikeet.proto.grammars import read_grammar_tokenizer
from tests.router.drawn_answers import DrawnAnswers
from tests.router.serving import Serving, serving

ROUTE = "/v1/chat/completions"
THINKING = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if opens %}<think>\n{% endif %}{% endif %}"
)
"""Of a model without a tool format."""
HARMONY = (
    "{% if tools %}functions{% endif %}{% for message in messages %}<|start|>{{ message.role }}<|message|>"
    "{{ message.content }}<|end|>{% endfor %}<|start|>assistant{# <|channel|> #}"
)
HARMONY_TOKENS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>")
COMMAND = "{% if tools %}<|START_ACTION|>{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
COMMAND_TOKENS = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["<think>", "<|end|>"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
async def server(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("thinking")
    async with serving(folder, chat_template=THINKING, added_tokens=("<think>", "</think>")) as running:
        yield running


def body(**more: Any) -> dict[str, Any]:
    return {"model": "test/model", "messages": [{"role": "user", "content": "?"}], "max_tokens": 500, **more}


async def choice(server: Serving, **more: Any) -> dict[str, Any]:
    answer = await server.client.post(ROUTE, json=body(**more))
    assert answer.status_code == 200, answer.text
    first: dict[str, Any] = answer.json()["choices"][0]
    events = await server.events(ROUTE, body(stream=True, **more))
    deltas = [entry["delta"] for event in events[:-1] for entry in event["choices"]]
    for name in ("content", "reasoning_content"):
        streamed = "".join(delta.get(name) or "" for delta in deltas)
        assert streamed == (first["message"].get(name) or ""), name
    return first


OPEN: dict[str, Any] = {"chat_template_kwargs": {"opens": True}}


@pytest.mark.parametrize(
    ("stop", "text", "reasoning", "content"),
    [
        ("Question:", "Question: 1?\n</think>\n\nAnswer. Question: 2?", "Question: 1?", "Answer. "),
        ("\n\n", "a\n\nb\n</think>\n\nAnswer.\n\nMore", "a\n\nb", "Answer."),
        ("</think>", "a</think>b", "a", "b"),
        ("think", "a</think>b", "a", "b"),
    ],
)
async def test_stop_strings_apply_to_the_answer(
    server: Serving, stop: str, text: str, reasoning: str, content: str
) -> None:
    server.says(text, ends=True)
    answer = await choice(server, stop=[stop], **OPEN)
    assert answer["message"]["reasoning_content"] == reasoning
    assert answer["message"]["content"].strip() == content.strip()
    assert answer["finish_reason"] == "stop" and answer["stop_reason"] == (stop if text.endswith(("?", "e")) else None)


async def test_a_receipt_says_how_long_an_output_is_whose_answer_was_stopped(server: Serving) -> None:
    """A replay of the prompt's tokens has no reasoning, in which stop strings would not count."""
    for text, num_tokens in (("Hm fox.</think>\n\nYes fox no", None), ("Hm fox.</think>\n\nYes.", 500)):
        server.says(text, ends=True)
        answer = (await server.client.post(ROUTE, json=body(stop=["fox"], receipt=True, **OPEN))).json()
        receipt = answer["receipt"]
        assert receipt["parameters"]["stop"] == []
        assert receipt["parameters"]["max_new_tokens"] == (num_tokens or receipt["output"]["num_tokens"])


async def test_a_message_that_is_continued_within_its_reasoning(server: Serving) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>\nFirst"}]
    server.says(", then.</think>\n\nYes.", ends=True)
    answer = await choice(server, messages=messages, continue_final_message=True, stop=["then"])
    assert answer["message"]["reasoning_content"] == ", then." and answer["message"]["content"] == "Yes."


@pytest.mark.parametrize("opens", [True, False])
async def test_lorax_form_after_reasoning(server: Serving, opens: bool) -> None:
    call = json.dumps({"function": {"_name": "f", "a": "<think>"}})
    server.says(("" if opens else "<think>\n") + f"Hm.</think>\n\n{call}", ends=True)
    answer = await choice(server, tools=[TOOL], **(OPEN if opens else {}))
    assert answer["message"]["reasoning_content"] == "Hm." and answer["finish_reason"] == "tool_calls"
    [made] = answer["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": "<think>"}
    grammar = server.shard.submits[-1].grammar.text
    assert "</think>" in grammar and "_name" in grammar


@pytest.mark.parametrize(
    ("template", "tokens", "marker"),
    [(HARMONY, HARMONY_TOKENS, "<|channel|>final<|message|>"), (COMMAND, COMMAND_TOKENS, "<|START_RESPONSE|>")],
    ids=["harmony", "command"],
)
async def test_answers_with_a_mark_of_their_own(
    tmp_path: Any, anyio_backend: str, template: str, tokens: tuple[str, ...], marker: str
) -> None:
    """The grammar of the answer follows the mark, which is a special token or spelled; stop strings know it."""
    async with serving(tmp_path, chat_template=template, special_tokens=tokens) as running:
        tokenizer = read_grammar_tokenizer(tmp_path / "model", running.shard.vocab_size)
        draw = DrawnAnswers(tokenizer, frozenset(map(running.backend.token_to_id, tokens)))
        running.shard.answer = draw
        num_reasoned = num_finished = 0
        for seed in range(12):
            answer = await choice(running, response_format=FORMAT, seed=seed, max_tokens=900, stop=["final", "RESP"])
            if answer["finish_reason"] == "length":
                continue
            num_finished += 1
            num_reasoned += bool(answer["message"].get("reasoning_content"))
            assert json.loads(answer["message"]["content"])["a"] in ("<think>", "<|end|>"), answer
            ids = list(draw(running.shard.submits[-1]).token_ids)
            assert marker in running.backend.decode(ids, skip_special_tokens=False)
        assert num_finished > 6 and num_reasoned > 0


async def test_what_a_tool_that_is_not_strict_leaves_out_is_named(server: Serving) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "(?!x)y"}, "b": {"uniqueItems": True}},
    }
    server.says('{"function": {"_name": "f", "a": "x"}}', ends=True)
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = await server.client.post(ROUTE, json=body(tools=[tool]))
    assert answer.status_code == 200, answer.text
    named = "tools[0].function.parameters.properties.{}"
    assert answer.headers["x-ignored-fields"].replace(" ", "").split(",") == [
        named.format("a.pattern"),
        named.format("b.uniqueItems"),
    ]
    tool["function"]["strict"] = True  # type: ignore[index]
    refused = await server.client.post(ROUTE, json=body(tools=[tool]))
    assert refused.status_code == 400 and "look-around" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "nonsense"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere/x"}}},
        {"type": "object", "anyOf": [{"required": ["a"]}]},
    ],
)
async def test_a_schema_that_is_not_strict_never_fails(server: Serving, parameters: dict[str, Any]) -> None:
    server.says('{"function": {"_name": "f"}}', ends=True)
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = await server.client.post(ROUTE, json=body(tools=[tool], tool_choice="required"))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"].startswith("tools[0].function.parameters")
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}  # type: ignore[dict-item]
    assert (await server.client.post(ROUTE, json=body(tools=[strict]))).status_code == 400
