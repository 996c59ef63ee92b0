"""Grammars of outputs with tool calls, in llguidance's variant of Lark: the same engine as for structured output.

A strict function's schema is followed or rejected. Other functions' schemas are followed as far as the engine can.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from lorikeet.router.errors import ToolError
from lorikeet.router.output.call_syntax import VALUE, CallSyntax, Part, Slot, Space
from lorikeet.router.output.formats import REASONING, OutputFormat
from lorikeet.router.output.merged_schemas import MergedSchemas
from lorikeet.router.schemas.chat.tools import Function, ToolFields
from lorikeet.router.schemas.grammar import GrammarFields
from lorikeet.router.text.grammar_process import OVERRIDES

_FREE = r"/(.|\n)*/"
_SPACE = r"/[ \n]?/"
_LINE = r"/\n?/"


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens that text in a grammar does not match: they are written as ids."""

    ids: dict[str, int]
    end_ids: frozenset[int]
    """Ids of special tokens that end the output: a grammar ends before them."""

    def written(self, text: str) -> tuple[str, bool]:
        """`text` in Lark, and whether it ends the output."""
        if not self.ids:
            return (json.dumps(text) if text else ""), False
        pieces = re.split("(" + "|".join(map(re.escape, sorted(self.ids, key=len, reverse=True))) + ")", text)
        terms: list[str] = []
        for piece in pieces:
            number = self.ids.get(piece)
            if number is not None and number in self.end_ids:
                return " ".join(terms), True
            if piece:
                terms.append(json.dumps(piece) if number is None else f"<[{number}]>")
        return " ".join(terms), False


class ToolGrammar:
    """Builds the grammar of one request."""

    def __init__(
        self, form: OutputFormat, syntax: CallSyntax, tools: ToolFields, tokens: SpecialTokens, open_field: str | None
    ) -> None:
        """`open_field` is the region in which the prompt ends."""
        self._form = form
        self._syntax = syntax
        self._tools = tools
        self._tokens = tokens
        self._open_field = open_field
        self._rules: list[str] = []

    def required(self) -> GrammarFields:
        """A call is made."""
        return self._grammar(f"{self._reasoning()} {self._calls()}")

    def optional(self, content: GrammarFields | None) -> GrammarFields:
        """A call is made, or there is text; text as `content` says, or any."""
        reasoning = self._reasoning()
        if content is not None and self._syntax.opening in ((), (Space(),)):
            self._rules.append(f"answer: %json {self._content_or_call(content)}")
            return self._grammar(f"{reasoning} answer")
        if content is not None:
            return self._grammar(f"{reasoning} ({self._content(content)} | {self._calls()})")
        if self._has_marked_text:
            raise ToolError("the tool format of this model can be enforced with `tool_choice` required alone", "tools")
        trigger = self._syntax.trigger
        self._rules.append(f"TEXT: {_FREE}")
        if not trigger:
            self._rules.append(r"OTHER: /[^{\s](.|\n)*/")
            return self._grammar(f"{reasoning} ({self._calls()} | OTHER?)")
        written, _ = self._tokens.written(trigger)
        if written.startswith("<["):
            begin = f"TEXT {written}"
        else:
            self._rules.append(f"trigger[lazy]: TEXT {written}")
            begin = "trigger"
        body = self._calls(after_trigger=True)
        if self._tools.parallel and not self._syntax.is_list:
            return self._grammar(f"{reasoning} ({begin} {body})* TEXT")
        return self._grammar(f"{reasoning} ({begin} {body} | TEXT)")

    @property
    def _has_marked_text(self) -> bool:
        """Whether text that is no call has a mark of its own."""
        fields = self._form.template["fields"]
        texts = [each for name, each in fields.items() if name not in ("tool_calls", *REASONING)]
        return any("open" in each or "open_pattern" in each for each in texts)

    def _grammar(self, start: str) -> GrammarFields:
        return GrammarFields("grammar", "\n".join([f"start: {start.strip()}", *self._rules, ""]), "tools")

    def _reasoning(self) -> str:
        """The reasoning that may come first, or must be ended first."""
        fields = self._form.template["fields"]
        name = next((each for each in REASONING if each in fields), None)
        if name is None or not isinstance(fields[name].get("close"), str):
            return ""
        closing, _ = self._tokens.written(fields[name]["close"])
        opening = "" if self._open_field == name else fields[name].get("open", "")
        if not closing or not isinstance(opening, str) or (self._open_field != name and not opening):
            return ""
        if closing.startswith("<["):
            self._rules.append(f"thought: {_FREE} {closing}")
        else:
            self._rules.append(f"thought[lazy]: {_FREE} {closing}")
        self._rules.append(r"GAP: /[ \n]{0,2}/")
        return f"({self._tokens.written(opening)[0]} thought GAP)?" if opening else "thought GAP"

    def _content_or_call(self, content: GrammarFields) -> str:
        """A schema of both, for calls that are JSON objects without anything before them."""
        _check_kind(content)
        merged = MergedSchemas()
        choices = [merged.add(content.value)]
        name, arguments = self._syntax.keys
        for function in self._tools.allowed:
            properties = {name: {"const": function.name}, arguments: merged.add(function.parameters)}
            call = {"properties": properties, "required": [name, arguments], "additionalProperties": False}
            choices.append({"type": "object", **call})
        return _schema(merged.around({"anyOf": choices}), is_strict=True)

    def _content(self, content: GrammarFields) -> str:
        _check_kind(content)
        self._rules.append(f"answer: %json {_schema(content.value, is_strict=True)}")
        return "answer"

    def _calls(self, after_trigger: bool = False) -> str:
        """Any of the functions; several of them where that is allowed."""
        functions, syntax = self._tools.allowed, self._syntax
        if syntax.is_list:
            items = [self._item(index, each) for index, each in enumerate(functions)]
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
        schema = _schema(function.parameters, function.is_strict)
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
        schema = function.parameters
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
        ending = json.dumps(after)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None) if kind == "string" else None
        if choices and all(isinstance(each, str) and each for each in choices):
            return f"{_LINE} ({' | '.join(json.dumps(each) for each in choices)}) {_LINE} {ending}"
        if kind in ("integer", "number", "boolean", "null", "object", "array") and "$ref" not in json.dumps(schema):
            self._rules.append(f"{rule}_value: %json {_schema(schema, function.is_strict)}")
            return f"{_SPACE} {rule}_value {_SPACE} {ending}"
        is_plain = kind == "string" and not schema.keys() - {"type", "title", "description", "default", "examples"}
        if function.is_strict and not is_plain:
            raise ToolError(
                f"the schema of `{key}` of the strict function {function.name} cannot be enforced in the tool format "
                "of this model: use a plain string, an enum of strings, or a single other type without $ref"
            )
        self._rules.append(f"{rule}_value[lazy]: {_FREE} {ending}")
        return f"{rule}_value"


def _check_kind(content: GrammarFields) -> None:
    if content.kind != "json_schema":
        raise ToolError(f"`{content.field}` and `tools` cannot be set together: use a JSON schema", content.field)


def _schema(schema: Any, is_strict: bool) -> str:
    """With options that the schema itself cannot change."""
    if not isinstance(schema, dict):
        return json.dumps(schema)
    return json.dumps({**schema, "x-guidance": {**OVERRIDES, "lenient": not is_strict}})
