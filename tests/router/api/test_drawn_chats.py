"""Chats drawn at random, with any schemas, tools and histories: each gets an answer or an error of the caller's.

Never 500 or 504, and no traceback in the log.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.scripted_shard import Script
from tests.router.serving import MODEL_ID
from tests.router.threaded_serving import ThreadedServing

SAMPLE, ALL = 120, 10_000
"""Chats in `make test`, and in `make test-long`."""
PERMITTED = {200, 400, 404, 413, 422, 429}
TEMPLATES = {
    "objects": (
        "{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.parameters | tojson }}\n{% endfor %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
        "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
    "text": (
        "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% endif %}"
        "{% for call in message['tool_calls'] or [] %}"
        "{{ '```json\n' + call['function']['arguments'] + '\n```' }}{% endfor %}<|im_end|>\n{% endfor %}"
    ),
}
"""Chat templates that want arguments of calls as objects, and as text."""

WORDS = st.sampled_from(
    ["", "a", "size", "Paris", "é", "日本", "\0", "\ud800", "</tool_call>", "<|im_end|>", "x" * 300]
)
NUMBERS = (
    st.integers(-3, 12)
    | st.sampled_from([2**53 + 1, 2**63, -(2**64), 10**30, 0.1, -0.0, 1e300, 2.0])
    | st.floats(allow_nan=False, allow_infinity=False)
)
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
NAMES = st.sampled_from(["a", "b", "get_weather", "size", "List[int]", "$defs", "ä b"])
PATTERNS = st.sampled_from(["^a+$", "(?=a)b", "(a", "[a-z]{1,4}", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"\d+", "(a*)*b"])
FORMATS = st.sampled_from(["date-time", "uuid", "password", "binary", "byte", "path", "regex", "email", "no-format"])


def schema_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas whose parts are `inner`: most keywords have values of the right type."""
    types = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "text"])
    keywords = {
        "type": types | st.lists(types, max_size=3) | SCALARS,
        "properties": st.dictionaries(NAMES, inner, max_size=3) | JSON,
        "required": st.lists(NAMES, max_size=2) | JSON,
        "additionalProperties": st.booleans() | inner,
        "items": inner,
        "prefixItems": st.lists(inner, max_size=2),
        "minItems": NUMBERS,
        "maxItems": NUMBERS,
        "uniqueItems": st.booleans(),
        "enum": st.lists(SCALARS, max_size=3) | JSON,
        "const": JSON,
        "minimum": NUMBERS,
        "maximum": NUMBERS,
        "exclusiveMinimum": NUMBERS | st.booleans(),
        "multipleOf": NUMBERS,
        "minLength": NUMBERS,
        "maxLength": NUMBERS,
        "pattern": PATTERNS,
        "format": FORMATS,
        "anyOf": st.lists(inner, max_size=3),
        "oneOf": st.lists(inner, max_size=3),
        "allOf": st.lists(inner, max_size=2),
        "not": inner,
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/definitions/List[int]", "#/nowhere", "http://127.0.0.1:1/a"]),
        "$defs": st.dictionaries(NAMES, inner, max_size=2),
        "definitions": st.dictionaries(NAMES, inner, max_size=2),
        "description": WORDS,
        "default": JSON,
        "x-guidance": JSON,
    }
    return st.dictionaries(st.sampled_from(sorted(keywords)), st.none(), max_size=4).flatmap(
        lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen})
    )


SCHEMAS = st.recursive(
    st.booleans() | SCALARS | st.just({"type": "string"}) | st.just({"type": "object", "properties": {}}),
    schema_of,
    max_leaves=8,
)
ARGUMENTS = JSON.map(json.dumps) | JSON | st.sampled_from(["", " ", "null", "{", '{"a": ', "text", '{"a": NaN}', "[1]"])


def maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with any of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


FUNCTIONS = maybe(name=NAMES | SCALARS, description=WORDS, parameters=SCHEMAS, strict=st.booleans() | SCALARS)
TOOLS = st.lists(maybe(type=st.just("function") | SCALARS, function=FUNCTIONS | JSON) | JSON, max_size=3) | JSON
CALLS = maybe(
    id=WORDS | SCALARS,
    type=st.just("function") | SCALARS,
    function=maybe(name=NAMES | SCALARS, arguments=ARGUMENTS) | JSON,
    index=SCALARS,
)
PARTS = maybe(
    type=st.sampled_from(["text", "input_text", "image_url", "tool_use", "tool_result", "thinking"]) | SCALARS,
    text=WORDS | JSON,
    id=WORDS,
    tool_use_id=WORDS,
    name=NAMES,
    input=JSON,
    content=JSON,
)
MESSAGES = maybe(
    role=st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "critic"]) | SCALARS,
    content=WORDS | st.lists(PARTS | JSON, max_size=3) | JSON,
    tool_calls=st.lists(CALLS | JSON, max_size=3) | JSON,
    tool_call_id=WORDS | SCALARS,
    name=WORDS | SCALARS,
    reasoning_content=WORDS | JSON,
)
ITEMS = MESSAGES | maybe(
    type=st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | SCALARS,
    role=st.sampled_from(["user", "assistant"]),
    content=WORDS | st.lists(PARTS, max_size=2),
    call_id=WORDS | SCALARS,
    name=NAMES | SCALARS,
    arguments=ARGUMENTS,
    output=WORDS | JSON,
    summary=JSON,
)
USER = st.just({"role": "user", "content": "Hi"})
CHOICES = st.sampled_from(["auto", "none", "required", "any"]) | st.just({"type": "function", "name": "a"}) | JSON
FORMAT = (
    st.builds(lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, SCHEMAS)
    | st.fixed_dictionaries(
        {
            "type": st.just("json_schema"),
            "json_schema": maybe(name=NAMES, schema=SCHEMAS, strict=st.booleans()) | JSON,
            "schema": SCHEMAS,
            "name": NAMES,
        }
    )
    | maybe(type=st.sampled_from(["json_object", "text", "regex", "structural_tag"]) | SCALARS)
    | JSON
)
GRAMMARS = maybe(json=SCHEMAS, regex=PATTERNS, choice=st.lists(WORDS, max_size=3)) | JSON


def turns(name: str, arguments: Any, result: str) -> list[dict[str, Any]]:
    """A call and its result, as agents send them."""
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]


TURNS = st.builds(turns, NAMES, ARGUMENTS.filter(lambda value: isinstance(value, str)), WORDS) | st.builds(
    lambda text: [{"role": "user", "content": text}, {"role": "assistant", "content": text}], WORDS
)


def history_of(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Turns, most often without any other entry, and rarely any JSON."""
    sound = st.lists(TURNS, max_size=2).map(lambda drawn: [entry for turn in drawn for entry in turn])
    odd = st.lists(entries | USER, max_size=3)
    last = {"role": "user", "content": "Hi"}
    return st.one_of(
        sound.map(lambda drawn: [*drawn, last]),
        sound.map(lambda drawn: [*drawn, last]),
        st.builds(lambda first, second: [*first, *second, last], sound, odd),
        JSON,
    )


SOUND_TOOLS = st.lists(
    st.builds(
        lambda name, schema, strict: {
            "type": "function",
            "function": {"name": name, "parameters": schema, **({"strict": True} if strict else {})},
        },
        st.sampled_from(["a", "b", "get_weather"]),
        SCHEMAS,
        st.booleans(),
    ),
    min_size=1,
    max_size=2,
)
COMMON = {
    "stream": st.booleans(),
    "tools": SOUND_TOOLS | SOUND_TOOLS | TOOLS,
    "tool_choice": CHOICES,
    "parallel_tool_calls": st.booleans(),
}
BODIES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "/v1/chat/completions": st.fixed_dictionaries(
        {"messages": history_of(MESSAGES)},
        optional={
            **COMMON,
            "response_format": FORMAT,
            "structured_outputs": GRAMMARS,
            "stop": st.lists(WORDS, max_size=2) | JSON,
            "chat_template_kwargs": JSON,
            "logprobs": st.booleans(),
        },
    ),
    "/v1/responses": st.fixed_dictionaries(
        {"input": history_of(ITEMS) | WORDS},
        optional={
            **COMMON,
            "tools": st.lists(FUNCTIONS.map(lambda function: {"type": "function", **function}) | JSON, max_size=2),
            "text": maybe(format=FORMAT) | JSON,
            "instructions": WORDS | JSON,
        },
    ),
    "/v1/messages": st.fixed_dictionaries(
        {"messages": history_of(MESSAGES), "max_tokens": st.just(8)},
        optional={
            "stream": st.booleans(),
            "tools": st.lists(maybe(name=NAMES, description=WORDS, input_schema=SCHEMAS) | JSON, max_size=2),
            "tool_choice": maybe(type=st.sampled_from(["auto", "any", "tool", "none"]), name=NAMES) | JSON,
            "system": WORDS | st.lists(PARTS, max_size=2) | JSON,
        },
    ),
}
OUTPUTS = (
    "Hello", '<tool_call>\n{"name": "a", "arguments": {"size": 9007199254740993}}\n</tool_call>', '{"a": 1}',
    "<tool_call>\n{", '<tool_call>{"name": 5}</tool_call>', "<think>\n", "</think>",
    '[{"name": "a", "parameters": {}}]',
)  # fmt: skip


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServing]:
    template = TEMPLATES[request.param]
    tokens = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
    with ThreadedServing(tmp_path_factory.mktemp("chats"), chat_template=template, special_tokens=tokens) as started:
        yield started


def sent(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text. Half of a pair of surrogates is escaped, as clients do that send them."""
    content = json.dumps({"model": MODEL_ID, "max_tokens": 8, **body})
    response = httpx.post(f"{url}{path}", content=content, headers={"content-type": "application/json"}, timeout=60)
    return response.status_code, response.text


def check(server: ThreadedServing, num_chats: int, capsys: pytest.CaptureFixture[str]) -> Counter[int]:
    """Draws chats; returns the number of answers by status."""
    answers: Counter[int] = Counter()

    @settings(
        derandomize=True, deadline=None, database=None, max_examples=num_chats, suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def send(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(BODIES)))
        body = data.draw(BODIES[path])
        output = server.serving.ids(data.draw(st.sampled_from(OUTPUTS)))
        server.serving.shard.answer = lambda submit: Script(output[: submit.max_new_tokens])
        status, text = sent(server.url, path, body)
        answers[status] += 1
        assert status in PERMITTED, f"{status}: {text[:500]}"
        for code in ('"code":500', '"code":504', '"internal_error"', "internal server error"):
            assert code not in text.lower(), text[-500:]

    send()
    logged = capsys.readouterr()
    assert "Traceback" not in logged.out + logged.err
    return answers


def test_a_sample_of_drawn_chats(server: ThreadedServing, capsys: pytest.CaptureFixture[str]) -> None:
    answers = check(server, SAMPLE // len(TEMPLATES), capsys)
    assert answers[200] > 0 and answers[400] > 0


@pytest.mark.long
def test_all_drawn_chats(server: ThreadedServing, capsys: pytest.CaptureFixture[str]) -> None:
    answers = check(server, ALL // len(TEMPLATES), capsys)
    assert sum(answers.values()) >= ALL // len(TEMPLATES)
