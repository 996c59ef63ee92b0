"""Typed access to a JSON object: each method reads a field and checks its type; fields that are never read are listed.

An explicit null counts as absence. Type errors have the text of LoRAX's deserializer.
"""

import itertools
import math
import struct
from collections.abc import Iterator
from typing import Any

from lorikeet.router.errors import WrongJsonType
from lorikeet.router.schemas.body import kind_of
from lorikeet.router.schemas.model import are_token_ids

MAX_IGNORED = 32
"""Names of ignored fields in an answer."""


class Fields:
    """One JSON object and its path in the body."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path
        self._left = dict.fromkeys(values)
        self._children: list[Fields] = []

    def take(self, name: str) -> Any:
        """The value of any type, or None."""
        self._left.pop(name, None)
        return self._values.get(name)

    def unread(self) -> list[tuple[str, Any]]:
        """(name, value) of the fields that were not read, without those of child objects."""
        return [(name, self._values[name]) for name in self._left]

    def expect(self, *names: str) -> None:
        """Count fields that are read later as read."""
        for name in names:
            self._left.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def length(self, name: str) -> int:
        """Length of a list, without reading it; 0 for everything else."""
        value = self._values.get(name)
        return len(value) if isinstance(value, list) else 0

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(name, value, "a string")

    def required_text(self, name: str) -> str:
        if name not in self._values:
            raise WrongJsonType(f"{self._prefix()}missing field `{name}`", self._path + name)
        value = self.text(name)
        if value is None:
            raise self._wrong(name, None, "a string")
        return value

    def text_or_ids(self, name: str) -> str | list[int]:
        """A required string, or token ids instead."""
        value = self._values.get(name)
        if isinstance(value, list) and are_token_ids(value):
            return list(self.take(name))
        return self.required_text(name)

    def flag(self, name: str) -> bool:
        """False when absent."""
        return bool(self.optional_flag(name))

    def optional_flag(self, name: str) -> bool | None:
        value = self.take(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(name, value, "a boolean")

    def integer(self, name: str, kind: str) -> int | None:
        """`kind` is a Rust integer type: i32, u32, u64 or usize."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, kind)
        low, high = _RANGES[kind]
        if not low <= value <= high:
            raise WrongJsonType(f"{self._at(name)}invalid value: integer `{value}`, expected {kind}", self._path + name)
        return value

    def number(self, name: str) -> float | None:
        """A finite float32."""
        value = self.take(name)
        return None if value is None else self._float32(name, value)

    def texts(self, name: str) -> list[str]:
        """A list of strings, empty when absent."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, value, "a sequence")
        for index, item in enumerate(value):
            if not isinstance(item, str):
                raise self._wrong(f"{name}[{index}]", item, "a string")
        return value

    def text_or_texts(self, name: str) -> list[str]:
        """A list of strings; a single string is a list of one."""
        value = self._values.get(name)
        if isinstance(value, str):
            self.take(name)
            return [value]
        return self.texts(name)

    def numbers(self, name: str) -> list[float]:
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, value, "a sequence")
        return [self._float32(f"{name}[{index}]", item) for index, item in enumerate(value)]

    def mapping(self, name: str) -> dict[str, Any] | None:
        """An object as it is."""
        value = self.take(name)
        if value is None or isinstance(value, dict):
            return value
        raise self._wrong(name, value, "a map")

    def child(self, name: str) -> "Fields":
        """An object whose fields are read one by one; empty when absent."""
        return self.nested(name, self.mapping(name) or {})

    def nested(self, name: str, values: dict[str, Any]) -> "Fields":
        """An object at `name`, such as `messages[0]`, whose fields are read one by one."""
        child = Fields(values, f"{self._path}{name}.")
        self._children.append(child)
        return child

    def ignored(self) -> list[str]:
        """Names of the fields that were never read, in child objects too; at most MAX_IGNORED."""
        return list(itertools.islice(self._ignored(), MAX_IGNORED))

    def _ignored(self) -> Iterator[str]:
        for name in self._left:
            yield self._path + name
        for child in self._children:
            yield from child._ignored()

    def _float32(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "f32")
        number = float(value)
        try:
            number = struct.unpack("f", struct.pack("f", number))[0]
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            message = f"{self._at(name)}invalid value: {kind_of(value)}, expected f32"
            raise WrongJsonType(message, self._path + name)
        return number

    def _wrong(self, name: str, value: Any, expected: str) -> WrongJsonType:
        return WrongJsonType(f"{self._at(name)}invalid type: {kind_of(value)}, expected {expected}", self._path + name)

    def _at(self, name: str) -> str:
        return f"{self._path}{name}: "

    def _prefix(self) -> str:
        return f"{self._path[:-1]}: " if self._path else ""


_RANGES = {"i32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1), "u64": (0, 2**64 - 1), "usize": (0, 2**64 - 1)}
