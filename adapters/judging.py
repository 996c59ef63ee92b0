"""Whether an adapter would be served, judged by its configuration and the headers of its weights alone.

Knows one base. The libraries that this takes are loaded with the first judge.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lorikeet.adapters.errors import AdapterError, AdapterInvalid, NotServed
from lorikeet.adapters.formats import configuration
from lorikeet.adapters.formats.header import MAX_HEADER, PREFIX, header_len
from lorikeet.adapters.formats.tokenizer import Tokenizers
from lorikeet.adapters.pin import Pin
from lorikeet.adapters.refs import Source
from lorikeet.adapters.sources.base import CONFIG, HEADS_CONFIG, SMALL_NAMES, AdapterSource, FileHead, find_heads

if TYPE_CHECKING:
    from lorikeet.adapters.formats.reader import Reader
    from lorikeet.adapters.formats.reading import Found

_FIRST_BYTES = 256 << 10
_LARGE = frozenset({"tokenizer.json"})
"""Not brought over a network: what is added to the base's tokenizer stands in smaller files."""


@dataclass(frozen=True)
class Headers:
    """What is known of an adapter without its weights."""

    small: Mapping[str, bytes]
    """The small files by name."""
    heads: Mapping[str, FileHead]
    """The beginnings of the weight files by name."""


@dataclass(frozen=True)
class Validation:
    """An adapter that would be served, as far as that can be seen."""

    rank: int
    """The largest of its modules, 0 where it changes none."""
    num_modules: int | None
    num_bytes: int
    is_whole: bool
    """Nothing was left unseen but values."""
    num_heads: int | None = 0
    """Medusa heads; None where their file has no header."""
    notes: tuple[str, ...] = ()
    """What is odd and no fault, in sentences."""


class AdapterValidator:
    """Of adapters for the base in a folder."""

    def __init__(self, model_path: Path, trust_remote_code: bool = False) -> None:
        """Raises ValueError or OSError where the folder holds no model."""
        from lorikeet.adapters.formats.reader import Reader
        from lorikeet.adapters.formats.skeleton import Skeleton

        self._reader = Reader(Skeleton(model_path, trust_remote_code))
        self._tokenizers = Tokenizers(model_path)
        self._kinds = frozenset(configuration.SERVED_KINDS)

    @classmethod
    def over(cls, reader: "Reader", tokenizers: Tokenizers, kinds: frozenset[str]) -> Self:
        """With what another has loaded already."""
        validate = cls.__new__(cls)
        validate._reader, validate._tokenizers, validate._kinds = reader, tokenizers, kinds
        return validate

    def validate(self, seen: Headers) -> Validation:
        """Raises AdapterInvalid or NotServed with the reason."""
        from lorikeet.adapters.formats.contents import Contents
        from lorikeet.adapters.formats.weights import hollow

        heads_name = find_heads(seen.small.keys() | seen.heads.keys(), lambda name: seen.heads[name].content)
        if CONFIG not in seen.small and heads_name is None:
            raise AdapterInvalid(f"there is no {CONFIG}")
        self._tokenizers.check_files(dict(seen.small))
        heads = {} if heads_name is None else {heads_name: seen.heads[heads_name]}
        changes = {name: head for name, head in seen.heads.items() if name != heads_name}
        verdict = self._changes(seen, changes) if CONFIG in seen.small else Validation(0, 0, 0, is_whole=True)
        num_bytes = sum(head.size for head in seen.heads.values())
        if not heads:
            return replace(verdict, num_bytes=num_bytes)
        if not _have_headers(heads):
            return replace(verdict, num_bytes=num_bytes, num_heads=None, is_whole=False)
        contents = Contents(None, None, hollow(heads), heads_name or "", seen.small.get(HEADS_CONFIG))
        found = contents.found_heads(self._reader, self._kinds)
        assert found is not None
        return replace(verdict, num_bytes=num_bytes, num_heads=found.shape.num_heads, notes=found.notes)

    def _changes(self, seen: Headers, heads: Mapping[str, FileHead]) -> Validation:
        """Of what PEFT saved."""
        from lorikeet.adapters.formats import weights

        values = configuration.parse(seen.small[CONFIG])
        settings = configuration.served(values)
        if not _have_headers(heads):
            return Validation(max(_ranks(settings)), None, 0, is_whole=False)
        found = [each for each in self._reader.read(values, weights.hollow(heads)) if _is_served(each, settings)]
        return Validation(max((each.rank for each in found), default=0), len(found), 0, is_whole=True)


def _have_headers(names: Iterable[str]) -> bool:
    return all(name.endswith(".safetensors") for name in names)


async def look(source: AdapterSource, pin: Pin, token: str | None) -> Headers:
    """What can be known of an adapter without its weights. Raises AdapterError."""
    names = SMALL_NAMES if pin.source is Source.LOCAL else SMALL_NAMES - _LARGE
    small = await source.small_files(pin, token, names)
    return Headers(small, await asyncio.to_thread(_heads, source, pin, token))


def _heads(source: AdapterSource, pin: Pin, token: str | None) -> dict[str, FileHead]:
    heads = source.heads(pin, token, _FIRST_BYTES)
    longest = max((_needed(name, head) for name, head in heads.items()), default=0)
    return heads if longest <= _FIRST_BYTES else source.heads(pin, token, min(longest, PREFIX + MAX_HEADER))


def _needed(name: str, head: FileHead) -> int:
    if not name.endswith(".safetensors"):
        return 0
    try:
        return PREFIX + header_len(head.content, head.size, name)
    except AdapterError:
        return 0  # judged later


def _ranks(settings: Mapping[str, Any]) -> list[int]:
    return [settings.get("r", 8), *settings.get("rank_pattern", {}).values()]


def _is_served(found: "Found", settings: Mapping[str, Any]) -> bool:
    """Raises NotServed for kinds that no shard computes; False for what may well be as the base has it."""
    if found.a is not None and found.kind not in configuration.SERVED_KINDS:
        raise NotServed(f"an adapter of the kind `{found.kind}` ({found.module}) is not served")
    if found.weight is not None and settings.get("modules_to_save"):
        raise NotServed(f"a whole weight in place of the base's ({found.module}) is not served")
    return found.a is not None or found.kind == "linear"
