"""Grammars of outputs with tool calls, in llguidance's variant of Lark: the same engine as for structured output.

A strict function's schema is followed or rejected. Other functions' schemas are followed as far as the engine can.
"""

import json
from typing import Any

from lorikeet.router.errors import ToolError
from lorikeet.router.output.call_syntax import VALUE, CallSyntax, Part, Slot, Space
from lorikeet.router.output.formats import OutputFormat
from lorikeet.router.output.merged_schemas import MergedSchemas
from lorikeet.router.output.output_grammar import TEXT, OutputGrammar, SpecialTokens, enforced_content, schema_text
from lorikeet.router.output.parameters import EnforcedParameters
from lorikeet.router.output.reasoning import text_opening
from lorikeet.router.schemas.chat.tools import Function, ToolFields
from lorikeet.router.schemas.grammar import GrammarFields
from lorikeet.router.text.grammar_process import literal
from lorikeet.router.text.reasoning import Reasoning

_SPACE = r"/[ \n]?/"
_LINE = r"/\n?/"


class ToolGrammar(OutputGrammar):
    """Builds the grammar of one request with tools."""

    def __init__(
        self,
        form: OutputFormat,
        syntax: CallSyntax,
        tools: ToolFields,
        tokens: SpecialTokens,
        reasoning: Reasoning | None,
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
        if choices and all(isinstance(each, str) and each for each in choices):
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
