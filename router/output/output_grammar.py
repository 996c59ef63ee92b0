"""Grammars of outputs, in llguidance's variant of Lark: reasoning where the model may reason, and then the answer or
tool calls. A strict function's schema is followed or rejected, another one's as far as the engine can.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import llguidance

from lorikeet.router.errors import ToolError, ValidationError
from lorikeet.router.output.formats import VALUE, CallSyntax, Part, ResponseTemplate, Slot, Space, text_opening
from lorikeet.router.schemas.chat import Function, ToolFields
from lorikeet.router.schemas.grammar import GrammarFields
from lorikeet.router.text.grammar_process import OVERRIDES, literal
from lorikeet.router.text.json_schemas import SchemaError, enforced
from lorikeet.router.text.stop import MAX_GAP, ReasoningSyntax, Start

TEXT = r"/(.|\n)*/"
"""Any text, for the inside of another lexeme."""


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens, which text in a grammar does not match. What has the text of one may also be spelled."""

    ids: dict[str, int]
    end_ids: frozenset[int]
    """Ids of special tokens that end the output: a grammar ends before them."""

    def written(self, text: str) -> tuple[str, bool]:
        """`text` in Lark, and whether it ends the output."""
        terms: list[str] = []
        for piece in self.pieces(text):
            number = self.ids.get(piece)
            if number is not None and number in self.end_ids:
                return " ".join(terms), True
            terms.append(literal(piece) if number is None else f"(<[{number}]> | {literal(piece)})")
        return " ".join(terms), False

    def pieces(self, text: str) -> list[str]:
        """The special tokens in `text`, and the texts between them."""
        if not self.ids:
            return [text] if text else []
        names = "|".join(map(re.escape, sorted(self.ids, key=len, reverse=True)))
        return [piece for piece in re.split(f"({names})", text) if piece]


class OutputGrammar:
    """Builds the grammar of one request."""

    def __init__(self, tokens: SpecialTokens, reasoning: ReasoningSyntax | None, next_part: str = "") -> None:
        """`next_part` follows the reasoning, before anything else."""
        self._tokens = tokens
        self._reasoning = reasoning
        self._next_part = next_part
        self._rules: list[str] = []

    def text(self, content: GrammarFields, opening: str = "") -> GrammarFields:
        """The answer is as `content` says, after the text `opening`."""
        reasoning = self._thought()
        if not reasoning and not opening:
            return content
        begin = f"{reasoning} {self._tokens.written(opening)[0]}"
        return replace(self._grammar(f"{begin} {self._content(content)}"), field=content.field)

    def _grammar(self, start: str) -> GrammarFields:
        return GrammarFields("grammar", "\n".join([f"start: {start.strip()}", *self._rules, ""]), "tools")

    def _thought(self) -> str:
        """The reasoning that may come first, or must be ended first."""
        reasoning = self._reasoning
        if reasoning is None or reasoning.start is Start.CLOSED:
            return ""
        ends = " | ".join(self._until(f"thought_{at}", closing) for at, closing in enumerate(reasoning.closings))
        self._rules.append(f"thought: {ends}")
        self._rules.append(f"GAP: /\\n{{0,{MAX_GAP}}}/")
        following = self._tokens.written(self._next_part)[0]
        if reasoning.start is Start.OPEN:
            return f"thought GAP {following}"
        return f"({self._tokens.written(reasoning.opening)[0]} thought GAP {following})?"

    def _until(self, name: str, end: str) -> str:
        """Any text up to the first `end`, be it spelled or with special tokens."""
        self._rules.append(f"{name}[lazy]: {TEXT} {literal(end)}")
        first, *others = self._tokens.pieces(end)
        if first not in self._tokens.ids:
            return name
        before, rest = f"BEFORE_{name.upper()}", self._tokens.written("".join(others))[0]
        self._rules.append(f"{before}: {TEXT}")
        return f"({name} | {before} <[{self._tokens.ids[first]}]> {rest})"

    def _content(self, content: GrammarFields) -> str:
        """A rule for the text of an answer."""
        if content.kind == "choice":  # one lexeme, as in `grammar_process`
            self._rules.append("ANSWER: " + " | ".join(map(literal, content.value)))
            return "ANSWER"
        self._rules.append(f"answer: {_lark(content)}")
        return "answer"


def schema_text(schema: Any, is_strict: bool = True) -> str:
    """A JSON schema as text, with options that the schema itself cannot change."""
    if not isinstance(schema, dict):
        return json.dumps(schema)
    return json.dumps({**schema, "x-guidance": {**OVERRIDES, "lenient": not is_strict}})


def enforced_content(content: GrammarFields) -> Any:
    """The schema of an answer as it is enforced. Raises ValidationError for what cannot be."""
    try:
        return enforced(content.value)[0]
    except SchemaError as problem:
        raise ValidationError(f"`{content.field}` is not supported: {problem}", content.field) from None


def _lark(content: GrammarFields) -> str:
    if content.kind == "json_schema":
        return f"%json {schema_text(enforced_content(content))}"
    if content.kind == "regex":
        made = json.loads(llguidance.LLMatcher.grammar_from_regex(content.value))
        return str(made["grammars"][0]["lark_grammar"]).removeprefix("start: ")
    text = llguidance.grammar_from("grammar", content.value)
    return f"%lark {{\n{text}\n}}"


_PLACES = ("$defs", "definitions")


class MergedSchemas:
    """Schemas of one request that become parts of another schema."""

    def __init__(self) -> None:
        self._definitions: dict[str, Any] = {}
        self._num_schemas = 0

    def add(self, schema: Any) -> Any:
        """The schema without its definitions. Raises ToolError for a reference that cannot follow."""
        if not isinstance(schema, dict):
            return schema
        self._num_schemas += 1
        prefix = f"{self._num_schemas}_"
        moved: dict[str, Any] = _moved(schema, prefix)
        for place in _PLACES:
            definitions = moved.pop(place, None)
            for name, definition in (definitions if isinstance(definitions, dict) else {}).items():
                self._definitions[prefix + name] = definition
        moved.pop("$schema", None)
        moved.pop("x-guidance", None)
        return moved

    def around(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The outermost schema with all definitions."""
        return {**schema, "$defs": self._definitions} if self._definitions else schema


def _moved(value: Any, prefix: str) -> Any:
    if isinstance(value, list):
        return [_moved(item, prefix) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {name: item if name in ("const", "enum") else _moved(item, prefix) for name, item in value.items()}
    target = value.get("$ref")
    if isinstance(target, str):
        place, _, name = target.removeprefix("#/").partition("/")
        if not target.startswith("#/") or place not in _PLACES or "/" in name:
            raise ToolError(f"the reference {target[:200]} is not supported: use #/$defs/NAME", "tools")
        moved["$ref"] = f"#/$defs/{prefix}{name}"
    return moved


ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


class EnforcedParameters:
    """The schemas of one request's functions, and the paths of what is left out of those that are not strict."""

    def __init__(self, tools: ToolFields, is_loose: bool = False) -> None:
        """`is_loose`: no keyword of a function that is not strict is enforced."""
        self._tools = tools
        self._is_loose = is_loose
        self.left_out: list[str] = []

    def of(self, function: Function) -> dict[str, Any]:
        """Raises ToolError for a keyword of a strict function that cannot be enforced."""
        if self._is_loose and not function.is_strict:
            return self.any_of(function)
        try:
            schema, left_out = enforced(function.parameters, function.is_strict)
        except SchemaError as problem:
            raise ToolError(f"the parameters of the strict function {function.name}: {problem}", "tools") from None
        self.left_out += [f"{self.path(function)}.{path}" for path in left_out]
        made: dict[str, Any] = schema
        return made

    def any_of(self, function: Function) -> dict[str, Any]:
        """Any arguments, for a function that is not strict."""
        if self.path(function) not in self.left_out:
            self.left_out.append(self.path(function))
        return ANY_ARGUMENTS

    def path(self, function: Function) -> str:
        """The field of the request that has the schema."""
        return f"tools[{self._tools.functions.index(function)}].function.parameters"


_SPACE = r"/[ \n]?/"
_LINE = r"/\n?/"


class ToolGrammar(OutputGrammar):
    """Builds the grammar of one request with tools."""

    def __init__(
        self,
        form: ResponseTemplate,
        syntax: CallSyntax,
        tools: ToolFields,
        tokens: SpecialTokens,
        reasoning: ReasoningSyntax | None,
        parameters: EnforcedParameters,
    ) -> None:
        super().__init__(tokens, reasoning, form.next_part)
        self._parameters_of = parameters
        self._form = form
        self._syntax = syntax
        self._tools = tools

    def required(self) -> GrammarFields:
        """A call is made."""
        return self._grammar(f"{self._thought()} {self._calls()}")

    def optional(self, content: GrammarFields | None) -> GrammarFields:
        """A call is made, or there is text; text as `content` says, or any."""
        reasoning = self._thought()
        if content is not None and self._syntax.opening in ((), (Space(),)):
            self._rules.append(f"answer: %json {self._content_or_call(content)}")
            return self._grammar(f"{reasoning} answer")
        if content is not None:
            _check_kind(content)
            opening = self._tokens.written(text_opening(self._form))[0]
            return self._grammar(f"{reasoning} ({opening} {self._content(content)} | {self._calls()})")
        if self._form.text_field is not None:
            raise ToolError("the tool format of this model can be enforced with `tool_choice` required alone", "tools")
        trigger = self._syntax.trigger
        self._rules.append(f"TEXT: {TEXT}")
        if not trigger:
            self._rules.append(r"OTHER: /[^{\s](.|\n)*/")
            return self._grammar(f"{reasoning} ({self._calls()} | OTHER?)")
        begin, body = self._until("trigger", trigger), self._calls(after_trigger=True)
        if self._tools.parallel and not self._syntax.is_list:
            return self._grammar(f"{reasoning} ({begin} {body})* TEXT")
        return self._grammar(f"{reasoning} ({begin} {body} | TEXT)")

    def _content_or_call(self, content: GrammarFields) -> str:
        """A schema of both, for calls that are JSON objects without anything before them."""
        _check_kind(content)
        merged = MergedSchemas()
        choices = [merged.add(enforced_content(content))]
        name, arguments = self._syntax.keys
        for function in self._tools.allowed:
            properties = {name: {"const": function.name}, arguments: merged.add(self._parameters_of.of(function))}
            call = {"properties": properties, "required": [name, arguments], "additionalProperties": False}
            choices.append({"type": "object", **call})
        return schema_text(merged.around({"anyOf": choices}))

    def _calls(self, after_trigger: bool = False) -> str:
        """Any of the functions; several of them where that is allowed."""
        functions, syntax = self._tools.allowed, self._syntax
        if syntax.is_list:
            items = [self._item(index, function) for index, function in enumerate(functions)]
            self._rules.append(f"item: {' | '.join(items)}")
            opening, _ = self._literal(syntax.opening[1:] if after_trigger else syntax.opening, "")
            more = '(", " item)*' if self._tools.parallel else ""
            closing, _ = self._closing()
            return f'{opening} {_SPACE} "[" item {more} "]" {closing}'
        calls = []
        ends = False
        for index, function in enumerate(functions):
            parts = syntax.opening[1:] if after_trigger else syntax.opening
            closing, ends = self._closing()
            call = f"{self._literal(parts, function.name)[0]} {_SPACE} {self._item(index, function)} {_SPACE} {closing}"
            self._rules.append(f"call_{index}: {call}")
            calls.append(f"call_{index}")
        self._rules.append(f"call: {' | '.join(calls)}")
        may_repeat = self._tools.parallel and syntax.repeats and syntax.opening and not ends and not after_trigger
        return f"call ({_SPACE} call)*" if may_repeat else "call"

    def _item(self, index: int, function: Function) -> str:
        """The head, the arguments and the tail of a call."""
        syntax = self._syntax
        if syntax.parameter is not None:
            return " ".join(self._parameters(index, function, syntax.parameter))
        schema = schema_text(self._parameters_of.of(function), function.is_strict)
        self._rules.append(f"arguments_{index}: %json {schema}")
        return (
            f"{self._literal(syntax.head, function.name)[0]} arguments_{index} {self._tokens.written(syntax.tail)[0]}"
        )

    def _closing(self) -> tuple[str, bool]:
        """What follows the arguments, and whether that ends the output."""
        return ("", True) if self._syntax.closing is None else self._literal(self._syntax.closing, "")

    def _literal(self, parts: tuple[Part, ...], name: str) -> tuple[str, bool]:
        """Parts without values, in Lark, and whether they end the output."""
        terms: list[str] = []
        text = ""
        for part in (*parts, Space()):
            if not isinstance(part, Space):
                text += part if isinstance(part, str) else name
                continue
            written, ends = self._tokens.written(text)
            terms.append(written)
            if ends:
                return " ".join(terms), True
            terms.append(_SPACE)
            text = ""
        return " ".join(terms[:-1]), False

    def _parameters(self, index: int, function: Function, parts: tuple[Part, ...]) -> list[str]:
        """Parameters between tags, in the schema's order."""
        schema = self._parameters_of.of(function)
        properties: dict[str, Any] = schema.get("properties", {}) if isinstance(schema, dict) else {}
        required = schema.get("required", []) if isinstance(schema, dict) else []
        at = parts.index(VALUE)
        terms = []
        for number, (key, value) in enumerate(properties.items()):
            rule = f"parameter_{index}_{number}"
            before = tuple(key if isinstance(part, Slot) else part for part in parts[:at])
            before = before[:-1] if before and isinstance(before[-1], Space) else before  # that is the value's
            after = "".join(part for part in parts[at + 1 :] if isinstance(part, str))
            written = self._value(rule, value, after, function, key)
            self._rules.append(f"{rule}: {self._literal(before, '')[0]} {written} {_SPACE}")
            terms.append(rule if key in required else f"{rule}?")
        return terms

    def _value(self, rule: str, schema: Any, after: str, function: Function, key: str) -> str:
        """A parameter's value and what ends it. Texts are written as they are, other values as JSON."""
        kind = schema.get("type") if isinstance(schema, dict) else None
        ending, _ = self._tokens.written(after)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None) if kind == "string" else None
        if choices and all(isinstance(choice, str) and choice for choice in choices):
            return f"{_LINE} ({' | '.join(map(literal, choices))}) {_LINE} {ending}"
        if kind in ("integer", "number", "boolean", "null", "object", "array") and "$ref" not in json.dumps(schema):
            self._rules.append(f"{rule}_value: %json {schema_text(schema, function.is_strict)}")
            return f"{_SPACE} {rule}_value {_SPACE} {ending}"
        is_plain = kind == "string" and not schema.keys() - {"type", "title", "description", "default", "examples"}
        if function.is_strict and not is_plain:
            raise ToolError(
                f"the schema of `{key}` of the strict function {function.name} cannot be enforced in the tool format "
                "of this model: use a plain string, an enum of strings, or a single other type without $ref"
            )
        return self._until(f"{rule}_value", after)


def _check_kind(content: GrammarFields) -> None:
    if content.kind != "json_schema":
        raise ToolError(f"`{content.field}` and `tools` cannot be set together: use a JSON schema", content.field)
