"""conversation → call: up to three functions, and a request that one or two of them answer, or none.

The answer is the call or the calls, a sentence about their results, or a short text where no function fits. An
example's prompt is what the adapter's own chat template renders.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from lorikeet.demo.data.tasks.example import Example, Half, composed
from lorikeet.demo.data.tasks.tool_chat import Call, calls_text, prompt
from lorikeet.demo.data.tasks.tool_requests import DESCRIPTIONS, ToolRequest, request, tool
from lorikeet.demo.data.tasks.words import noun, proper_name

NUM_TOOLS = (0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3)
NO_TOOL = "I have no tool for that."

SYSTEM_TEXTS = (
    ("You are", "Act as", "Answer as", "Be"),
    (" a helpful assistant", " a friendly helper", " an assistant with tools", " a short bot", " the assistant"),
    ("", " of {person}", " for {person}", " who is polite", " with few words"),
    (".", ".", ". Use the tools.", ". Call functions when needed."),
)
OTHER_WISHES = (
    ("Write", "Compose", "Draw", "Paint", "Sing", "Invent", "Please write", "Can you make"),
    (" a poem", " a song", " a picture", " a letter", " a story", " a joke", " a title"),
    (" about {person}", " about the {noun}", " with a {noun}", " for {person}", " of a {noun}"),
    (".", "", "?"),
)
OTHER_QUESTIONS = (
    ("Who is", "Where is", "How old is", "How tall is", "Do you know", "Why is", "Where did you find", "What about"),
    (" {person}", " the {noun}", " the {noun} of {person}", " {person}, my friend", " this {noun}"),
    ("?", " now?", "", " today?"),
)
GREETINGS = (
    ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there"),
    (", I am {person}", ", my name is {person}", ", this is {person}", ", {person} here", "! I'm {person}"),
    (".", "!", ""),
)
JOINTS = (" Also: ", " And: ", " Then: ", "\n", " And then: ", " Second: ")


@dataclass(frozen=True)
class _Turn:
    """The messages after the tools, the answer, and the parts."""

    messages: Sequence[Mapping[str, Any]]
    answer: str
    parts: frozenset[str]


def examples(half: Half, choice: random.Random) -> list[Example]:
    """Several conversations with the same tools."""
    functions = choice.sample(list(DESCRIPTIONS), choice.choice(NUM_TOOLS))
    described = [tool(function, half, choice) for function in functions]
    tools = [schema for schema, _ in described]
    parts = set().union(*(used for _, used in described))
    start: list[Mapping[str, Any]] = []
    if choice.random() < 0.25:
        template = choice.choice(_pool(half, SYSTEM_TEXTS))
        content, used = _filled(template, half, choice)
        start, parts = [{"role": "system", "content": content}], parts | used
    turns = _turns(tools, half, choice)
    return [Example(prompt([*start, *turn.messages], tools), turn.answer, turn.parts | parts) for turn in turns]


def _turns(tools: Sequence[Mapping[str, Any]], half: Half, choice: random.Random) -> list[_Turn]:
    """Two requests for calls if there are tools, one after its results, and one without a call, in random order.

    Groups of about one length need little padding.
    """
    turns = [_no_call(tools, half, choice), _after_results(tools, half, choice)]
    if tools:
        turns += [_calls(tools, half, choice), _calls(tools, half, choice)]
    choice.shuffle(turns)
    if choice.random() < 0.05:
        turns[0] = _later(turns[0], _after_results(tools, half, choice))
    return turns


def _later(turn: _Turn, earlier: _Turn) -> _Turn:
    """The turn after another one of the same conversation."""
    messages = [*earlier.messages, {"role": "assistant", "content": earlier.answer}]
    return _Turn([*messages, *turn.messages], turn.answer, earlier.parts | turn.parts)


def _calls(tools: Sequence[Mapping[str, Any]], half: Half, choice: random.Random) -> _Turn:
    requests = _requests([_name(schema) for schema in tools], half, choice)
    text, parts = _text_of(requests, choice)
    return _Turn([{"role": "user", "content": text}], calls_text(_calls_of(requests, tools)), parts)


def _after_results(tools: Sequence[Mapping[str, Any]], half: Half, choice: random.Random) -> _Turn:
    """The tools need not be offered again with their results."""
    requests = _requests([_name(schema) for schema in tools] or list(DESCRIPTIONS), half, choice)
    text, parts = _text_of(requests, choice)
    separators = choice.choice(((", ", ": "), (",", ":")))
    calls = [
        {
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, separators=separators)},
        }
        for name, arguments in _calls_of(requests, tools)
    ]
    contents, sentences = [call.result for call in requests], [call.sentence for call in requests]
    used = parts.union(*(call.result_parts for call in requests))
    if choice.random() < 0.2:
        error, words = _error(half, choice)
        failed = choice.randrange(len(requests))
        contents[failed], sentences[failed] = json.dumps({"error": error}), f"That failed: {error}."
        used = parts.union(words, *(call.result_parts for index, call in enumerate(requests) if index != failed))
    messages: list[Mapping[str, Any]] = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": content} for content in contents),
    ]
    return _Turn(messages, " ".join(sentences), used)


def _no_call(tools: Sequence[Mapping[str, Any]], half: Half, choice: random.Random) -> _Turn:
    offered = [_name(schema) for schema in tools]
    missing = [function for function in DESCRIPTIONS if function not in offered]
    if missing and choice.random() < 0.5:
        wish = request(choice.choice(missing), half, choice)
        return _Turn([{"role": "user", "content": wish.text}], NO_TOOL, wish.parts)
    columns = choice.choice((OTHER_WISHES, OTHER_QUESTIONS, GREETINGS))
    template = choice.choice(_pool(half, columns))
    text, parts = _filled(template, half, choice)
    answer = NO_TOOL
    if columns is GREETINGS:
        (person,) = parts - {template}
        answer = f"Hello {person}, how can I help?"
    return _Turn([{"role": "user", "content": text}], answer, frozenset(parts))


def _requests(functions: Sequence[str], half: Half, choice: random.Random) -> list[ToolRequest]:
    """Mostly one."""
    return [request(choice.choice(functions), half, choice) for _ in range(2 if choice.random() < 0.05 else 1)]


def _text_of(requests: Sequence[ToolRequest], choice: random.Random) -> tuple[str, frozenset[str]]:
    text = requests[0].text
    for following in requests[1:]:
        ended = text if text.endswith((".", "?", "!")) else f"{text}."
        text = ended + choice.choice(JOINTS) + following.text
    return text, frozenset[str]().union(*(call.parts for call in requests))


def _calls_of(requests: Sequence[ToolRequest], tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    """With the arguments in the order of the offered function's parameters."""
    orders = {_name(schema): list(schema["function"]["parameters"]["properties"]) for schema in tools}
    return [
        (call.function, {key: call.arguments[key] for key in orders.get(call.function, call.arguments)})
        for call in requests
    ]


def _name(offered: Mapping[str, Any]) -> str:
    name: str = offered["function"]["name"]
    return name


def _error(half: Half, choice: random.Random) -> tuple[str, set[str]]:
    word, person = noun(half, choice), proper_name(half, choice)
    kind = choice.choice(("unknown {}", "no {} found", "the {} is down", "{} has no data"))
    used = choice.choice((word, person))
    return kind.format(used), {used}


def _filled(template: str, half: Half, choice: random.Random) -> tuple[str, set[str]]:
    """The template with its slots filled, and its parts."""
    values = {"person": proper_name(half, choice), "noun": noun(half, choice)}
    return template.format(**values), {template, *(value for key, value in values.items() if f"{{{key}}}" in template)}


@cache
def _pool(half: Half, columns: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return composed(half, *columns)
