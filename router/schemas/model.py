"""What the bodies of all routes are: pydantic models whose classes say of each field what the server does with it.

An annotated field is applied. `Rejected` and `Ignored` declare the others: a field that would change the text or the
answer is rejected with an error that names it, unless its value asks for nothing; every other field is ignored and
named in `x-ignored-fields`. The routes, `/openapi.json` and docs/fields.md all use these classes.
"""

import math
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import annotated_types
import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, PlainValidator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lorikeet.router.errors import RouterError, UnsupportedField, ValidationError, WrongJsonType

MAX_IGNORED = 32
"""Names of ignored fields in an answer."""


class Rejected:
    """A field that is not supported and would change the text or the answer."""

    def __init__(self, reason: str = "is not supported by this server", neutral: tuple[Any, ...] = ()) -> None:
        """`reason` ends the error, which begins with the field's name. Values of `neutral` ask for nothing, like
        null.
        """
        self.reason = reason
        self.neutral = neutral

    def asks(self, value: Any) -> bool:
        """Whether the value asks for something. True and 1 are different values, 1 and 1.0 are the same one."""
        return value is not None and not any(is_same(value, neutral) for neutral in self.neutral)


class Ignored:
    """A field that changes nothing; `note` is for the documentation."""

    def __init__(self, note: str = "") -> None:
        self.note = note


def is_same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are equal; a boolean equals no number."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


@dataclass(frozen=True)
class Rule:
    """Words of the error for a value outside of a field's constraints, which otherwise are made from the constraints.

    The error is "`name` {words}"; `{given}` stands for the value.
    """

    words: str
    not_positive: str = ""
    """Words for numbers up to 0, where they differ."""


@dataclass(frozen=True)
class Missing:
    """The error for a required field that is absent; `{name}` stands for the field."""

    message: str


@dataclass(frozen=True)
class UnknownKind:
    """For a list with items of several kinds: the end of the error for any other kind, which names its place."""

    reason: str


@dataclass(frozen=True)
class _Bounds:
    """An integer type of LoRAX. A number outside of it has the wrong type."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {"ge": self.low, "le": self.high, **handler(source)}


@dataclass(frozen=True)
class OneOf:
    """Type of a text that is one of some, which are known only when the program runs."""

    values: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.values))


class _FailFast:
    """A list ends at its first error: one that is as long as the body permits has as many."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


fail_fast = _FailFast()
Texts = Annotated[list[str], fail_fast]
I32 = Annotated[int, _Bounds(-(2**31), 2**31 - 1)]
U32 = Annotated[int, _Bounds(0, 2**32 - 1)]
U64 = Annotated[int, _Bounds(0, 2**64 - 1)]


def _float32(value: Any) -> Any:
    """A number as it is sent to shards."""
    if type(value) not in (int, float):
        return value
    try:
        number: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise PydanticCustomError("float32", "Input should be a finite 32-bit floating point number")
    return number


F32 = Annotated[float, BeforeValidator(_float32)]


def published_as(shown: Any) -> PlainValidator:
    """Annotation of a value of any type, which its body checks itself; the documentation shows it as `shown`."""
    return PlainValidator(lambda value: value, json_schema_input_type=shown)


def are_token_ids(items: list[Any]) -> bool:
    """Whether all items could be token ids, of any vocabulary."""
    return set(map(type, items)) == {int} and min(items) >= 0 and max(items) < 2**31


BodyType = TypeVar("BodyType", bound="Body")


class Body(BaseModel):
    """A JSON object: a body, or an object in it. An explicit null counts as absence."""

    model_config = ConfigDict(strict=True, extra="allow", ignored_types=(Rejected, Ignored), protected_namespaces=())

    applied: ClassVar[Mapping[str, FieldInfo]] = {}
    """The fields that are read, by their names in JSON."""
    rejected: ClassVar[Mapping[str, Rejected]] = {}
    nested: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that hold bodies, or lists of bodies."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.applied = {info.alias or name: info for name, info in cls.model_fields.items()}
        cls.rejected = {name: value for name, value in cls.declared() if isinstance(value, Rejected)}
        cls.nested = tuple(name for name, info in cls.model_fields.items() if bodies_in(info.annotation))

    @classmethod
    def declared(cls) -> Iterator[tuple[str, "FieldInfo | Rejected | Ignored"]]:
        """Every field with what the class says of it, those of base classes first."""
        own = [base for base in reversed(cls.__mro__) if issubclass(base, Body) and base is not Body]
        for name in dict.fromkeys(name for base in own for name in (*base.__dict__, *base.__annotations__)):
            value = cls.model_fields.get(name) or next(
                (base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None
            )
            if isinstance(value, FieldInfo):
                yield value.alias or name, value
            elif isinstance(value, Rejected | Ignored):
                yield name, value

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, values: Any) -> Any:
        if type(values) is dict and None in values.values():
            return {name: value for name, value in values.items() if value is not None or name not in cls.applied}
        return values

    @classmethod
    def read(cls: type[BodyType], values: Any, context: Any = None) -> BodyType:
        """Raises WrongJsonType; BrokenRule for a value that a field does not permit; and what its rules raise."""
        try:
            return cls.model_validate(values, context=context)
        except pydantic.ValidationError as error:
            failure = _failure(cls, error)
        try:
            raise failure  # outside of the handler: pydantic's error holds the body
        finally:
            del failure  # its traceback holds this frame, so that both would stay until garbage is collected

    def unsupported(self) -> Iterator[tuple[str, Rejected]]:
        """The rejected fields of this object that ask for something."""
        for name, value in (self.__pydantic_extra__ or {}).items():
            if (row := self.rejected.get(name)) is not None and row.asks(value):
                yield name, row

    def check_supported(self, path: str = "") -> None:
        """Raises UnsupportedField for the first rejected field; `path` precedes its name in the error."""
        for name, row in self.unsupported():
            raise UnsupportedField(path + name, row.reason)

    def ignored(self, path: str = "") -> list[str]:
        """Paths of the fields that are not applied, without those that are rejected and ask for nothing. At most
        MAX_IGNORED.
        """
        return [*(path + name for name in self._unread()), *self.nested_ignored(path)][:MAX_IGNORED]

    def nested_ignored(self, path: str = "") -> list[str]:
        """Ignored paths of the objects in this one."""
        names = list[str]()
        for place, body in self._nested_bodies():
            if len(names) < MAX_IGNORED:
                names += body.ignored(f"{path}{place}.")
        return names[:MAX_IGNORED]

    def forget(self) -> None:
        """Drop the values of fields that are not applied, which may be large."""
        if self.__pydantic_extra__:
            self.__pydantic_extra__.clear()
        for _, body in self._nested_bodies():
            body.forget()

    def _nested_bodies(self) -> Iterator[tuple[str, "Body"]]:
        """The objects in this one, each with its place."""
        values = self.__dict__
        for name in self.nested:
            if not (value := values[name]):
                continue
            if isinstance(value, list):
                yield from ((f"{name}[{index}]", item) for index, item in enumerate(value) if isinstance(item, Body))
            elif isinstance(value, Body):
                yield name, value

    def _unread(self) -> Iterator[str]:
        for name, value in (self.__pydantic_extra__ or {}).items():
            row = self.rejected.get(name)
            if row is None or row.asks(value):
                yield name


def bodies_in(annotation: Any) -> tuple[type[Body], ...]:
    """The classes of the bodies that a field of this type holds: itself, in a list, or as members of a union."""
    if isinstance(annotation, type):
        return (annotation,) if issubclass(annotation, Body) else ()
    return tuple(body for part in get_args(annotation) for body in bodies_in(part))


class BrokenRule(ValidationError):
    """A value that its field does not permit."""

    def __init__(self, message: str, param: str, path: tuple[str | int, ...]) -> None:
        """`path` is where the value is in the body."""
        super().__init__(message, param)
        self.path = path


def broken_rule(message: str, param: str) -> PydanticCustomError:
    """The error of a validator for a value that its field does not permit."""
    return PydanticCustomError("broken_rule", "{message}", {"message": message, "param": param})


_BOUNDS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
_LENGTHS = {
    "string_too_short": ("at least", "character"),
    "string_too_long": ("at most", "character"),
    "too_short": ("at least", "item"),
    "too_long": ("at most", "item"),
}
_RULES = {"literal_error", "string_pattern_mismatch", *_LENGTHS}


_UNIONS = ("union_tag_invalid", "union_tag_not_found")


def _failure(model: type[Body], error: pydantic.ValidationError) -> WrongJsonType | ValidationError:
    """The first type error of a body, or its first broken rule."""
    rules = list[ValidationError]()
    for item in error.errors(include_url=False):
        path, name, info = _place(model, item["loc"])
        if item["type"] == "broken_rule":
            rules.append(BrokenRule(item["ctx"]["message"], item["ctx"]["param"], item["loc"]))
            continue
        if info is not None and item["type"] in _UNIONS and (unknown := _marker(info, UnknownKind)) is not None:
            kind = str(item["ctx"].get("tag"))[:32]
            return UnsupportedField(f"{path}.{kind}", unknown.reason)
        if info is not None and (broken := _broken_rule(info, path if "[" in path else name, item)) is not None:
            rules.append(broken)
            continue
        message = "Input should be an object" if item["type"] == "model_type" else item["msg"]
        return WrongJsonType(f"{path}: {message}" if path else message, path)
    return rules[0]


def _place(model: type[Body], where: tuple[str | int, ...]) -> tuple[str, str, FieldInfo | None]:
    """Path and name of the field at a place, and what is declared of it."""
    path, name, info = "", "", None
    models: tuple[type[Body], ...] = (model,)
    for part in where:
        if isinstance(part, int):
            path += f"[{part}]"
        elif (owner := next((body for body in models if part in body.applied), None)) is not None:
            info, name = owner.applied[part], part
            path = f"{path}.{part}" if path else part
            models = bodies_in(info.annotation)
        elif info is not None and get_origin(info.annotation) is dict:
            path = f"{path}.{part}"
        # else it is a member of a union
    return path, name, info


MarkerType = TypeVar("MarkerType")


def _marker(info: FieldInfo, kind: type[MarkerType]) -> MarkerType | None:
    """A marker of the field, or of the type that may also be absent."""
    markers = [
        *info.metadata,
        *(item for part in get_args(info.annotation) for item in getattr(part, "__metadata__", ())),
    ]
    return next((marker for marker in markers if isinstance(marker, kind)), None)


def bounds(info: FieldInfo) -> dict[str, Any]:
    """The bounds that a field declares, by pydantic's names, without those of its type."""
    return {
        name: getattr(limit, name)
        for limit in info.metadata
        for name in ("gt", "ge", "lt", "le")
        if isinstance(limit, annotated_types.BaseMetadata) and hasattr(limit, name)
    }


def _broken_rule(info: FieldInfo, name: str, item: Any) -> ValidationError | None:
    """The error for a value that breaks a rule; None where it breaks none, but has the wrong type."""
    kind, value, rule = item["type"], item["input"], _marker(info, Rule)
    if kind == "missing":
        missing = _marker(info, Missing)
        return None if missing is None else ValidationError(missing.message.replace("{name}", name), name)
    limits, bound = bounds(info), _BOUNDS.get(kind)
    if kind not in _RULES and (bound is None or limits.get(bound) != item["ctx"][bound]):
        return None
    if rule is not None:
        words = rule.not_positive if rule.not_positive and bound is not None and value <= 0 else rule.words
        words = words.replace("{given}", str(value)[:80])
    elif kind == "literal_error":
        values = literals(info.annotation)
        words = "must be " + (" or ".join(values) if len(values) == 2 else f"one of {', '.join(values)}")
    elif kind in _LENGTHS:
        sign, unit = _LENGTHS[kind]
        length = next(item["ctx"][name] for name in ("min_length", "max_length") if name in item["ctx"])
        words = f"must have {sign} {length} {unit}{'' if length == 1 else 's'}"
    else:
        words = f"must be {_range_words(limits, value)}"
    return BrokenRule(f"`{name}` {words}", name, item["loc"])


def literals(annotation: Any) -> tuple[str, ...]:
    """The texts that a field of this type permits."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((values for part in get_args(annotation) if (values := literals(part))), ())


def _range_words(limits: dict[str, Any], value: Any) -> str:
    limits = {name: float(limit) if isinstance(value, float) else limit for name, limit in limits.items()}
    low = next((f"{sign} {limits[name]}" for name, sign in (("gt", ">"), ("ge", ">=")) if name in limits), "")
    high = next((f"{sign} {limits[name]}" for name, sign in (("lt", "<"), ("le", "<=")) if name in limits), "")
    if not high and 0 in limits.values():
        return "strictly positive" if "gt" in limits else "non-negative"
    shown = f". Given: {value}" if high and isinstance(value, int) else ""
    return " and ".join(filter(None, (low, high))) + shown


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
        root = _ROOT.match(error.param or "")
        if root is not None and error.param is not None and (own := names.get(root[0])) is not None:
            param, error.param = error.param, own
            error.message = error.message.replace(f"`{param}`", f"`{own}`")
            error.args = (error.template.format(error.message),)
        raise


def present(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def text_only(where: str, kind: object) -> UnsupportedField:
    """The error for a part of a message that is no text."""
    return UnsupportedField(f"{where}.{str(kind)[:32]}", TEXT_ONLY)


TEXT_ONLY = "is not supported: this model reads text alone"
