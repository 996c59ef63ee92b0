"""Validates adapters for one base by their configurations and the headers of their weight files alone.

The libraries that this needs are loaded by the first validator.
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
from lorikeet.adapters.refs import Pin, Source
from lorikeet.adapters.sources.base import CONFIG, HEADS_CONFIG, SMALL_NAMES, AdapterSource, FileHead, find_heads

if TYPE_CHECKING:
    from lorikeet.adapters.formats.peft_plans import PlannedReader
    from lorikeet.adapters.formats.peft_reading import ModuleChange

_FIRST_BYTES = 256 << 10
_LARGE = frozenset({"tokenizer.json"})
"""Not downloaded: smaller files list the tokens that were added to the base's tokenizer."""


@dataclass(frozen=True)
class Headers:
    """What is known of an adapter without its weights."""

    small: Mapping[str, bytes]
    """The small files by name."""
    heads: Mapping[str, FileHead]
    """The beginnings of the weight files by name."""


@dataclass(frozen=True)
class Validation:
    """An adapter that would be served, as far as headers can show."""

    rank: int
    """The largest of its modules, 0 if it changes none."""
    num_modules: int | None
    num_bytes: int
    is_complete: bool
    """Everything but the values of the weights was checked."""
    num_heads: int | None = 0
    """Medusa heads; None if their file has no header."""
    warnings: tuple[str, ...] = ()


class AdapterValidator:
    """Validates adapters for the base in one folder."""

    def __init__(self, reader: "PlannedReader", tokenizers: Tokenizers, kinds: frozenset[str]) -> None:
        self._reader, self._tokenizers, self._kinds = reader, tokenizers, kinds

    @classmethod
    def load(cls, model_path: Path, trust_remote_code: bool = False) -> Self:
        """Raises ValueError or OSError if the folder holds no model."""
        from lorikeet.adapters.formats.peft_plans import PlannedReader
        from lorikeet.adapters.formats.skeleton import Skeleton

        reader = PlannedReader(Skeleton(model_path, trust_remote_code))
        return cls(reader, Tokenizers(model_path), frozenset(configuration.SERVED_KINDS))

    def validate(self, headers: Headers) -> Validation:
        """Raises AdapterInvalid or NotServed with the reason."""
        from lorikeet.adapters.formats.contents import Contents
        from lorikeet.adapters.formats.weights import header_only

        heads_name = find_heads(headers.small.keys() | headers.heads.keys(), lambda name: headers.heads[name].content)
        if CONFIG not in headers.small and heads_name is None:
            raise AdapterInvalid(f"there is no {CONFIG}")
        self._tokenizers.check_files(dict(headers.small))
        heads = {} if heads_name is None else {heads_name: headers.heads[heads_name]}
        weights = {name: head for name, head in headers.heads.items() if name != heads_name}
        found = self._weights(headers, weights) if CONFIG in headers.small else Validation(0, 0, 0, is_complete=True)
        found = replace(found, num_bytes=sum(head.size for head in headers.heads.values()))
        if not heads:
            return found
        if not _have_headers(heads):
            return replace(found, num_heads=None, is_complete=False)
        contents = Contents(None, None, header_only(heads), heads_name or "", headers.small.get(HEADS_CONFIG))
        parsed = contents.parsed_heads(self._reader, self._kinds)
        assert parsed is not None
        return replace(found, num_heads=parsed.shape.num_heads, warnings=parsed.warnings)

    def _weights(self, headers: Headers, heads: Mapping[str, FileHead]) -> Validation:
        """Validates the files that PEFT saved."""
        from lorikeet.adapters.formats import weights

        values = configuration.parse(headers.small[CONFIG])
        settings = configuration.served(values)
        if not _have_headers(heads):
            ranks = [settings.get("r", 8), *settings.get("rank_pattern", {}).values()]
            return Validation(max(ranks), None, 0, is_complete=False)
        changes = self._reader.read(values, weights.header_only(heads))
        trunk = self._reader.skeleton.trunk
        served = [each for each in changes if _is_served(each, settings, trunk)]
        configuration.check_activated((each.kind for each in served), configuration.invocation_ids(values))
        return Validation(max((each.rank for each in served), default=0), len(served), 0, is_complete=True)


def _have_headers(names: Iterable[str]) -> bool:
    return all(name.endswith(".safetensors") for name in names)


async def read_headers(source: AdapterSource, pin: Pin, token: str | None) -> Headers:
    """What is known of an adapter without its weights. Raises AdapterError."""
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
        return 0  # the error is raised when the header is parsed


def _is_served(change: "ModuleChange", settings: Mapping[str, Any], trunk: str = "") -> bool:
    """Raises NotServed for kinds that no shard supports; False for values that may be equal to the base's."""
    if trunk and not change.module.startswith(trunk):
        return True
    if change.a is not None and change.kind not in configuration.SERVED_KINDS:
        raise NotServed(f"an adapter of the kind `{change.kind}` ({change.module}) is not served")
    if change.weight is not None and settings.get("modules_to_save"):
        raise NotServed(f"replacing a whole weight ({change.module}) is not served")
    return change.a is not None or change.kind == "linear"
