"""Conversations with tool calls: transformers and the router render the same prompt, and what is generated comes back
from the parser.
"""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lorikeet.demo.data.tasks import tool_chat, tools
from lorikeet.demo.data.tasks.example import held_out_examples
from lorikeet.demo.data.tasks.tool_chat import CHAT_TEMPLATE, calls_text, prompt
from lorikeet.demo.training.model import BASE_FOLDER
from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.text.chat_template import ChatTemplate, TemplateOptions

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        },
    },
}
CALLS = [("get_weather", {"city": "São Paulo", "unit": "celsius"}), ("convert", {"amount": 12.5, "to": "a</b>"})]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tool_chat.tokenizer_for_tools(AutoTokenizer.from_pretrained(BASE_FOLDER))


def assistant(calls: list[Any], content: str | None = None) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "call", "type": "function", "function": function} for function in functions],
    }


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call", "content": text}


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user("Hello")],
    [{"role": "system", "content": "Be short."}, user("Hello")],
    [user("a"), assistant(CALLS), result("17"), result('{"b": 1}'), {"role": "assistant", "content": "c"}, user("d")],
    [user("a"), assistant([("f", '{"x":1}')], "Wait."), result("ok")],
    [user("a"), {"role": "system", "content": "b"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}],
]


def test_a_prompt_with_everything() -> None:
    system = {"role": "system", "content": "Be short."}
    calls = [("f", {"x": "ä"}), ("g", '{"y":2}')]
    found = prompt([system, user("a"), assistant(calls), result("1"), result("2")], [WEATHER, {"name": "ping"}])
    assert found == (
        "<|system|>Be short.\n<tools>\n"
        "get_weather(city: string, unit: celsius|fahrenheit)  # The weather in a city.\n"
        "ping()\n"
        "</tools><|end|>"
        "<|user|>a<|end|>"
        '<|assistant|><tool_call>\n{"name": "f", "arguments": {"x": "ä"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"y":2}}\n</tool_call><|end|>'
        "<|user|><tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|end|>"
        "<|assistant|>"
    )


def test_a_schema_that_is_no_simple_type_is_shown_whole() -> None:
    schema = {"type": "array", "items": {"type": "string"}}
    tool = {"function": {"name": "f", "parameters": {"properties": {"words": schema}}}}
    assert f"f(words: {json.dumps(schema)})\n" in prompt([user("a")], [tool])


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("offered", [[], [WEATHER]])
def test_the_router_renders_what_transformers_does(
    messages: list[dict[str, Any]], offered: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast
) -> None:
    options = TemplateOptions({"tools": offered} if offered else {})
    text = ChatTemplate(CHAT_TEMPLATE, {"bos_token": "<|bos|>"}).render(messages, options)
    assert text == "<|bos|>" + prompt(messages, offered)
    chat: Any = tokenizer.apply_chat_template(messages, tools=offered or None, add_generation_prompt=True)
    assert tokenizer(prompt(messages, offered))["input_ids"] == chat["input_ids"]


def test_an_unknown_role_is_an_error() -> None:
    with pytest.raises(ChatTemplateError, match="Roles are system, user, assistant and tool, not critic"):
        ChatTemplate(CHAT_TEMPLATE, {"bos_token": ""}).render([{"role": "critic", "content": "no"}])


@pytest.mark.parametrize("calls", [CALLS[:1], CALLS])
@pytest.mark.parametrize("end", ["", "<|eos|>", "<|end|>"])
def test_calls_come_back_from_the_parser(calls: list[Any], end: str, tokenizer: PreTrainedTokenizerFast) -> None:
    asked = prompt([user("a")], [WEATHER])
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    wanted = {"role": "assistant", "tool_calls": [{"type": "function", "function": each} for each in functions]}
    assert tokenizer.parse_response(calls_text(calls) + end, prefix=asked) == wanted
    parser = tokenizer.get_response_parser(prefix=asked)
    for character in calls_text(calls) + end:
        parser.feed(character)
    assert parser.finalize()[0] == wanted


def test_text_is_content(tokenizer: PreTrainedTokenizerFast) -> None:
    message = tokenizer.parse_response("I have no tool for that.<|eos|>", prefix=prompt([user("a")], []))
    assert message == {"role": "assistant", "content": "I have no tool for that."}


def test_what_was_generated_is_rendered_as_it_was(tokenizer: PreTrainedTokenizerFast) -> None:
    """So the next turn of a conversation has the prompt and output of the one before it as its start."""
    for example in held_out_examples(tools, 40):
        message = tokenizer.parse_response(example.answer, prefix=example.prompt)
        assert prompt([message], []) == f"<|assistant|>{example.answer}<|end|><|assistant|>"
