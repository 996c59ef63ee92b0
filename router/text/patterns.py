"""Regular expressions of JSON schemas, which are ECMA-262's, as llguidance takes them: as Rust's `regex` does."""

import re

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
        for letter, each in ((name, ranges), (name.upper(), others)):
            classes[letter] = "".join(f"{_character(low)}-{_character(high)}" for low, high in each)
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
    found = _DECIMAL.fullmatch(pattern)
    if found is None:
        return [[pattern]]
    has_digit, start = "[0-9]", r"^[+-]?0*"
    if found["places"] is not None:
        return [[has_digit, f"{start}{found['places']}$"]]
    whole = [has_digit, f"{start}{found['whole']}$"]
    return [whole, [has_digit, f"{start}{found['part']}0*$", f"{start}{found['all']}0*$"]]


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
        return "".join("\\" + each if each in "[]{}()?&~" and each != "]" else each for each in token[0])
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
