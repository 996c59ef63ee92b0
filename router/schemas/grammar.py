"""Reads the fields that constrain an output to a grammar, in the dialects of OpenAI, LoRAX, TGI, vLLM and SGLang."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.fields import Fields

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


@dataclass(frozen=True)
class InvalidGrammar:
    """Why the grammar of a request cannot be read, as a ValidationError says it."""

    message: str
    param: str | None
    code: str | None


def names_grammar(fields: dict[str, Any]) -> bool:
    """Whether a body has a field of this page, which replaces the grammar of its alias."""
    return any(fields.get(name) is not None for name in (*_DIRECT, "response_format", "structured_outputs", "grammar"))


def read_grammar(fields: Fields) -> GrammarFields | None:
    """The one grammar of a body, or None. Raises ValidationError, which names the field."""
    found = [each for each in (*_direct(fields), _response_format(fields), _typed(fields)) if each is not None]
    found += _structured_outputs(fields)
    if len(found) > 1:
        names = " and ".join(f"`{each.field}`" for each in found)
        raise ValidationError(f"{names} cannot be set together: an output follows one grammar", found[1].field)
    for each in found:
        check_grammar(each)
    return found[0] if found else None


def _direct(fields: Fields) -> list[GrammarFields | None]:
    """vLLM's and SGLang's fields of the body itself."""
    return [_one(fields, name, kind) for name, kind in _DIRECT.items()]


_DIRECT = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
}


def _one(fields: Fields, name: str, kind: str, path: str = "") -> GrammarFields | None:
    value = fields.take(name)
    return None if value is None or value == [] else _READERS[kind](value, path + name)


def _structured_outputs(fields: Fields) -> list[GrammarFields]:
    """vLLM's `structured_outputs`."""
    child = fields.child("structured_outputs")
    found = [_one(child, name, kind, "structured_outputs.") for kind, name in STRUCTURED_OUTPUTS.items()]
    if child.flag("json_object"):
        found.append(GrammarFields("json_schema", ANY_OBJECT, "structured_outputs.json_object"))
    for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        if child.take(name) not in (None, False):
            raise ValidationError(f"`structured_outputs.{name}` is not supported", f"structured_outputs.{name}")
    return [each for each in found if each is not None]


def _response_format(fields: Fields) -> GrammarFields | None:
    """OpenAI's and LoRAX's: an object of any kind, or one that matches a schema."""
    value = fields.mapping("response_format")
    if value is None:
        return None
    child = fields.nested("response_format", value)
    kind, schema = child.take("type"), child.take("schema")
    if kind == "text":
        if schema is not None or child.take("json_schema") is not None:
            sentence = "a schema in `response_format` needs the type json_object or json_schema"
            raise ValidationError(sentence, "response_format")
        return None
    if kind == "json_object":
        if child.take("json_schema") is not None:
            raise ValidationError("`response_format.json_schema` needs the type json_schema", "response_format")
        return _schema(ANY_OBJECT if schema is None else schema, "response_format.schema")
    if kind == "json_schema":
        inner = child.mapping("json_schema")
        if inner is not None and schema is not None:
            raise ValidationError(
                "`response_format.schema` and `response_format.json_schema` cannot be set together", "response_format"
            )
        if inner is not None:
            described = child.nested("json_schema", inner)
            schema = described.take("schema")
            for name in ("name", "description", "strict"):  # they change no text: every schema is followed strictly
                described.take(name)
        if schema is None:
            raise ValidationError("`response_format.json_schema.schema` is missing", "response_format")
        return _schema(schema, "response_format.json_schema.schema")
    raise ValidationError("`response_format.type` must be text, json_object or json_schema", "response_format")


def _typed(fields: Fields) -> GrammarFields | None:
    """TGI's `grammar`: a type and a value."""
    value = fields.mapping("grammar")
    if value is None:
        return None
    child = fields.nested("grammar", value)
    kind, inner = child.take("type"), child.take("value")
    if kind == "regex":
        return _regex(inner, "grammar.value")
    if kind in ("json", "json_schema"):
        schema = inner.get("schema", inner) if kind == "json_schema" and isinstance(inner, dict) else inner
        return _schema(schema, "grammar.value")
    raise ValidationError("`grammar.type` must be json, json_schema or regex", "grammar")


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
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
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
            waiting += [(each, depth + 1, is_literal) for each in value]
        elif isinstance(value, dict):
            texts += value
            enum = value.get("enum")
            if isinstance(enum, list) and len(enum) > MAX_ENUM:
                raise ValidationError(f"an `enum` in `{grammar.field}` has more than {MAX_ENUM} values", grammar.field)
            patterns += [value["pattern"]] if isinstance(value.get("pattern"), str) else []
            by_pattern = value.get("patternProperties")
            patterns += by_pattern if isinstance(by_pattern, dict) else []
            for name, each in value.items():
                if name == "description" and isinstance(each, str) and not is_literal:
                    shown.append(each)
                    num_bytes += len(each)
                else:
                    waiting.append((each, depth + 1, is_literal or name in ("const", "enum")))
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
