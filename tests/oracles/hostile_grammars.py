"""Grammars that try to stop a server, from a seed: deep, huge, recursive, slow, invalid, and of wrong types."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
import regex

Fields = dict[str, Any]
PATTERNS = (
    "(a*)*b", "(a|a)*c", "(x+x+)+y", "(.*a.{9}){3}", "([a-z]{1,90}){1,90}", "(([a-z]*)[0-9]*){1,400}",
    "(a|b|ab)*c(a|b){99}d", "[a-z]{4096}", "(?:[a-z]{1,50} ){4000}", "(.*a.{12}.*b){2}", "(a?){300}a{300}",
    "((a|b)?){999}", "(.*){60}", "(a{1,60}){1,60}b", "(a", "a)", "[z-a]", "a{9,2}", "a{60000}", "a{1,99999}",
    "(?<=a)b", "(?=a)b", "(a)\\1", "\\p{Unknown}", "*a", "\\", "(?P<n>a", "a\0b", "\ud800", "\udfff+", "[\ud83d]",
    "(?i:k+)", "(?s:.{200})", "\\b\\w+\\b",
)  # fmt: skip
GRAMMARS = (
    's: s s | "a" | s s s |', 's: "(" s ")" | s s | "x" |', "s: a\na: b\nb: s", 's: T\nT: ~/(.*a.{8})/',
    "s: T\nT: /[a-z]*/ & /.*q.{8}/", 's: t | "a"', 's: /(/', 's: "a', "s: %json {", 's: %json {"not": {}}',
    "s: T\nT: /a/ U\nU: /b/ T", "%ignore /.*/\ns: /a/", "s: \"\ud800\"", 's: "\0"', "", "s:",
    "root ::= root root | \"a\"", "root ::= \"(\" root \")\" |", "s: s{1,2000}", 's: ("a"? "b"?){1,900}',
    "s: <unknown_token>", "s: <[0-99999999]>", 's[max_tokens=0]: "a"', "%llguidance {\"no_forcing\": true}\ns: /a/",
)  # fmt: skip
NO_TYPES: tuple[Any, ...] = (
    5, -1.5, [], [[]], {}, {"type": 7}, {"properties": 3}, {"items": "a"}, {"enum": 1}, {"enum": []},
    {"required": "a"},
)  # fmt: skip
KEYWORDS: Fields = {
    "type": ["string", "integer", "object", ["null", "array"], "text", 4, [], None],
    "minLength": [-1, 3, 1e300, "3", 10**30], "maxLength": [0, 2, -3, 1 << 40], "minItems": [4000, 10**12, 2.5],
    "maxItems": [0, 1, 10**9], "minimum": [5, 1e308, "a", -(10**40)], "maximum": [3, -1e308, 0.1],
    "multipleOf": [0, -3, 1e-300, 7, 99991, 0.000137], "pattern": list(PATTERNS),
    "format": ["date-time", "email", "uuid", "regex", "no-format", 8], "enum": [[1, 1], [{}], [[[]]], ["\ud800"]],
    "const": [None, "\0", "x" * 9000, {"a": {}}],
    "$ref": ["#", "#/$defs/a", "#/nowhere", "http://127.0.0.1:1/a", "file:///etc/passwd", 6],
    "x-guidance": [{"lenient": True}, {"whitespace_pattern": ".*"}, {"unknown": 1}, 5],
    "not": [{}, {"type": "string"}], "uniqueItems": [True],
    "additionalProperties": [True, False, {"type": "integer"}, 4],
    "patternProperties": [{"^a": {}, "^ab": {}}, {"(a*)*b": {}}, 4], "required": [["a", "a"], ["missing"], 3],
    "propertyNames": [{"pattern": "^a"}], "if": [{}], "unevaluatedProperties": [False], "minProperties": [3, -1],
    "dependentRequired": [{"a": ["b"]}], "$schema": ["http://json-schema.org/draft-04/schema#", "x"], "$id": ["a"],
}  # fmt: skip


@dataclass(frozen=True)
class Hostile:
    """Fields of one request, and what an answer may be."""

    fields: Fields
    kind: str
    value: Any

    def is_wrong(self, text: str) -> bool:
        """Whether a finished output does not match the grammar. Lark grammars have no second implementation here."""
        if self.kind == "choice":
            return text not in self.value
        if self.kind == "regex":
            try:
                return regex.fullmatch(self.value, text, timeout=5) is None
            except (TimeoutError, regex.error):
                return False
        if self.kind == "schema":
            parsed = json.loads(text)
            try:
                jsonschema.validate(parsed, self.value)
            except jsonschema.ValidationError:
                return True
            except Exception:  # no valid schema: `jsonschema` says nothing about the text
                return False
        return False


class HostileSource:
    """A stream of them. Equal seeds give equal ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> Hostile:
        draw = self._random.choice(
            (
                self._schema,
                self._schema,
                self._pattern,
                self._grammar,
                self._choice,
                self._deep,
                self._huge,
                self._recursive,
                self._typed,
            )
        )
        return draw()

    def _as_schema(self, value: Any) -> Hostile:
        dialects: tuple[Callable[[Any], Fields], ...] = (
            lambda value: {"response_format": {"type": "json_object", "schema": value}},
            lambda value: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}},
            lambda value: {"guided_json": value},
            lambda value: {"structured_outputs": {"json": value}},
            lambda value: {"grammar": {"type": "json", "value": value}},
        )
        return Hostile(self._random.choice(dialects)(value), "schema", value)

    def _schema(self) -> Hostile:
        """Keywords that contradict each other, or that nobody has heard of."""
        return self._as_schema(self._keywords(2))

    def _keywords(self, depth: int) -> Fields:
        drawn = self._random
        found = {name: drawn.choice(KEYWORDS[name]) for name in drawn.sample(sorted(KEYWORDS), drawn.randint(1, 4))}
        if depth:
            found |= {
                drawn.choice(("items", "additionalProperties")): self._keywords(depth - 1),
                drawn.choice(("anyOf", "oneOf", "allOf")): [
                    self._keywords(depth - 1) for _ in range(drawn.randint(1, 3))
                ],
                "properties": {name: self._keywords(depth - 1) for name in drawn.sample("abc", drawn.randint(0, 2))},
            }
            found = {name: found[name] for name in drawn.sample(sorted(found), drawn.randint(1, len(found)))}
        return found

    def _pattern(self) -> Hostile:
        drawn = self._random
        value = drawn.choice(("", "{}", "({})*", "({}){{1,60}}", "({})|.*", "x{}y")).format(drawn.choice(PATTERNS))
        if drawn.random() < 0.3:
            return self._as_schema(
                {"type": "object", "properties": {"a": {"type": "string", "pattern": value}}, "required": ["a"]}
            )
        return Hostile(
            drawn.choice(({"guided_regex": value}, {"grammar": {"type": "regex", "value": value}})), "regex", value
        )

    def _grammar(self) -> Hostile:
        value = self._random.choice(GRAMMARS).replace("s:", "start:", 1)
        return Hostile({self._random.choice(("guided_grammar", "ebnf")): value}, "grammar", value)

    def _choice(self) -> Hostile:
        drawn = self._random
        number, size = drawn.choice((1, 500, 4096, 4097)), drawn.choice((1, 40, 9000))
        letters = drawn.choice(("ab", 'a\n"', "é€😀", "\ud800", "a\0"))
        value = ["".join(drawn.choices(letters, k=size)) + str(each) for each in range(min(number, 300_000 // size))]
        return Hostile({"guided_choice": value}, "choice", value)

    def _deep(self) -> Hostile:
        drawn = self._random
        value: Any = {"type": "string", "maxLength": 3}
        for _ in range(drawn.choice((5, 20, 40, 200, 400))):
            value = drawn.choice((
                {"type": "object", "properties": {"a": value}, "required": ["a"]},
                {"type": "array", "items": value, "maxItems": 3},
                {"anyOf": [value, {"type": "null"}]},
                {"allOf": [value]},
            ))  # fmt: skip
        return self._as_schema(value)

    def _huge(self) -> Hostile:
        drawn = self._random
        size = drawn.choice((300, 1500, 4000, 30_000))
        numbers = range(size)
        values: tuple[Callable[[], Any], ...] = (
            lambda: {"enum": [f"value {each} {'y' * (each % 30)}" for each in numbers]},
            lambda: {"properties": {f"name{each}": {"type": "string", "maxLength": each} for each in numbers}},
            lambda: {"anyOf": [{"properties": {f"k{each}": {"const": each}}, "required": ["k1"]} for each in numbers]},
            lambda: {"oneOf": [{"const": each} for each in numbers]},
            lambda: {"allOf": [{"type": "string", "pattern": f"a{{{each}}}"} for each in range(size // 100)]},
            lambda: {"type": "array", "prefixItems": [{"type": "integer", "minimum": each} for each in numbers]},
            lambda: {"$defs": {f"d{each}": {"$ref": f"#/$defs/d{each + 1}"} for each in numbers}, "$ref": "#/$defs/d0"},
        )
        return self._as_schema(drawn.choice(values)())

    def _recursive(self) -> Hostile:
        drawn = self._random
        width = drawn.randint(1, 4)
        names = [f"n{each}" for each in range(width)]
        node = lambda name: {"$ref": f"#/$defs/{name}"}
        makers: tuple[Callable[[], Any], ...] = (
            lambda: {"anyOf": [node(drawn.choice(names)) for _ in range(3)]},
            lambda: {"type": "array", "items": node(drawn.choice(names))},
            lambda: {"properties": {each: node(drawn.choice(names)) for each in "abc"}, "required": ["a"]},
            lambda: {"type": "object", "additionalProperties": node(drawn.choice(names))},
            lambda: {"allOf": [node(drawn.choice(names)), node(drawn.choice(names))]},
        )  # fmt: skip
        return self._as_schema({"$defs": {name: drawn.choice(makers)() for name in names}, **node(names[0])})

    def _typed(self) -> Hostile:
        drawn = self._random
        value = drawn.choice(NO_TYPES)
        name = drawn.choice(
            ("response_format", "guided_json", "guided_regex", "guided_choice", "grammar", "structured_outputs", "ebnf")
        )
        return Hostile({name: value}, "none", value)


def hostile(number: int, seed: int) -> list[Hostile]:
    """`number` of them."""
    source = HostileSource(seed)
    return [source.next() for _ in range(number)]
