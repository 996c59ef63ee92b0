"""Outputs of families of models, parsed with transformers' parser: whole, and cut at every place."""

import json
from typing import Any

import pytest

from lorikeet.router.output.formats import ResponseTemplate, format_of
from lorikeet.router.output.parser_worker import OutputParser, ParserWorker

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
            },
        },
    }
    for name in ("weather", "clock")
]
HERMES = "{% if tools %}<tool_call>{% endif %}"
THINKING = HERMES + "<think>"
CODER = "<tool_call> <function=x>"
MISTRAL = "[TOOL_CALLS]"
MISTRAL_NAMED = "[TOOL_CALLS] [ARGS]"
LLAMA = "<|python_tag|>"
HARMONY = "<|channel|> <|message|> to=functions."


def format_named(source: str) -> ResponseTemplate:
    tool_format = format_of(source)
    assert tool_format is not None
    return tool_format


def parse(source: str, text: str, size: int = 0, prompt: str = "") -> list[list[str]]:
    """The pieces of `text`, fed in parts of `size`, with neighbours of one kind joined."""
    form = format_named(source)
    parser = OutputParser(form.template, form.prefix(prompt), TOOLS)
    parts = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    joined: list[list[str]] = []
    for piece in pieces:
        if joined and joined[-1][0] == piece[0] != "call":
            joined[-1][1] += piece[1]
        else:
            joined.append(list(piece))
    return joined


def call(name: str, **arguments: Any) -> list[str]:
    return ["call", name, json.dumps(arguments, ensure_ascii=False)]


PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
CASES: list[tuple[str, str, str, list[list[str]]]] = [
    ("text", HERMES, "\n Hello <b>you</b> \n", [["content", "\n Hello <b>you</b> \n"]]),
    ("empty", HERMES, "", []),
    ("call", HERMES, f"<tool_call>\n{PARIS}\n</tool_call>", [call("weather", city="Paris")]),
    ("without its end", HERMES, f"<tool_call>{PARIS}", [call("weather", city="Paris")]),
    (
        "text and two calls",
        HERMES,
        f"Let me look.\n\n<tool_call>{PARIS}</tool_call>\n<tool_call>\n"
        '{"name": "clock", "arguments": {}}</tool_call>\n',
        [["content", "Let me look."], call("weather", city="Paris"), call("clock")],
    ),
    ("text after a call", HERMES, f"<tool_call>{PARIS}</tool_call>\n Done.\n", [call("weather", city="Paris"),
                                                                               ["content", "Done."]]),
    ("text around a call", HERMES, f"I look. \n<tool_call>{PARIS}</tool_call>\n\nDone.",
     [["content", "I look."], call("weather", city="Paris"), ["content", " \nDone."]]),
    ("no JSON", HERMES, "So: <tool_call>\n{x}</tool_call> !", [["content", "So: <tool_call>\n{x}</tool_call> !"]]),
    ("unknown function", HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
     [["content", '<tool_call>{"name": "other", "arguments": {}}</tool_call>']]),
    ("arguments missing", HERMES, '<tool_call>{"name": "clock"}</tool_call>',
     [["content", '<tool_call>{"name": "clock"}</tool_call>']]),
    ("arguments no object", HERMES, '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
     [["content", '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>']]),
    ("broken, then right", HERMES, f"<tool_call>x</tool_call>\n<tool_call>{PARIS}</tool_call>",
     [["content", "<tool_call>x</tool_call>"], call("weather", city="Paris")]),
    ("cut off", HERMES, 'I \n<tool_call>\n{"name": "wea', [["content", 'I \n<tool_call>\n{"name": "wea']]),
    ("not a number", HERMES, '<tool_call>{"name": "clock", "arguments": {"days": NaN}}</tool_call>',
     [["content", '<tool_call>{"name": "clock", "arguments": {"days": NaN}}</tool_call>']]),
    ("letters", HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Zürich \\u00e9"}}</tool_call>',
     [call("weather", city="Zürich é")]),
    ("the mark of a call within it", HERMES,
     '<tool_call>{"name": "weather", "arguments": {"city": "a</tool_call>\\"b"}}</tool_call>\n<tool_call>' + PARIS
     + "</tool_call>", [call("weather", city='a</tool_call>"b'), call("weather", city="Paris")]),
    ("a string without an end", HERMES, '<tool_call>\n{"name": "weather}\n</tool_call>\n<tool_call>' + PARIS
     + "</tool_call>", [["content", '<tool_call>\n{"name": "weather}\n</tool_call>'], call("weather", city="Paris")]),
    ("reasoning", THINKING, "<think>\nHm.\n</think>\n\nYes.", [["reasoning", "Hm."], ["content", "Yes."]]),
    ("empty reasoning", THINKING, "<think>\n\n</think>\n\nYes.", [["content", "Yes."]]),
    ("reasoning and a call", THINKING, f"<think>Hm.</think>\n<tool_call>{PARIS}</tool_call>",
     [["reasoning", "Hm."], call("weather", city="Paris")]),
    ("reasoning cut off", THINKING, "<think>\nHm. ", [["reasoning", "Hm."]]),
    (
        "tags",
        CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=tags>\n["a", 1]\n</parameter>\n</function>\n</tool_call>',
        [call("weather", city="New\nYork", days=3, tags=["a", 1])],
    ),
    ("tags, none", CODER, "Well.\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
     [["content", "Well."], call("clock")]),
    ("list", MISTRAL, f"[TOOL_CALLS] [{PARIS}, {PARIS}]", [call("weather", city="Paris")] * 2),
    ("list, broken", MISTRAL, "[TOOL_CALLS] [{}]", [["content", "[TOOL_CALLS] [{}]"]]),
    ("named", MISTRAL_NAMED, '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[CALL_ID]abc[ARGS]{}',
     [call("weather", city="Paris"), call("clock")]),
    ("object", LLAMA, '{"name": "weather", "parameters": {"city": "Paris"}}', [call("weather", city="Paris")]),
    ("object after its token", LLAMA, '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}',
     [call("weather", city="Paris")]),
    ("JSON that is no call", LLAMA, '{"city": "Paris"}', [["content", '{"city": "Paris"}']]),
    ("code", LLAMA, "<|python_tag|>print(1)", [["content", "<|python_tag|>print(1)"]]),
    (
        "channels",
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Paris"}',
        [["reasoning", "Hm."], call("weather", city="Paris")],
    ),
    (
        "channels of text",
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes, two.",
        [["reasoning", "Hm."], ["content", "Yes, two."]],
    ),
    ("channels, recipient first", HARMONY, ' to=functions.clock<|channel|>commentary json<|message|>{}',
     [call("clock")]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "text", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_an_output_is_parsed_alike_in_any_parts(source: str, text: str, expected: list[list[str]]) -> None:
    for size in (0, 1, 2, 3, 7):
        assert parse(source, text, size) == expected, size


def test_reasoning_that_the_prompt_opened_goes_on() -> None:
    prompt = "<|im_start|>assistant\n<think>\n"
    assert parse(THINKING, "Hm.\n</think>\n\nYes.", 3, prompt) == [["reasoning", "Hm."], ["content", "Yes."]]


@pytest.mark.parametrize("tail", ["", "Paris"])
def test_no_text_is_lost_where_parsing_stops(tail: str) -> None:
    """What the pieces stand for and what is unsettled is the whole text."""
    text = f"I look. \n<tool_call>{PARIS}</tool_call>\n<tool_call>" + tail
    form = format_named(HERMES)
    parser = OutputParser(form.template, "", TOOLS)
    parser.feed(text)
    assert text[parser.num_settled :].lstrip() == "<tool_call>" + tail


def test_a_pattern_that_takes_too_long_fails_its_own_output_only() -> None:
    worker = ParserWorker()
    slow = {"start_anchor": "x", "fields": {"tool_calls": {"open_pattern": "(?:a|a)+$", "close": "x"}, "content": {}}}
    good = format_named(HERMES).template

    def job(number: int, template: dict[str, Any], text: str) -> dict[str, Any]:
        opening = {"template": template, "prefix": "", "tools": TOOLS}
        return {"id": number, "open": opening, "texts": [text], "last": False}

    import signal

    from lorikeet.router.output import parser_worker

    before = signal.signal(signal.SIGPROF, parser_worker._on_timeout)
    try:
        first, second = worker.answer({"drop": [], "jobs": [job(1, slow, "a" * 40 + "b"), job(2, good, "Yes")]})
    finally:
        signal.signal(signal.SIGPROF, before)
    assert "takes more than" in first["error"]
    assert second["pieces"] == [["content", "Yes"]]


def test_a_template_that_is_not_valid_is_an_error_with_its_reason() -> None:
    opening = {"template": {"fields": {"content": {"open": 3}}}, "prefix": "", "tools": []}
    [answer] = ParserWorker().answer({"drop": [], "jobs": [{"id": 1, "open": opening, "texts": [], "last": False}]})
    assert "must be a string or list of strings" in answer["error"]
