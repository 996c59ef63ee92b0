"""Reads the fields that constrain an output to a grammar, in the dialects of OpenAI, LoRAX, TGI, vLLM and SGLang."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.model import Body, Rejected, published_as

ANY_OBJECT: dict[str, Any] = {"type": "object"}
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_CHOICES = 4096
MAX_ENUM = 4096
MAX_TEXT_BYTES = 8 * 1024
"""Maximum bytes of a literal text, regular expression or grammar line: shards compute a literal's tokens at once."""
MAX_REPETITIONS = 4096
"""Maximum repetitions in one part of a regular expression, for the same reason."""
STRUCTURED_OUTPUTS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The field of `structured_outputs` for each kind of grammar."""


@dataclass(frozen=True)
class GrammarFields:
    """The grammar that a request asks for."""

    kind: str
    """json_schema | regex | choice | grammar."""
    value: Any
    """A JSON schema, a regular expression, a list of texts, or a grammar in Lark's or GBNF's syntax."""
    field: str
    """The field that it came from."""


def names_grammar(fields: dict[str, Any]) -> bool:
    """Whether a body has a field of this page, which replaces the grammar of its alias."""
    return any(fields.get(name) is not None for name in (*_DIRECT, "response_format", "structured_outputs", "grammar"))


_DIRECT = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
}

# `StructuredGroup.grammar` checks the values of these types.
_Schema = Annotated[Any, published_as(dict[str, Any] | str)]
_Text = Annotated[Any, published_as(str)]
_Choices = Annotated[Any, published_as(list[str])]


class DescribedSchema(Body):
    """A JSON schema in OpenAI's `response_format`. Every schema is followed strictly."""

    name: Annotated[Any, published_as(str)] = None
    description: Annotated[Any, published_as(str)] = None
    strict: Annotated[Any, published_as(bool)] = Field(None, description="Every schema is followed strictly")
    schema_: _Schema = Field(None, alias="schema")


class ResponseFormat(Body):
    """OpenAI's and LoRAX's: an object of any kind, or one that matches a schema."""

    type: Annotated[Any, published_as(Literal["text", "json_object", "json_schema"])] = None
    schema_: _Schema = Field(None, alias="schema", description="As in LoRAX")
    json_schema: DescribedSchema | None = Field(None, description="As in OpenAI")

    def grammar(self) -> GrammarFields | None:
        """None for a text. Raises ValidationError."""
        kind, schema, described = self.type, self.schema_, self.json_schema
        if kind == "text":
            if schema is not None or described is not None:
                sentence = "a schema in `response_format` needs the type json_object or json_schema"
                raise ValidationError(sentence, "response_format")
            return None
        if kind == "json_object":
            if described is not None:
                raise ValidationError("`response_format.json_schema` needs the type json_schema", "response_format")
            return _schema(ANY_OBJECT if schema is None else schema, "response_format.schema")
        if kind != "json_schema":
            raise ValidationError("`response_format.type` must be text, json_object or json_schema", "response_format")
        if described is not None and schema is not None:
            raise ValidationError(
                "`response_format.schema` and `response_format.json_schema` cannot be set together", "response_format"
            )
        schema = schema if described is None else described.schema_
        if schema is None:
            raise ValidationError("`response_format.json_schema.schema` is missing", "response_format")
        return _schema(schema, "response_format.json_schema.schema")


class TypedGrammar(Body):
    """TGI's."""

    type: Annotated[Any, published_as(Literal["json", "json_schema", "regex"])] = None
    value: _Schema = None

    def grammar(self) -> GrammarFields:
        """Raises ValidationError."""
        value = self.value
        if self.type == "regex":
            return _regex(value, "grammar.value")
        if self.type not in ("json", "json_schema"):
            raise ValidationError("`grammar.type` must be json, json_schema or regex", "grammar")
        if self.type == "json_schema" and isinstance(value, dict):
            value = value.get("schema", value)
        return _schema(value, "grammar.value")


class StructuredOutputs(Body):
    """vLLM's."""

    json_: _Schema = Field(None, alias="json")
    json_object: bool = False
    regex: _Text = None
    choice: _Choices = None
    grammar: _Text = None
    structural_tag = whitespace_pattern = Rejected("is not supported", (False,))
    disable_any_whitespace = disable_additional_properties = Rejected("is not supported", (False,))

    def grammars(self) -> list[GrammarFields]:
        """Raises ValidationError."""
        path = "structured_outputs."
        values = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        made = [_read(values[name], kind, path + name) for kind, name in STRUCTURED_OUTPUTS.items()]
        if self.json_object:
            made.append(GrammarFields("json_schema", ANY_OBJECT, f"{path}json_object"))
        for name, row in self.unsupported():
            raise ValidationError(f"`{path}{name}` {row.reason}", path + name)
        return [grammar for grammar in made if grammar is not None]


class StructuredGroup(Body):
    """Fields of every generation route: the grammar of the output. One of them may be set."""

    response_format: ResponseFormat | None = Field(
        None, description="`type` is text, json_object (with a `schema`, as in LoRAX) or json_schema (as in OpenAI)"
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="As in vLLM")
    guided_json: _Schema = Field(None, description="A JSON schema, or its text; as in vLLM")
    guided_regex: _Text = Field(None, description="As in vLLM")
    guided_choice: _Choices = Field(None, description="As in vLLM")
    guided_grammar: _Text = Field(None, description="A grammar in Lark's or GBNF's syntax; as in vLLM")
    json_schema: _Schema = Field(None, description="As in SGLang")
    regex: _Text = Field(None, description="As in SGLang")
    ebnf: _Text = Field(None, description="As in SGLang")
    grammar: TypedGrammar | None = Field(None, description="As in TGI: `type` is json, json_schema or regex")
    guided_whitespace_pattern = Rejected("is not supported by this server: write a `guided_grammar`")

    def grammar_fields(self) -> GrammarFields | None:
        """The one grammar of a body, or None. Raises ValidationError, which names the field."""
        set_fields = self.model_fields_set
        made = [_read(getattr(self, name), kind, name) for name, kind in _DIRECT.items() if name in set_fields]
        made.append(None if self.response_format is None else self.response_format.grammar())
        made.append(None if self.grammar is None else self.grammar.grammar())
        grammars = [grammar for grammar in made if grammar is not None]
        grammars += [] if self.structured_outputs is None else self.structured_outputs.grammars()
        if len(grammars) > 1:
            names = " and ".join(f"`{grammar.field}`" for grammar in grammars)
            raise ValidationError(f"{names} cannot be set together: an output follows one grammar", grammars[1].field)
        for grammar in grammars:
            check_grammar(grammar)
        return grammars[0] if grammars else None


def _read(value: Any, kind: str, field: str) -> GrammarFields | None:
    return None if value is None or value == [] else _READERS[kind](value, field)


def _schema(value: Any, field: str) -> GrammarFields:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValidationError(f"`{field}` is not valid JSON", field) from None
    if not isinstance(value, dict | bool):
        raise ValidationError(f"`{field}` must be a JSON schema: an object, or its text", field)
    return GrammarFields("json_schema", value, field)


def _regex(value: Any, field: str) -> GrammarFields:
    return GrammarFields("regex", _text(value, field), field)


def _grammar(value: Any, field: str) -> GrammarFields:
    return GrammarFields("grammar", _text(value, field), field)


def _choice(value: Any, field: str) -> GrammarFields:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) and choice for choice in value):
        raise ValidationError(f"`{field}` must be a list of texts that are not empty", field)
    if len(value) > MAX_CHOICES:
        raise ValidationError(f"`{field}` takes up to {MAX_CHOICES} texts. Given: {len(value)}", field)
    return GrammarFields("choice", value, field)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValidationError(f"`{field}` must be a text that is not empty", field)
    return value


_READERS: dict[str, Callable[[Any, str], GrammarFields]] = {
    "json_schema": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


def check_grammar(grammar: GrammarFields) -> None:
    """Bounds of size and depth, and no character that no output can have. Raises ValidationError."""
    num_bytes, texts, shown = 0, list[str](), list[str]()
    patterns = [grammar.value] if grammar.kind == "regex" else []
    waiting: list[tuple[Any, int, bool]] = [(grammar.value, 0, False)]
    """(value, depth, whether it is part of a value that the output may have)."""
    while waiting:
        value, depth, is_literal = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValidationError(f"`{grammar.field}` is nested deeper than {MAX_DEPTH} levels", grammar.field)
        num_bytes += 8
        if isinstance(value, str):
            texts.append(value)
            num_bytes += len(value)
        elif isinstance(value, list):
            waiting += [(item, depth + 1, is_literal) for item in value]
        elif isinstance(value, dict):
            texts += value
            enum = value.get("enum")
            if isinstance(enum, list) and len(enum) > MAX_ENUM:
                raise ValidationError(f"an `enum` in `{grammar.field}` has more than {MAX_ENUM} values", grammar.field)
            patterns += [value["pattern"]] if isinstance(value.get("pattern"), str) else []
            by_pattern = value.get("patternProperties")
            patterns += by_pattern if isinstance(by_pattern, dict) else []
            for name, member in value.items():
                if name == "description" and isinstance(member, str) and not is_literal:
                    shown.append(member)
                    num_bytes += len(member)
                else:
                    waiting.append((member, depth + 1, is_literal or name in ("const", "enum")))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise ValidationError(f"`{grammar.field}` is larger than {MAX_GRAMMAR_BYTES} bytes", grammar.field)
    for text in texts:
        check_letters(text, grammar.field)
        lines = text.splitlines() if grammar.kind == "grammar" else [text]  # a literal text ends on its line
        if any(len(line.encode()) > MAX_TEXT_BYTES for line in lines):
            raise ValidationError(f"`{grammar.field}` has a text of more than {MAX_TEXT_BYTES} bytes", grammar.field)
    for text in shown:
        check_letters(text, grammar.field)
    for text in patterns:
        if any(int(number[:9]) > MAX_REPETITIONS for number in _REPETITION.findall(text)):
            raise ValidationError(
                f"`{grammar.field}` repeats a part of a regular expression more than {MAX_REPETITIONS} times",
                grammar.field,
            )


_REPETITION = re.compile(r"\{(?:\d*,)?(\d+)(?:,\d*)?\}")


def check_letters(text: str, field: str) -> None:
    """Raises ValidationError for characters that no output can have."""
    if "\0" in text:
        raise ValidationError(f"`{field}` contains a NUL character", field)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValidationError(f"`{field}` contains a lone surrogate", field)
