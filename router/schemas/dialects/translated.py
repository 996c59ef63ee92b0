"""A body of another API as the body of a chat completion, and errors about it in the words of that API."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lorikeet.router.errors import RouterError, UnsupportedField, ValidationError
from lorikeet.router.schemas.fields import Fields

_ROOT = re.compile(r"[a-z_]+")


@dataclass
class Translated:
    """One request."""

    chat: dict[str, Any]
    """The body of a chat completion."""
    shown: dict[str, Any] = field(default_factory=dict)
    """What the answer repeats of the request."""
    ignored: list[str] = field(default_factory=list)
    """Fields that are not applied, besides those of `chat`."""


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field of the chat's body name that of the request instead: `names` has one for another."""
    try:
        yield
    except RouterError as error:
        found = _ROOT.match(error.param or "")
        if found is not None and error.param is not None and (own := names.get(found[0])) is not None:
            given, error.param = error.param, own
            error.message = error.message.replace(f"`{given}`", f"`{own}`")
            error.args = (error.template.format(error.message),)
        raise


def refuse_others(fields: Fields, others: Mapping[str, str]) -> None:
    """Raises UnsupportedField for a field of chat completions that this API calls otherwise."""
    for name, own in others.items():
        if fields.has(name):
            raise UnsupportedField(name, f"is not a field of this route: use `{own}`")


def pass_others(fields: Fields, chat: dict[str, Any]) -> list[str]:
    """Pass on the fields that were not read, which are those of chat completions; the ignored ones in objects."""
    for name, value in fields.unread():
        chat.setdefault(name, value)
        fields.take(name)
    return fields.ignored()


def items_of(value: Any, where: str) -> list[Any]:
    """A list. Raises ValidationError."""
    if not isinstance(value, list):
        raise ValidationError(f"`{where}` must be a list", where)
    return value


def object_of(value: Any, where: str) -> dict[str, Any]:
    """An object. Raises ValidationError."""
    if not isinstance(value, dict):
        raise ValidationError(f"`{where}` must be an object", where)
    return value


def text_of(value: Any, where: str) -> str:
    """A text. Raises ValidationError."""
    if not isinstance(value, str):
        raise ValidationError(f"`{where}` must be a string", where)
    return value
