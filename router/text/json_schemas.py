"""JSON schemas as llguidance enforces them exactly: what means the same in other words is rewritten, and what it cannot
enforce is refused, or left out where nobody asked for strictness.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any, TypeGuard
from urllib.parse import quote

MAX_EXACT = 2**53
"""Numbers beyond it are rounded by llguidance, which reads them as float64."""
MAX_INTEGER = 2**63 - 1024
"""The largest float64 below 2^63: the bound of integers without one of their own."""
_MAX_MULTIPLE = 1000
"""A larger `multipleOf` together with bounds is too complex."""
_SCHEMAS = frozenset(("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains",
                      "propertyNames", "unevaluatedProperties", "unevaluatedItems"))  # fmt: skip
_LISTS = frozenset(("anyOf", "allOf", "oneOf", "prefixItems", "items"))
_MAPPINGS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_UNENFORCED = frozenset(("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames",
                         "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties",
                         "unevaluatedItems"))  # fmt: skip
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_ASSERTED_FORMATS = frozenset(("idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template",
                               "json-pointer", "relative-json-pointer"))  # fmt: skip
"""Formats that JSON Schema defines and no grammar enforces."""
_ENFORCED_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
                               "uri", "unknown"))  # fmt: skip


class SchemaError(ValueError):
    """The message names the keyword that cannot be enforced, and where it is."""


def enforced(schema: Any, is_strict: bool = True) -> tuple[Any, list[str]]:
    """The schema as the grammar engine takes it, and the paths of what was left out of one that is not strict.

    Raises SchemaError. What it returns is left as it is when it is passed again.
    """
    reader = _Reader(is_strict)
    return reader.schema(schema, ""), reader.left_out


@dataclass
class _Reader:
    is_strict: bool
    left_out: list[str] = field(default_factory=list)

    def schema(self, value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            return value
        made: dict[str, Any] = {}
        also: list[Any] = []
        for name, member in value.items():
            at = f"{path}.{name}" if path else name
            if name == "pattern" and isinstance(member, str):
                also += self._pattern(made, member, at)
            elif name in _UNENFORCED:
                self._refuse(at, f"the keyword `{name}`")
            elif name in _MAPPINGS and isinstance(member, dict):
                made[name] = self._mapping(name, member, at)
            elif name in _LISTS and isinstance(member, list):
                made[name] = [self.schema(item, f"{at}[{index}]") for index, item in enumerate(member)]
            elif name in _SCHEMAS:
                made[name] = self.schema(member, at)
            else:
                self._keyword(made, name, member, at)
        if "oneOf" in made and not self.is_strict:
            self.left_out.append(f"{path}.oneOf" if path else "oneOf")
            also.append({"anyOf": made.pop("oneOf")})
        if also:
            made["allOf"] = [*made.get("allOf", ()), *also]
        self._numbers(made, path)
        return made

    def _refuse(self, path: str, what: str, instead: str = "") -> None:
        if self.is_strict:
            raise SchemaError(f"{what} cannot be enforced, at {path}{instead and f': {instead}'}")
        self.left_out.append(path)

    def _mapping(self, name: str, values: dict[str, Any], path: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, member in values.items():
            own = key
            if name == "patternProperties":
                try:
                    own = translated(key)
                except PatternError as problem:
                    self._refuse(f"{path}.{key}", str(problem))
                    continue
            made[own] = self.schema(member, f"{path}.{key}")
        return made

    def _keyword(self, made: dict[str, Any], name: str, value: Any, path: str) -> None:
        """A keyword that has no schema in it."""
        if name == "uniqueItems":
            if value is not False:
                self._refuse(path, "the keyword `uniqueItems`")
        elif name == "format":
            if value in _ASSERTED_FORMATS:
                self._refuse(path, f"the format `{value}`")
            elif value in _ENFORCED_FORMATS:
                made[name] = value
        elif name == "$ref" and isinstance(value, str):
            if value.startswith("#"):
                made[name] = quote(value, safe="#/%~!$&'()*+,;=:@?-._")
            else:
                self._refuse(path, f"the reference {value[:200]} to another document")
        elif name in ("enum", "const"):
            large = next((number for number in _numbers_in(value) if abs(number) > MAX_EXACT), None)
            if large is None:
                made[name] = value
            else:
                shown = str(large) if isinstance(large, int) else f"{large:.0f}"
                self._refuse(path, f"the number {shown}, beyond 2^53,", "use a string")
        elif name in _COUNTS and isinstance(value, float) and value.is_integer():
            made[name] = int(value)
        else:
            made[name] = value

    def _pattern(self, made: dict[str, Any], pattern: str, path: str) -> list[Any]:
        """Schemas that replace the pattern; it is only translated where one pattern means the same."""
        try:
            choices = [[translated(part) for part in every] for every in alternatives(pattern)]
        except PatternError as problem:
            self._refuse(path, f"{problem}, in a pattern")
            return []
        if len(choices) == 1 and len(choices[0]) == 1:
            made["pattern"] = choices[0][0]
            return []
        every = [{"allOf": [{"pattern": part} for part in parts]} for parts in choices]
        return every if len(every) == 1 else [{"anyOf": every}]

    def _numbers(self, made: dict[str, Any], path: str) -> None:
        """Bounds that are exact in float64, and such bounds where an integer has none."""
        kinds = made.get("type")
        types = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
        is_integer = "integer" in types and "number" not in types
        for name, sign in (("minimum", 1), ("maximum", -1)):
            other = "exclusiveM" + name[1:]
            if is_integer and _is_number(made.get(other)):
                edge = sign * (math.floor(sign * made.pop(other)) + 1)
                made[name] = edge if not _is_number(made.get(name)) else sign * max(sign * edge, sign * made[name])
            for key in (name, other):
                if _is_number(made.get(key)):
                    self._bound(made, key, sign, path)
        low, high = made.get("minimum"), made.get("maximum")
        if _is_number(low) and _is_number(high) and low >= high and max(abs(low), abs(high)) > MAX_EXACT:
            self._drop_bounds(made, f"{path}.minimum" if path else "minimum")
        is_simple = not _is_number(made.get("multipleOf")) or made["multipleOf"] <= _MAX_MULTIPLE
        if is_integer and is_simple and "enum" not in made and "const" not in made:
            made.setdefault("minimum", -MAX_INTEGER)
            made.setdefault("maximum", MAX_INTEGER)

    def _bound(self, made: dict[str, Any], name: str, sign: int, path: str) -> None:
        """Round a bound inwards to a float64 within 64 bits. `sign` is 1 for a lower bound."""
        value = made[name]
        if sign * value > MAX_INTEGER:
            self._drop_bounds(made, f"{path}.{name}" if path else name)
        elif sign * value < -MAX_INTEGER:
            made[name] = -sign * MAX_INTEGER
        elif isinstance(value, int) and abs(value) > MAX_EXACT:
            rounded = int(float(value))
            if sign * rounded < sign * value:
                rounded = int(math.nextafter(float(value), sign * math.inf))
            made[name] = rounded

    def _drop_bounds(self, made: dict[str, Any], path: str) -> None:
        self._refuse(path, "a range of numbers beyond 64 bits, or of one number beyond 2^53,")
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            made.pop(name, None)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers_in(value: Any) -> list[int | float]:
    """All whole numbers in a value of an `enum` or `const`."""
    numbers: list[int | float] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()
        elif _is_number(item):
            numbers.append(item)
    return numbers


_RANGES = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
          (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
}  # fmt: skip
"""Characters of ECMA-262's classes."""
_LAST = 0x10FFFF


def _character(code: int) -> str:
    return f"\\u{code:04X}" if code < 0x10000 else f"\\u{{{code:X}}}"


def _classes() -> dict[str, str]:
    """What is written for each class inside of another one."""
    classes: dict[str, str] = {}
    for name, ranges in _RANGES.items():
        bounds = [-1, *(bound for low, high in ranges for bound in (low, high)), _LAST + 1]
        others = [(bounds[at] + 1, bounds[at + 1] - 1) for at in range(0, len(bounds), 2)]
        for letter, intervals in ((name, ranges), (name.upper(), others)):
            classes[letter] = "".join(f"{_character(low)}-{_character(high)}" for low, high in intervals)
    return classes


_CLASSES = _classes()
_ANY = r"[^\n\r\u2028\u2029]"
_ESCAPES = {"t": r"\t", "n": r"\n", "r": r"\r", "v": r"\u000B", "f": r"\u000C", "0": r"\u0000"}
_TOKEN = re.compile(
    r"\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u(?P<u>[0-9a-fA-F]{4})|\\u\{(?P<code>[0-9a-fA-F]+)\}|\\x(?P<x>[0-9a-fA-F]{2})|\\c(?P<control>[A-Za-z])"
    r"|\\(?P<property>[pP]\{[^}]*\})|\\k<[^>]*>|\\(?P<escaped>.)"
    r"|(?P<empty>\[\^?\])|(?P<group>\(\?(?:<?[=!]|<(?=[A-Za-z_$])|:)?)|(?P<count>\{\d+(?:,\d*)?\})|(?P<letter>.)",
    re.DOTALL,
)
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"(?:(?P<places>\\d\*\\\.\?\\d(?:\*|\{0,\d+\}0\*))\$"
    r"|\(\?:(?P<whole>\\d\{0,\d+\})\|\(\?=(?P<all>\[\\d\.\]\{1,\d+\})0\*\$\)(?P<part>\\d(?:\*|\{0,\d+\})\\\.\\d(?:\*|\{0,\d+\}))0\*\$\))"
)
"""What pydantic writes for a Decimal."""


class PatternError(ValueError):
    """The message says what in the pattern cannot be enforced."""


def alternatives(pattern: str) -> list[list[str]]:
    """Patterns without look-around that together mean `pattern`: any of the lists, and all of that list.

    Only what pydantic writes for a Decimal has more than one.
    """
    match = _DECIMAL.fullmatch(pattern)
    if match is None:
        return [[pattern]]
    has_digit, start = "[0-9]", r"^[+-]?0*"
    if match["places"] is not None:
        return [[has_digit, f"{start}{match['places']}$"]]
    whole = [has_digit, f"{start}{match['whole']}$"]
    return [whole, [has_digit, f"{start}{match['part']}0*$", f"{start}{match['all']}0*$"]]


def translated(pattern: str) -> str:
    """The pattern in Rust's syntax. Raises PatternError for what a grammar cannot express."""
    terms: list[str] = []
    in_class = False
    for token in _TOKEN.finditer(pattern):
        terms.append(_in_class(token) if in_class else _outside(token))
        if token["letter"] == ("]" if in_class else "[") or (in_class and token["empty"]):
            in_class = not in_class
    return "".join(terms)


def _outside(token: re.Match[str]) -> str:
    if token["group"] in ("(?=", "(?!", "(?<=", "(?<!"):
        raise PatternError(f"look-around, {token['group']}…)")
    if token["escaped"] in ("b", "B"):
        raise PatternError(f"the word boundary \\{token['escaped']}")
    if ((token["escaped"] or "").isdigit() and token["escaped"] != "0") or token[0].startswith(r"\k<"):
        raise PatternError(f"the back-reference {token[0]}")
    if token["empty"]:
        return r"[\u0000-\u{10FFFF}]" if token["empty"] == "[^]" else r"[^\u0000-\u{10FFFF}]"
    if token["escaped"] in _CLASSES:
        return f"[{_CLASSES[token['escaped']]}]"
    if token["letter"] == ".":
        return _ANY
    if token["letter"] in ("{", "}"):
        return "\\" + token["letter"]
    return _common(token)


def _in_class(token: re.Match[str]) -> str:
    if token["escaped"] == "b":
        return r"\u0008"
    if token["escaped"] in _CLASSES:
        return _CLASSES[token["escaped"]]
    if token["letter"] in ("[", "&", "~"):
        return "\\" + token["letter"]
    if token["empty"] or token["group"] or token["count"]:
        return "".join("\\" + letter if letter in "[]{}()?&~" and letter != "]" else letter for letter in token[0])
    return _common(token)


def _common(token: re.Match[str]) -> str:
    """What means the same inside and outside of a class."""
    if token["high"]:
        high, low = int(token["high"], 16), int(token["low"], 16)
        return _character(0x10000 + ((high - 0xD800) << 10) + low - 0xDC00)
    if code := token["u"] or token["code"] or token["x"]:
        return _character(int(code, 16))
    if token["control"]:
        return _character(ord(token["control"]) % 32)
    escaped = token["escaped"]
    if escaped is None:
        return token[0]
    if escaped in _ESCAPES:
        return _ESCAPES[escaped]
    return escaped if escaped.isalnum() or escaped.isspace() else re.escape(escaped)
