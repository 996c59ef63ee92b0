"""A launcher flag: name, variable, kind, default, meaning, the processes that read it, and how its text is parsed.

The table of flags is in `flags`.
"""

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class FlagKind(enum.StrEnum):
    """How a value is written. The values of the enumeration stand in the documentation."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    BYTES = "bytes"
    SWITCH = "switch"
    BOOLEAN = "true or false"


class Process(enum.Flag):
    """Who reads a flag: its value is a field of the configuration of these processes."""

    LAUNCHER = enum.auto()
    """Marks flags of a process that decide in the launcher too, so that they have an effect without that process."""
    ROUTER = enum.auto()
    SHARD = enum.auto()
    LOADER = enum.auto()


TEXT, INTEGER, NUMBER, BYTES, SWITCH, BOOLEAN = FlagKind
LAUNCHER, ROUTER, SHARD, LOADER = Process
NOWHERE = Process(0)


@dataclass(frozen=True)
class Flag:
    """One row of the table."""

    name: str
    """Without the dashes."""
    meaning: str
    kind: FlagKind = FlagKind.TEXT
    default: Any = None
    """None if it is computed later or there is none; `default_text` then describes it."""
    to: Process = NOWHERE
    """The processes whose configuration holds it; none for a flag that only the launcher reads."""
    field_name: str = ""
    """The name there, unless it is that of the flag."""
    computed: bool = False
    """`processes/serving.py` computes the field: it is not simply the flag's value."""
    default_text: str = ""
    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of choices."""
    unset: str = ""
    """A value that is the same as not giving the flag."""
    minimum: float | None = None
    maximum: float | None = None
    repeated: bool = False
    separator: str = ","
    """Between the values of a repeated flag in its variable."""
    must_exist: str = ""
    """`file` or `folder`: the value is the path of one."""
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
    """Why the flag is rejected, unless its value is one of `harmless`."""
    harmless: tuple[Any, ...] = ()
    new: bool = False
    """True for a flag that LoRAX does not have."""
    differs: str = ""
    """What is different from LoRAX on purpose."""
    formerly: str = ""
    """A deprecated name, accepted with a warning."""
    stands_for: str = ""
    """The flag that this one sets: it is that flag's name in another server."""

    @property
    def environment(self) -> str:
        """The variable that sets it, or an empty text."""
        return variable_of(self.name) if self.variable else ""

    @property
    def field(self) -> str:
        """The name of its field in the configuration of `to`."""
        return self.field_name or self.name.replace("-", "_")

    @property
    def shown_default(self) -> str:
        if self.default_text:
            return self.default_text
        if self.default is None or self.default == ():
            return "–"
        if self.kind is FlagKind.BYTES:
            return f"{self.default >> 30}GiB" if self.default >= 2**30 else f"{self.default >> 20}MiB"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default).lower()

    def value(self, text: str) -> Any:
        """The value that `text` stands for. Raises ValueError with the end of a sentence that starts with the flag."""
        if self.unset and text == self.unset:
            return self.default
        value = _READERS[self.kind](self.synonyms.get(text, text))
        if self.choices and value not in self.choices:
            names = ", ".join([*self.choices, *([self.unset] if self.unset else [])])
            raise ValueError(f"must be one of {names}, not {text!r}")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"must be at least {self.minimum:g}, not {text}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"must be at most {self.maximum:g}, not {text}")
        return value


def variable_of(name: str) -> str:
    """The environment variable of a flag."""
    return name.upper().replace("-", "_")


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
    if not math.isfinite(value):
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
    if lower not in _TRUE | _FALSE:
        raise ValueError(f"must be true or false, not {text!r}")
    return lower in _TRUE


_READERS: dict[FlagKind, Callable[[str], Any]] = {
    TEXT: _text,
    INTEGER: _integer,
    NUMBER: _number,
    BYTES: _bytes,
    SWITCH: _boolean,
    BOOLEAN: _boolean,
}
