"""How an output writes its reasoning, from its response template and from where the prompt ends."""

from typing import Any

from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.output.call_syntax import Part, literal_of
from lorikeet.router.output.formats import OutputFormat
from lorikeet.router.text.reasoning import Reasoning, Start


def reasoning_of(form: OutputFormat, prompt: str, open_field: str | None) -> Reasoning | None:
    """None for a format without reasoning. `open_field` is the region in which the prompt ends.

    Raises ChatTemplateError where the prompt opens a reasoning of which no text is known that closes it.
    """
    name = form.reasoning_field
    if not name:
        return None
    field = form.template["fields"][name]
    opening, closings = _text(field, "open"), _closings(field)
    is_open = open_field == name
    if not closings or not (opening or is_open):
        if is_open:
            raise ChatTemplateError(f"the response template has no text that closes `{name}`")
        return None
    is_closed = prompt.rstrip().endswith(closings)
    start = Start.OPEN if is_open else Start.CLOSED if is_closed else Start.FREE
    text_opening = _text(form.text_field or {}, "open")
    return Reasoning(opening, closings, start, tuple(each for each in (form.next_part, text_opening) if each))


def text_opening(form: OutputFormat) -> str:
    """What the text of an answer begins with, where it has a mark of its own."""
    return _text(form.text_field or {}, "open")


def _closings(field: dict[str, Any]) -> tuple[str, ...]:
    """The texts that close a region, none where a pattern has no single one."""
    close = field.get("close")
    if isinstance(close, list):
        return tuple(each for each in close if isinstance(each, str) and each)
    text = _text(field, "close")
    return (text,) if text else ()


def _text(field: dict[str, Any], name: str) -> str:
    """The single text that opens or closes a region, "" where there is none."""
    try:
        parts: tuple[Part, ...] = literal_of(field, name, f"{name}_pattern")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError):
        return ""
    return "".join(part for part in parts if isinstance(part, str)) if all(isinstance(p, str) for p in parts) else ""
