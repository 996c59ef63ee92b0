"""Grammars of tool calls: outputs drawn under their masks are parsed back as calls whose arguments match the schema."""

import json
import random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lorikeet.proto.grammars import GRAMMAR_LIMITS, grammar_tokenizer
from lorikeet.router.errors import ToolError
from lorikeet.router.output.formats import (
    KEY,
    NAME,
    VALUE,
    ResponseTemplate,
    Space,
    format_of,
    parts_of,
    reasoning_of,
    syntax_of,
)
from lorikeet.router.output.output_grammar import EnforcedParameters, SpecialTokens, ToolGrammar
from lorikeet.router.output.parser_worker import OutputParser
from lorikeet.router.schemas.chat import ToolFields, ToolGroup
from lorikeet.router.schemas.grammar import GrammarFields
from tests.router.output.test_parser_worker import CODER, HARMONY, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, THINKING

SPECIAL = (
    "</s>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<|eom_id|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|start|>",
    "<|constrain|>",
    "<|return|>",
)
ENDS = ("</s>", "<|eom_id|>", "<|call|>", "<|return|>")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FAMILIES = {
    "hermes": HERMES,
    "thinking": THINKING,
    "coder": CODER,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral named": MISTRAL_NAMED,
    "harmony": HARMONY,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, and the families' special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return backend


class Outputs:
    """Draws outputs of a grammar."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.ids = {text: backend.token_to_id(text) for text in SPECIAL}
        self.tokens = SpecialTokens(self.ids, frozenset(self.ids[text] for text in ENDS))
        self.matching = grammar_tokenizer(backend.to_str(), None, [self.ids["</s>"]])

    def matcher(self, grammar: GrammarFields) -> LLMatcher:
        text = llguidance.grammar_from("grammar", grammar.value)
        assert not LLMatcher.validate_grammar(text, limits=GRAMMAR_LIMITS)
        matcher = LLMatcher(self.matching, text, limits=GRAMMAR_LIMITS, log_level=0)
        assert not matcher.get_error()
        return matcher

    def accepts(self, grammar: GrammarFields, text: str) -> bool:
        matcher, ids = self.matcher(grammar), self.backend.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def draw(self, grammar: GrammarFields, generator: random.Random, most: int = 300) -> str:
        """A random output; ends as soon as it may, and is "" where it does not end."""
        matcher = self.matcher(grammar)
        mask = allocate_token_bitmask(1, self.matching.vocab_size)
        drawn: list[int] = []
        while not matcher.is_accepting() and not matcher.is_stopped() and len(drawn) < most:
            fill_next_token_bitmask(matcher, mask, 0)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            drawn.append(int(generator.choice(allowed)))
            matcher.consume_token(drawn[-1])
        assert not matcher.get_error(), matcher.get_error()[:200]
        return "" if len(drawn) == most else self.backend.decode(drawn, skip_special_tokens=False)


@pytest.fixture(scope="module")
def outputs(tokenizer: Tokenizer) -> Outputs:
    return Outputs(tokenizer)


def tool(name: str, *, strict: bool = True, parameters: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def wanted(*tools: dict[str, Any], **more: Any) -> ToolFields:
    return ToolGroup.read({"tools": list(tools), **more}).tool_fields()


def form_of(family: str) -> ResponseTemplate:
    tool_format = format_of(FAMILIES[family])
    assert tool_format is not None
    return tool_format


def grammar_of(outputs: Outputs, family: str, tools: ToolFields, content: GrammarFields | None = None) -> GrammarFields:
    form = form_of(family)
    syntax = syntax_of(form)
    assert syntax is not None, family
    reasoning = reasoning_of(form, "", None)
    builder = ToolGrammar(form, syntax, tools, outputs.tokens, reasoning, EnforcedParameters(tools))
    return builder.required() if tools.is_required else builder.optional(content)


def parsed(family: str, text: str, tools: ToolFields) -> list[list[str]]:
    parser = OutputParser(form_of(family).template, "", list(tools.tools))
    return parser.feed(text) + parser.finish()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_is_a_call_whose_arguments_match(outputs: Outputs, family: str) -> None:
    tools = wanted(tool("weather"), tool("clock"), tool_choice="required")
    grammar = grammar_of(outputs, family, tools)
    generator = random.Random(family)
    texts = [text for _ in range(6) if (text := outputs.draw(grammar, generator))]
    assert len(texts) > 1
    for text in texts:
        calls = [piece for piece in parsed(family, text, tools) if piece[0] == "call"]
        assert calls, text
        for _, name, arguments in calls:
            assert name in ("weather", "clock")
            jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_call_is_of_that_function(outputs: Outputs, family: str) -> None:
    tools = wanted(tool("weather"), tool("clock"), tool_choice="clock")
    text = outputs.draw(grammar_of(outputs, family, tools), random.Random(3))
    assert {piece[1] for piece in parsed(family, text, tools) if piece[0] == "call"} == {"clock"}


GOOD, BAD = '{"city": "Rome", "days": 3}', '{"city": "Oslo", "days": 3}'


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("family", "good", "bad"),
    [
        ("hermes", hermes(GOOD), hermes(BAD)),
        ("thinking", f"<think>\nHm.\n</think>\n\n{hermes(GOOD)}", f"<think>\nHm.</think>\n\n{hermes(BAD)}"),
        (
            "coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        ("llama", f'{{"name": "weather", "parameters": {GOOD}}}', f'{{"name": "weather", "parameters": {BAD}}}'),
        (
            "mistral",
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {GOOD}}}]',
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {BAD}}}]',
        ),
        ("mistral named", f"[TOOL_CALLS]weather[ARGS]{GOOD}", f"[TOOL_CALLS]weather[ARGS]{BAD}"),
    ],
)
def test_a_strict_call_or_any_text(outputs: Outputs, family: str, good: str, bad: str) -> None:
    tools = wanted(tool("weather"), tool("clock"))
    grammar = grammar_of(outputs, family, tools)
    assert outputs.accepts(grammar, good)
    assert not outputs.accepts(grammar, bad)
    for text in ("", "Hello", "two\n\nlines <b> [1]"):
        assert outputs.accepts(grammar, text), text
    if family in ("hermes", "coder", "mistral"):
        assert outputs.accepts(grammar, f"Let me look.\n{good}")


def test_one_call_alone_without_parallel_calls(outputs: Outputs) -> None:
    call = hermes(GOOD)
    several, one = wanted(tool("weather")), wanted(tool("weather"), parallel_tool_calls=False)
    assert outputs.accepts(grammar_of(outputs, "hermes", several), f"{call}\n{call}")
    assert not outputs.accepts(grammar_of(outputs, "hermes", one), f"{call}\n{call}")
    assert outputs.accepts(grammar_of(outputs, "hermes", one), call)
    required = wanted(tool("weather"), tool_choice="required", parallel_tool_calls=False)
    assert outputs.accepts(grammar_of(outputs, "hermes", required), call)
    assert not outputs.accepts(grammar_of(outputs, "hermes", required), f"{call}\n{call}")
    required = wanted(tool("weather"), tool_choice="required")
    assert outputs.accepts(grammar_of(outputs, "hermes", required), f"{call}\n{call}")


@pytest.mark.parametrize("family", ["hermes", "llama", "mistral"])
def test_content_follows_its_schema_where_no_call_is_made(outputs: Outputs, family: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = wanted(tool("weather", strict=False))
    grammar = grammar_of(outputs, family, tools, GrammarFields("json_schema", schema, "response_format"))
    assert outputs.accepts(grammar, '{"a": 1}')
    assert not outputs.accepts(grammar, '{"a": "x"}') and not outputs.accepts(grammar, "Hello")
    if family == "hermes":
        assert outputs.accepts(grammar, hermes(GOOD))
    with pytest.raises(ToolError, match="cannot be set together"):
        grammar_of(outputs, family, tools, GrammarFields("regex", "a+", "guided_regex"))


def test_a_function_that_is_not_strict_may_have_keywords_that_cannot_be_enforced(outputs: Outputs) -> None:
    parameters = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    tools = wanted(tool("weather", strict=False, parameters=parameters), tool_choice="required")
    assert outputs.accepts(grammar_of(outputs, "hermes", tools), hermes('{"tags": [1, 1]}'))


def test_a_schema_cannot_weaken_its_enforcement(outputs: Outputs) -> None:
    parameters = {
        "type": "object",
        "properties": {"tags": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        "x-guidance": {"lenient": True, "coerce_one_of": True},
    }
    grammar = grammar_of(outputs, "hermes", wanted(tool("f", parameters=parameters), tool_choice="required"))
    text = llguidance.grammar_from("grammar", grammar.value)
    assert "oneOf" in LLMatcher.validate_grammar(text, limits=GRAMMAR_LIMITS)


def test_references_within_parameters(outputs: Outputs) -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"Place": {"type": "string", "enum": ["here", "there"]}},
    }
    tools = wanted(tool("weather", parameters=parameters), tool("clock"), tool_choice="required")
    grammar = grammar_of(outputs, "hermes", tools)
    assert outputs.accepts(grammar, hermes('{"at": "here"}'))
    assert not outputs.accepts(grammar, hermes('{"at": "where"}'))


def test_a_parameter_between_tags_that_cannot_be_enforced_is_an_error(outputs: Outputs) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}}}
    with pytest.raises(ToolError, match="schema of `a` of the strict function f"):
        grammar_of(outputs, "coder", wanted(tool("f", parameters=parameters), tool_choice="required"))
    loose = wanted(tool("f", strict=False, parameters=parameters), tool_choice="required")
    text = "<tool_call>\n<function=f>\n<parameter=a>\nany\n</parameter>\n</function>\n</tool_call>"
    assert outputs.accepts(grammar_of(outputs, "coder", loose), text)


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        (r"<\|tool_call\|>call:(?P<name>\w+)", ("<|tool_call|>call:", NAME)),
        (r"\s*<tool_call>", (Space(), "<tool_call>")),
        (r"(?:a|b)c+d*(?=x)\Z", ("ac",)),
        (r"<p=(?P<key>[^>]+)>\s*(?P<value>.*?)\s*</p>", ("<p=", KEY, ">", Space(), VALUE, Space(), "</p>")),
    ],
)  # fmt: skip
def test_the_shortest_text_of_a_pattern(pattern: str, parts: tuple[Any, ...]) -> None:
    assert parts_of(pattern) == parts
