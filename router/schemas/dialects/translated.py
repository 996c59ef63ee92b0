"""What bodies of other APIs share: each becomes the body of another route; errors are in the words of its API."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lorikeet.router.errors import RouterError, UnsupportedField
from lorikeet.router.schemas.model import Body, Rejected

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


class DialectBody(Body):
    """A body whose further fields are those of another route, which gets them as they are."""

    names: ClassVar[Mapping[str, str]] = {}
    """Fields of the other route, and what they are called here."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        renamed = {name: Rejected(f"is not a field of this route: use `{own}`") for name, own in cls.names.items()}
        cls.rejected = {**{name: row for name, row in renamed.items() if name not in cls.applied}, **cls.rejected}

    def with_others(self, translated: dict[str, Any]) -> dict[str, Any]:
        """`translated` with the fields that this body does not declare."""
        others = {name: value for name, value in (self.__pydantic_extra__ or {}).items() if name not in self.rejected}
        return {**others, **translated}


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


def text_only(where: str, kind: object) -> UnsupportedField:
    """The error for a part of a message that is no text."""
    return UnsupportedField(f"{where}.{str(kind)[:32]}", TEXT_ONLY)


TEXT_ONLY = "is not supported: this model reads text alone"
