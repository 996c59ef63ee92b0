"""Grammars in every dialect: what is read, and what is rejected with an error."""

import json
from typing import Any

import pytest

from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.grammar import ANY_OBJECT, MAX_DEPTH, MAX_ENUM, MAX_GRAMMAR_BYTES, StructuredGroup

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
READ: list[tuple[dict[str, Any], tuple[str, Any] | None]] = [
    ({}, None),
    ({"response_format": None, "guided_choice": [], "structured_outputs": {}}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ("json_schema", ANY_OBJECT)),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ("json_schema", SCHEMA)),
    ({"response_format": {"type": "json_object", "schema": json.dumps(SCHEMA)}}, ("json_schema", SCHEMA)),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, ("json_schema", SCHEMA)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        ("json_schema", SCHEMA),
    ),
    ({"grammar": {"type": "json", "value": SCHEMA}}, ("json_schema", SCHEMA)),
    ({"grammar": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}, ("json_schema", SCHEMA)),
    ({"grammar": {"type": "regex", "value": "a+"}}, ("regex", "a+")),
    ({"guided_json": SCHEMA}, ("json_schema", SCHEMA)),
    ({"guided_regex": "a+"}, ("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, ("choice", ["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, ("json_schema", ANY_OBJECT)),
    ({"structured_outputs": {"choice": ["a"]}}, ("choice", ["a"])),
    ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
    ({"regex": "a"}, ("regex", "a")),
    ({"ebnf": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
]  # fmt: skip
DEEP: Any = {}
for _ in range(MAX_DEPTH + 1):
    DEEP = {"items": DEEP}
REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "`guided_json` and `guided_regex` cannot be set together"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"json": SCHEMA}}, "cannot be set together"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "needs the type json_object or json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}}, "needs the type json_object or"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, "needs the type json_schema"),
    (
        {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
        "cannot be set together",
    ),
    ({"guided_grammar": 'start: "' + "a" * 9000 + '"'}, "has a text of more than 8192 bytes"),
    ({"guided_json": {"patternProperties": {"a{60000}": {}}}}, "more than 4096 times"),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "whitespace_pattern` is not supported"),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "disable_any_whitespace` is not"),
    ({"guided_regex": "a" * 9000}, "has a text of more than 8192 bytes"),
    ({"guided_choice": ["a" * 9000, "b"]}, "has a text of more than 8192 bytes"),
    ({"guided_json": {"const": "a" * 9000}}, "has a text of more than 8192 bytes"),
    ({"guided_regex": "(ab ){60000}"}, "more than 4096 times"),
    ({"guided_json": {"type": "string", "pattern": "^a{1,60000}$"}}, "more than 4096 times"),
    ({"response_format": {"type": "xml"}}, "`response_format.type` must be"),
    ({"response_format": {"type": "json_schema"}}, "`response_format.json_schema.schema` is missing"),
    ({"grammar": {"type": "lark", "value": "x"}}, "`grammar.type` must be"),
    ({"guided_json": 5}, "`guided_json` must be a JSON schema"),
    ({"guided_json": "{"}, "`guided_json` is not valid JSON"),
    ({"guided_json": "[" * 100_000}, "`guided_json` is not valid JSON"),
    ({"guided_regex": ""}, "`guided_regex` must be a text"),
    ({"guided_regex": ["a"]}, "`guided_regex` must be a text"),
    ({"guided_choice": "a"}, "`guided_choice` must be a list"),
    ({"guided_choice": ["a", ""]}, "`guided_choice` must be a list"),
    ({"guided_choice": ["a"] * 5000}, "takes up to 4096 texts"),
    ({"guided_json": DEEP}, f"nested deeper than {MAX_DEPTH} levels"),
    ({"guided_json": {"enum": list(range(MAX_ENUM + 1))}}, f"more than {MAX_ENUM} values"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, f"larger than {MAX_GRAMMAR_BYTES} bytes"),
    ({"guided_regex": "a\0b"}, "contains a NUL character"),
    ({"guided_json": {"const": "\ud800"}}, "contains a lone surrogate"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag` is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), READ, ids=range(len(READ)))
def test_a_grammar_is_read(body: dict[str, Any], expected: tuple[str, Any] | None) -> None:
    fields = StructuredGroup.read(body).grammar_fields()
    assert (None if fields is None else (fields.kind, fields.value)) == expected


@pytest.mark.parametrize(("body", "words"), REJECTED, ids=range(len(REJECTED)))
def test_a_grammar_is_rejected(body: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as rejected:
        StructuredGroup.read(body).grammar_fields()
    assert words in str(rejected.value)


def test_nested_fields_that_are_not_known_are_named() -> None:
    inner = {"name": "x", "strict": True, "schema": SCHEMA, "other": 1}
    body = {"response_format": {"type": "json_schema", "json_schema": inner, "more": 2}}
    assert sorted(StructuredGroup.read(body).ignored()) == ["response_format.json_schema.other", "response_format.more"]
