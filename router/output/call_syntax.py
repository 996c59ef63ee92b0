"""How a format writes a tool call, as parts that a grammar can be built from: derived from its response template."""

import re
from dataclasses import dataclass
from typing import Any

from lorikeet.router.output.formats import OutputFormat

_sre: Any = re._parser  # type: ignore[attr-defined]  # the only reader of patterns in the standard library


@dataclass(frozen=True)
class Slot:
    """A place for the function's name, a parameter's name or its value."""

    name: str


@dataclass(frozen=True)
class Space:
    """Optional white space."""


Part = str | Slot | Space
NAME, KEY, VALUE = Slot("name"), Slot("key"), Slot("value")


@dataclass(frozen=True)
class CallSyntax:
    """One call is `opening head arguments tail closing`; a list of calls shares its opening and closing."""

    opening: tuple[Part, ...]
    head: tuple[Part, ...]
    tail: str
    closing: tuple[Part, ...] | None
    """None where the end of the output ends the call."""
    repeats: bool
    is_list: bool = False
    parameter: tuple[Part, ...] | None = None
    """How one parameter is written; None where the arguments are a JSON object."""

    @property
    def keys(self) -> tuple[str, str]:
        """Keys of the name and of the arguments in a call's JSON object."""
        name, arguments = re.findall(r'"(\w+)": ', "".join(part for part in self.head if isinstance(part, str)))
        return name, arguments

    @property
    def trigger(self) -> str:
        """The literal that every call starts with, "" without one."""
        first = self.opening[0] if self.opening else ""
        return first if isinstance(first, str) else ""


def syntax_of(form: OutputFormat) -> CallSyntax | None:
    """None for a format whose calls cannot be constrained."""
    try:
        return _syntax(form.template["fields"]["tool_calls"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, re.error, RecursionError):
        return None


def literal_of(field: dict[str, Any], literal: str, pattern: str) -> tuple[Part, ...]:
    """The shortest text that opens or closes a region. Raises ValueError where there is no single one."""
    if (found := field.get(literal)) is not None:
        return (found if isinstance(found, str) else found[0],)
    return parts_of(field[pattern]) if field.get(pattern) is not None else ()


def _closing(field: dict[str, Any]) -> tuple[Part, ...] | None:
    """None where the end of the output ends the call, as where several texts do."""
    if len([field["close"]] if isinstance(field.get("close"), str) else field.get("close", [])) > 1:
        return None
    if "close_pattern" in field and str(_sre.parse(field["close_pattern"], re.DOTALL)[0][0]) == "BRANCH":
        return None
    return literal_of(field, "close", "close_pattern") or None


def _syntax(field: dict[str, Any]) -> CallSyntax:
    opening = literal_of(field, "open", "open_pattern")
    closing = _closing(field)
    repeats = bool(field.get("repeats"))
    if field.get("content") == "xml-inline":
        parameter = parts_of(field["content_args"]["tag_pattern"])
        if _paths(field["transform"]) != ("name", "content") or not {KEY, VALUE} <= set(parameter):
            raise ValueError
        return CallSyntax(opening, (), "", closing, repeats, parameter=parameter)
    if field.get("content") != "json" or field.get("content_args", {}).keys() - {"allow_non_json"}:
        raise ValueError
    if field.get("transform_each"):
        name, arguments = _paths(field["transform"])
        return CallSyntax(opening, _object(name, arguments), "}", closing, repeats, is_list=True)
    name, arguments = _paths(field.get("transform", "{content}"))
    if NAME in opening:
        if (name, arguments) != ("name", "content"):
            raise ValueError
        return CallSyntax(opening, (), "", closing, repeats)
    keys = name.partition("content.")[2], arguments.partition("content.")[2]
    return CallSyntax(opening, _object(*keys), "}", closing, repeats)


def _object(name: str, arguments: str) -> tuple[Part, ...]:
    if not re.fullmatch(r"\w+", name) or not re.fullmatch(r"\w+", arguments):
        raise ValueError
    return (f'{{"{name}": "', NAME, f'", "{arguments}": ')


def _paths(transform: Any) -> tuple[str, str]:
    """Where a transform takes the name and the arguments from."""
    function = transform.get("function", transform) if isinstance(transform, dict) else transform
    if isinstance(function, str):
        path = function.strip("{}")
        return f"{path}.name", f"{path}.arguments"
    return function["name"].strip("{}"), function["arguments"].strip("{}")


def parts_of(pattern: str) -> tuple[Part, ...]:
    """The parts of the shortest text that a pattern matches. Raises ValueError where there is no single one."""
    parts: list[Part] = []
    for part in _of_nodes(_sre.parse(pattern, re.DOTALL)):
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif not (isinstance(part, Space) and parts and parts[-1] == part):
            parts.append(part)
    return tuple(parts)


def _of_nodes(nodes: Any) -> list[Part]:
    names = {number: name for name, number in nodes.state.groupdict.items()}
    parts: list[Part] = []
    for kind, value in nodes:
        match str(kind):
            case "LITERAL":
                parts.append(chr(value))
            case "IN" if str(value[0][0]) == "LITERAL":
                parts.append(chr(value[0][1]))
            case "AT" | "ASSERT" | "ASSERT_NOT":
                pass
            case "BRANCH":
                parts += _of_nodes(value[1][0])
            case "SUBPATTERN":
                number, _, _, inner = value
                parts += [Slot(names[number])] if number in names else _of_nodes(inner)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, _, inner = value
                if _is_space(inner):
                    parts.append("\n" if least else Space())
                else:
                    parts += least * _of_nodes(inner) if least else []
            case _:
                raise ValueError(f"{kind} has no single text")
    return parts


def _is_space(nodes: Any) -> bool:
    return len(nodes) == 1 and (
        str(nodes[0]) == "(IN, [(CATEGORY, CATEGORY_SPACE)])" or nodes[0][1] in (ord(" "), ord("\n"))
    )
