"""Configuration files of processes: a frozen dataclass, written as JSON by the launcher and read at start. Also numbers
in the headers, queries and configurations of others.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, get_type_hints


class ConfigFile:
    """Base of a dataclass that is read from JSON. Lists become tuples; fields of this kind are read in the same way."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the file at `path`. Raises OSError, and ValueError that names unknown fields."""
        return cls.from_dict(json.loads(Path(path).read_text()))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Raises ValueError that names unknown fields."""
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})  # type: ignore[arg-type]
        if unknown:
            raise ValueError(f"unknown {cls.__name__} fields: {', '.join(unknown)}")
        kinds = get_type_hints(cls)
        return cls(**{name: _converted(kinds[name], value) for name, value in values.items()})


def _converted(kind: Any, value: Any) -> Any:
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, ConfigFile):
        return kind.from_dict(value)
    return tuple(value) if isinstance(value, list) else value


MAX_DIGITS = 18


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that `text` writes in ASCII digits, from `least` to `most`; None for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        return None
    number = int(text)
    return number if least <= number <= most else None


def is_number(value: Any, most: float) -> bool:
    """Whether a value of a configuration is a number between `-most` and `most`, so neither infinite nor NaN."""
    # compared first: an integer of any size compares with a float, but cannot become one
    return type(value) in (int, float) and abs(value) <= most
