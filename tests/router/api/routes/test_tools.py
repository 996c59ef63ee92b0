"""Tools of /v1/chat/completions, with a scripted shard: prompts, messages, streams and errors."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.serving import Serving, serving

ROUTE = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}[tools]{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if message.role == 'tool' %}({{ message.name }}){% endif %}"
    "{% endfor %}[assistant]"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
USER = [{"role": "user", "content": "Paris?"}]


@pytest.fixture(scope="module")
async def server(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    """Server of a model with a tool format."""
    async with serving(tmp_path_factory.mktemp("tools"), chat_template=TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
async def plain(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    """Server of a model without a tool format."""
    async with serving(tmp_path_factory.mktemp("plain")) as running:
        yield running


def body(**more: Any) -> dict[str, Any]:
    return {"model": "test/model", "messages": USER, "tools": [TOOL], "max_tokens": 200, **more}


def prompt(server: Serving, at: int = -1) -> str:
    return server.backend.decode(list(server.shard.submits[at].prompt_ids), skip_special_tokens=False)


async def choice(server: Serving, request: dict[str, Any]) -> dict[str, Any]:
    answer = await server.client.post(ROUTE, json=request)
    assert answer.status_code == 200, answer.text
    first: dict[str, Any] = answer.json()["choices"][0]
    return first


async def test_a_call_is_a_message_with_tool_calls(server: Serving) -> None:
    server.says(f"Let me look.\n{CALL}", ends=True)
    answer = await choice(server, body())
    assert prompt(server) == "[tools]weather[user]Paris?[assistant]"
    [call] = answer["message"].pop("tool_calls")
    assert len(call["id"]) == 9 and call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert answer["message"] == {"role": "assistant", "content": "Let me look.", "refusal": None}
    assert answer["finish_reason"] == "tool_calls"


async def test_a_stream_has_the_name_first_and_then_the_arguments(server: Serving) -> None:
    server.says(f"Let me look.\n{CALL}\n{CALL}", ends=True, per_step=3)
    *chunks, done = await server.events(ROUTE, body(stream=True))
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""} and calls[0]["id"] != calls[2]["id"]
    assert calls[1] == {"index": 0, "function": {"arguments": '{"city": "Paris"}'}}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "tool_calls"]


async def test_a_call_that_is_not_well_formed_is_content(server: Serving) -> None:
    server.says("<tool_call>{]</tool_call>", ends=True)
    answer = await choice(server, body())
    assert answer["message"]["content"] == "<tool_call>{]</tool_call>"
    assert "tool_calls" not in answer["message"] and answer["finish_reason"] == "stop"


async def test_text_without_a_call_is_left_as_it_is(server: Serving) -> None:
    server.says(" \n It rains. \n", ends=True)
    assert (await choice(server, body()))["message"]["content"] == " \n It rains. \n"


async def test_several_choices_are_parsed_each(server: Serving) -> None:
    server.says(CALL, "No.", ends=True)
    answer = await server.client.post(ROUTE, json=body(n=2))
    messages = [entry["message"] for entry in answer.json()["choices"]]
    assert sorted("tool_calls" in message for message in messages) == [False, True]


async def test_a_conversation_goes_on_after_a_call(server: Serving) -> None:
    function = {"name": "weather", "arguments": '{"city": "Zürich"}'}
    turns = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "a1", "content": "rain"},
    ]
    server.says("It rains.", ends=True)
    await choice(server, body(messages=turns))
    expected = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>[tool]rain(weather)'
    assert prompt(server) == f"[tools]weather[user]Paris?[assistant]{expected}[assistant]"


async def test_no_tools_with_the_choice_none(server: Serving) -> None:
    server.says(CALL, ends=True)
    answer = await choice(server, body(tool_choice="none"))
    assert prompt(server) == "[user]Paris?[assistant]"
    assert answer["message"]["content"] == CALL and answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "tool_choice",
    ["required", "weather", {"type": "function", "function": {"name": "weather"}}, {"function": {"name": "weather"}}],
)
async def test_a_required_call_has_a_grammar(server: Serving, tool_choice: Any) -> None:
    server.says(CALL, ends=True)
    await choice(server, body(tool_choice=tool_choice))
    assert "tool_call" in server.shard.submits[-1].grammar.text


async def test_auto_has_a_grammar_for_strict_functions_only(server: Serving) -> None:
    server.says(CALL, ends=True)
    await choice(server, body())
    assert not server.shard.submits[-1].grammar.text
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    await choice(server, body(tools=[strict]))
    assert "tool_call" in server.shard.submits[-1].grammar.text
    assert "strict" not in prompt(server)


async def test_lorax_form_for_a_model_without_a_tool_format(plain: Serving) -> None:
    plain.says('{"function": {"_name": "weather", "city": "Paris"}}', ends=True)
    answer = await choice(plain, body())
    assert prompt(plain).startswith('[user]Paris?\n---\n[{"type":"function","function":{"name":"weather"')
    assert "no_tool" in prompt(plain) and prompt(plain).endswith("Do not use variables.\n[assistant]")
    [call] = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert answer["finish_reason"] == "tool_calls"
    plain.says('{"function": {"_name": "no_tool", "content": "Hi"}}', ends=True)
    answer = await choice(plain, body())
    assert answer["message"]["content"] == "Hi" and answer["finish_reason"] == "stop"


async def test_tool_prompt_selects_lorax_form(server: Serving) -> None:
    server.says('{"function": {"_name": "weather", "city": "Paris"}}', ends=True)
    answer = await choice(server, body(tool_prompt="Use JSON."))
    assert prompt(server) == "[tools]weather[user]Paris?\n---\nUse JSON.[assistant]"
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_reasoning_is_a_field_of_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path, chat_template=TEMPLATE + "<think>\n") as server:
        server.says(f"Hm.\n</think>\n\nYes.\n{CALL}", ends=True, per_step=2)
        message = (await choice(server, body()))["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        *chunks, _ = await server.events(ROUTE, body(stream=True))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        without = {name: value for name, value in body().items() if name != "tools"}
        message = (await choice(server, without))["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", f"Yes.\n{CALL}")


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tool_choice": "other"}, "tool_choice", "Tool with name other not found"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "must be function"),
        ({"tools": [TOOL, TOOL]}, "tools", "two functions"),
        ({"tool_prompt": "x", "response_format": {"type": "json_object"}}, "tools", "mutually exclusive"),
    ],
)
async def test_an_error_of_tools_names_its_field(server: Serving, more: dict[str, Any], param: str, words: str) -> None:
    answer = await server.client.post(ROUTE, json=body(**more))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "tool_error" and error["param"] == param
    assert words in error["message"]


async def test_a_strict_schema_that_cannot_be_enforced_is_an_error_with_the_keyword(server: Serving) -> None:
    parameters = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    strict = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    answer = await server.client.post(ROUTE, json=body(tools=[strict], tool_choice="required"))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "tool_error"
    assert "uniqueItems" in answer.json()["error"]["message"]


def turns_with(**function: Any) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "weather", **function}}
    return [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


async def test_arguments_of_earlier_calls_are_a_text(server: Serving) -> None:
    error = (await server.client.post(ROUTE, json=body(messages=turns_with(arguments=[1])))).json()["error"]
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        *((empty, "{}") for empty in ("", " \n", "null", None, "{}")),
        ('{"city": "Rome"', json.dumps('{"city": "Rome"')),
        ("[1]", '"[1]"'),
        ('{"a": NaN}', json.dumps('{"a": NaN}')),
        ('{"a": "\\ud800"}', json.dumps('{"a": "\\ud800"}')),
        ('{"id": 123456789012345678901234}', '{"id": 123456789012345678901234}'),
    ],
)
async def test_arguments_as_a_model_may_have_written_them(server: Serving, arguments: Any, shown: str) -> None:
    """No arguments are an empty object; what is no JSON object is the text that it was."""
    server.says("Yes.", ends=True)
    await choice(server, body(messages=turns_with(arguments=arguments)))
    assert prompt(server).endswith(f'<tool_call>{{"name": "weather", "arguments": {shown}}}</tool_call>[assistant]')


async def test_arguments_that_are_no_object_in_lorax_form(plain: Serving) -> None:
    plain.says('{"function": {"_name": "no_tool", "content": "Yes."}}', ends=True)
    await choice(plain, body(messages=[*turns_with(arguments="Rome"), *USER]))
    assert '{"function": {"_name": "weather", "arguments": "Rome"}}' in prompt(plain)


@pytest.mark.parametrize("choice_of_tools", ["auto", "none"])
async def test_results_are_one_turn_for_a_template_that_does_not_know_tools(
    plain: Serving, choice_of_tools: str
) -> None:
    """Also where no function may be called: some of these templates reject two turns of the user in a row."""
    call = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "a2"}]},
        {"role": "tool", "tool_call_id": "a1", "content": "rain"},
        {"role": "tool", "tool_call_id": "a2", "content": "sun"},
        {"role": "user", "content": "Sure?"},
    ]
    plain.says("x", ends=True)
    await choice(plain, body(messages=turns, tool_choice=choice_of_tools))
    calls = '{"function": {"_name": "weather", "city": "Rome"}}'
    assert f"[user]Paris?[assistant]{calls}\n{calls}[user]rain\nsun\nSure?" in prompt(plain)
