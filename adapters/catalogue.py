"""The operator's list of adapters: a YAML file of aliases, parsed into entries and problems.

    support:
      source: hub
      id: owner/support-lora
      revision: v7
      weight: 3
    triage:
      revisions: {owner/triage@v7: 0.9, owner/triage@v8: 0.1}

Whether an adapter exists and can be served is checked elsewhere. Imports no torch.
"""

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lorikeet.adapters import refs
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.proto.config_file import is_number
from lorikeet.proto.params import NUMBERS

T = TypeVar("T")

MAX_FILE_BYTES = 64 << 20
MAX_DESCRIPTION = 500
_LARGEST = 1e9
SOURCES = (SourceKind.HUB, SourceKind.LOCAL, SourceKind.S3)
_FIELDS = (
    "source",
    "id",
    "revision",
    "revisions",
    "weight",
    "pin",
    "parameters",
    "chat_template",
    "keys",
    "learn_heads",
    "description",
)


class CatalogueError(ValueError):
    """The whole file cannot be used. The message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Version:
    """One of the adapters of an alias."""

    ref: Ref
    share: float
    """Share of the alias's requests that go to this version; all shares add up to 1."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One alias."""

    alias: str
    versions: tuple[Version, ...]
    weight: float = 1.0
    """Its share of the queue, relative to others."""
    pin: bool = False
    """Whether it is loaded at startup and never evicted."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """Defaults for requests, named as in LoRAX's `parameters`."""
    chat_template: str | None = None
    keys: frozenset[str] | None = None
    """Names of the API keys that may use it; None means all callers."""
    learn_heads: bool | None = None
    """Whether Medusa heads are learned from its outputs; None is the server's default."""
    description: str = ""
    """What it is good at, in a sentence for people."""

    def choose(self, who: str) -> Version:
        """The version for `who`: the same one for equal texts, and distributed by the shares over many."""
        if len(self.versions) == 1:
            return self.versions[0]
        digest = hashlib.sha256(f"{self.alias}\0{who}".encode(errors="surrogatepass")).digest()
        point = int.from_bytes(digest[:8], "big") / 2**64
        for version in self.versions:
            point -= version.share
            if point < 0:
                return version
        return self.versions[-1]


@dataclass(frozen=True)
class Catalogue:
    """One file: valid entries by alias, and the problems of the others by alias."""

    entries: dict[str, CatalogueEntry]
    problems: dict[str, str]
    unparsed: tuple[CatalogueEntry, ...]
    """For each of the others an entry without keys that may use it, which closes its adapters. It has no version where
    its adapters cannot be read.
    """


def read(path: str | Path, default_source: SourceKind = SourceKind.HUB) -> Catalogue:
    """Read the file. Raises CatalogueError if it is not a catalogue at all."""
    return read_with(lambda content: parse(content, default_source, Path(path).parent), path)


def read_with(parse: Callable[[bytes], T], path: str | Path) -> T:
    """Parse a file of bounded size. Raises CatalogueError with the path."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CatalogueError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise CatalogueError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse(content)
    except CatalogueError as error:
        raise CatalogueError(f"{path}: {error}") from None


def parse(content: bytes | str, default_source: SourceKind = SourceKind.HUB, folder: Path | None = None) -> Catalogue:
    """Parse the text of a file whose relative paths start in `folder`. Raises CatalogueError."""
    values = load_yaml(content)
    if isinstance(values, dict) and list(values) == ["adapters"] and _are_entries(values["adapters"]):
        values = values["adapters"]
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise CatalogueError("it must be a mapping of aliases")
    entries: dict[str, CatalogueEntry] = {}
    problems: dict[str, str] = {}
    unparsed = []
    for alias, fields in values.items():
        name = str(alias)[: refs.MAX_ALIAS_LEN]
        try:
            entries[name] = _entry(alias, fields, default_source, folder)
        except ValueError as error:
            problems[name] = str(error)
            unparsed.append(CatalogueEntry(name, _named_versions(fields, default_source), keys=frozenset()))
    return Catalogue(entries, problems, tuple(unparsed))


def load_yaml(content: bytes | str) -> Any:
    """Plain values without duplicate keys. Raises CatalogueError with the line of the error."""
    try:
        return yaml.load(content, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise CatalogueError(f"it is not YAML: {error.problem or error.context}{where}") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CatalogueError(f"it is not YAML: {type(error).__name__}") from None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Rejects duplicate keys, of which plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            value = key.value if isinstance(key, yaml.ScalarNode) else None
            if value in seen and value != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"{value!r} is given twice", key.start_mark)
            seen.add(value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def _are_entries(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values())


def _check_fields(fields: Any) -> None:
    """Raises ValueError with a sentence."""
    if not isinstance(fields, dict):
        raise ValueError("it must be a mapping with an `id` or `revisions`")
    if unknown := sorted(str(name) for name in set(fields) - set(_FIELDS)):
        raise ValueError(f"it has unknown fields: {', '.join(unknown)} (known: {', '.join(_FIELDS)})")


def _named_versions(fields: Any, default_source: SourceKind) -> tuple[Version, ...]:
    """The versions of an entry that has another problem; none where they cannot be read. An unknown field may be a
    misspelled `source`, so it hides them too.
    """
    try:
        _check_fields(fields)
        return tuple(_versions(fields, _source(fields, default_source)))
    except ValueError:
        return ()


def _entry(alias: Any, fields: Any, default_source: SourceKind, folder: Path | None) -> CatalogueEntry:
    """Raises ValueError with a sentence."""
    refs.check_alias(alias if isinstance(alias, str) else "")
    _check_fields(fields)
    weight = fields.get("weight", 1.0)
    if not _is_number(weight) or not 0 < weight <= 1e6:
        raise ValueError(f"`weight` must be a number above 0, not {weight!r}")
    pin = fields.get("pin", False)
    if not isinstance(pin, bool):
        raise ValueError(f"`pin` must be true or false, not {pin!r}")
    learn_heads = fields.get("learn_heads")
    if not isinstance(learn_heads, bool | None):
        raise ValueError(f"`learn_heads` must be true or false, not {learn_heads!r}")
    description = fields.get("description", "")
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION:
        raise ValueError(f"`description` must be a text of at most {MAX_DESCRIPTION} characters")
    return CatalogueEntry(
        alias=alias,
        versions=tuple(_versions(fields, _source(fields, default_source))),
        weight=float(weight),
        pin=pin,
        parameters=tuple(_parameters(fields.get("parameters"))),
        chat_template=_template(fields.get("chat_template"), folder),
        keys=_keys(fields.get("keys")),
        learn_heads=learn_heads,
        description=description,
    )


def _source(fields: dict[str, Any], default: SourceKind) -> SourceKind:
    text = fields.get("source", default.value)
    if text not in [source.value for source in SOURCES]:
        raise ValueError(f"`source` must be one of {', '.join(SOURCES)}, not {text!r}")
    return SourceKind(text)


def _versions(fields: dict[str, Any], source: SourceKind) -> Iterator[Version]:
    if "revisions" in fields:
        if "id" in fields or "revision" in fields:
            raise ValueError("`revisions` replaces `id` and `revision`: give one or the other")
        shares = fields["revisions"]
        if not isinstance(shares, dict) or not shares:
            raise ValueError("`revisions` must map names such as `owner/name@v7` to shares")
        if not all(_is_number(share) and share > 0 for share in shares.values()):
            raise ValueError("shares in `revisions` must be numbers above 0")
        total = math.fsum(shares.values())
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(f"shares in `revisions` must add up to 1, not {total:g}")
        for name, share in shares.items():
            yield Version(_ref(name, None, source), share / total)
        return
    if "id" not in fields:
        raise ValueError("it has neither `id` nor `revisions`")
    yield Version(_ref(fields["id"], fields.get("revision"), source), 1.0)


def _ref(name: Any, revision: Any, source: SourceKind) -> Ref:
    if not isinstance(name, str):
        raise ValueError(f"an id must be a text, not {name!r}")
    ref = refs.parse(name, source)
    if revision is None:
        return ref
    if source is not SourceKind.HUB:
        raise ValueError(f"`revision` is for the hub only: an adapter of the source {source.value} has none")
    if ref.revision is not None:
        raise ValueError(f"{name} and `revision` give two revisions")
    return refs.parse(f"{name}@{revision}", source)


def _parameters(values: Any) -> Iterator[tuple[str, Any]]:
    if values is None:
        return
    if not isinstance(values, dict):
        raise ValueError("`parameters` must be a mapping")
    for name, value in values.items():
        name = "max_new_tokens" if name == "max_tokens" else name  # OpenAI's name
        if name == "stop" and isinstance(value, str):
            value = [value]
        if name not in _PARAMETERS:
            raise ValueError(f"`parameters` has the unknown field {name!r}")
        if not _PARAMETERS[name](value):
            raise ValueError(f"`{name}` of `parameters` cannot be {value!r}")
        yield name, value


def _template(value: Any, folder: Path | None) -> str | None:
    """The value if it looks like a template, else the content of the file of that name."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ValueError("`chat_template` must be a template or the name of a file")
    if "{{" in value or "{%" in value:
        return value
    try:
        return ((folder or Path()) / value).read_text()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"the chat template {value} cannot be read: {reason}") from None


def _keys(value: Any) -> frozenset[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError("`keys` must be a list of names of API keys")
    return frozenset(value)


def _is_number(value: Any) -> bool:
    return is_number(value, _LARGEST)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


_NUMBERS = tuple(name for name in NUMBERS if name != "top_k")
_INTEGERS = ("top_k", "max_new_tokens", "seed", "truncate", "speculative_tokens")
_TEXTS = (
    *("speculative_method", "speculative_schedule", "speculative_verification", "speculative_verify"),
    "heads_id",
)
_SWITCHES = ("do_sample", "ignore_eos_token", "return_full_text", "speculative_history")
_FORMATS = ("text", "json_object", "json_schema")
_PARAMETERS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_NUMBERS, _is_number),
    **dict.fromkeys(_INTEGERS, _is_integer),
    **dict.fromkeys(_TEXTS, lambda value: isinstance(value, str)),
    **dict.fromkeys(_SWITCHES, lambda value: isinstance(value, bool)),
    "stop": _are_texts,
    "response_format": lambda value: isinstance(value, dict) and value.get("type") in _FORMATS,
}
