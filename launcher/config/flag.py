"""What a launcher flag is: its name, variable, kind, default and meaning, and how its text becomes a value.

Knows nothing of single flags; the table of them is flags.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How a value is written. The values of the enumeration stand in the documentation."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    BYTES = "bytes"
    SWITCH = "switch"
    BOOLEAN = "true or false"


@dataclass(frozen=True)
class Flag:
    """One row of the table."""

    name: str
    """Without the dashes."""
    kind: Kind
    default: Any
    """None where it is worked out later or there is none; `default_text` then says so."""
    meaning: str
    default_text: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    repeated: bool = False
    separator: str = ","
    """Between the values of a repeated flag in its variable."""
    short: str = ""
    variable: bool = True
    """False for a flag that no environment variable sets."""
    secret: bool = False
    """The value is never shown."""
    no_effect: str = ""
    """Why the flag changes nothing; it is accepted with a warning."""
    no_effect_on: str = ""
    """`cpu` or `cuda`: the flag changes nothing on that device only."""
    refused: str = ""
    """Why the flag is refused, unless its value is one of `harmless`."""
    harmless: tuple[Any, ...] = ()
    lorax: bool = True
    """False for a flag that LoRAX does not have."""
    differs: str = ""
    """What is different from LoRAX on purpose."""

    @property
    def environment(self) -> str:
        """The variable that sets it, or an empty text."""
        return self.name.upper().replace("-", "_") if self.variable else ""

    @property
    def shown_default(self) -> str:
        if self.default_text:
            return self.default_text
        if self.default is None or self.default == ():
            return "–"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    def value(self, text: str) -> Any:
        """The value that `text` stands for. Raises ValueError with the end of a sentence that starts with the flag."""
        value = _READERS[self.kind](text)
        if self.choices and value not in self.choices:
            raise ValueError(f"must be one of {', '.join(self.choices)}, not {text!r}")
        if self.least is not None and value < self.least:
            raise ValueError(f"must be at least {self.least:g}, not {text}")
        if self.most is not None and value > self.most:
            raise ValueError(f"must be at most {self.most:g}, not {text}")
        return value


_TRUE = frozenset({"true", "1", "yes", "y", "on", "t"})
_FALSE = frozenset({"false", "0", "no", "n", "off", "f"})
_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9, "k": 2**10, "m": 2**20}
_UNITS |= {"g": 2**30, "b": 1}


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL byte")
    return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be an integer, not {text!r}") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"must be a number, not {text!r}") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"must be a finite number, not {text!r}")
    return value


def _bytes(text: str) -> int:
    lower = text.strip().lower()
    unit = next((unit for unit in _UNITS if lower.endswith(unit)), "")
    try:
        return int(float(lower.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        raise ValueError(f"must be a number of bytes such as 1073741824, 512MiB or 4GiB, not {text!r}") from None


def _boolean(text: str) -> bool:
    lower = text.strip().lower()
    if lower in _TRUE:
        return True
    if lower in _FALSE:
        return False
    raise ValueError(f"must be true or false, not {text!r}")


_READERS: dict[Kind, Callable[[str], Any]] = {
    Kind.TEXT: _text,
    Kind.INTEGER: _integer,
    Kind.NUMBER: _number,
    Kind.BYTES: _bytes,
    Kind.SWITCH: _boolean,
    Kind.BOOLEAN: _boolean,
}
