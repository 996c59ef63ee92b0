"""Validates adapters for one base: by their configurations and the headers of their weight files, or by all bytes.

Both decide as the loader does, by `Contents.decide`. The libraries that this needs are loaded by the first validator.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.formats import configuration
from lorikeet.adapters.formats.header import MAX_HEADER, PREFIX, header_len
from lorikeet.adapters.formats.tokenizer import Tokenizers
from lorikeet.adapters.refs import Pin, Source
from lorikeet.adapters.sources.base import SMALL_NAMES, AdapterSource, FileHead

if TYPE_CHECKING:
    from lorikeet.adapters.formats.contents import Contents, ServedContents
    from lorikeet.adapters.formats.layout import Base
    from lorikeet.adapters.formats.peft_plans import PlannedReader

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
    """An adapter that would be served, as far as its files were read."""

    rank: int
    """The largest of its modules, 0 if it changes none."""
    num_modules: int | None
    num_bytes: int
    num_heads: int | None = 0
    """Medusa heads; None if their file has no header."""
    unread: tuple[str, ...] = ()
    """Parameters whose values decide and were not read: they must equal the base's."""
    warnings: tuple[str, ...] = ()

    @property
    def has_headers(self) -> bool:
        """Whether each weight file could be read as far as was asked for."""
        return self.num_modules is not None and self.num_heads is not None


class AdapterValidator:
    """Validates adapters for the base in one folder."""

    def __init__(self, reader: "PlannedReader", tokenizers: Tokenizers, base: "Base") -> None:
        self._reader, self._tokenizers, self._base = reader, tokenizers, base

    @classmethod
    def load(cls, model_path: Path, trust_remote_code: bool = False) -> Self:
        """Raises ValueError or OSError if the folder holds no model."""
        from lorikeet.adapters.formats.base_values import BaseValues
        from lorikeet.adapters.formats.layout import Base
        from lorikeet.adapters.formats.peft_plans import PlannedReader
        from lorikeet.adapters.formats.skeleton import Skeleton, choose_dtype

        skeleton = Skeleton(model_path, trust_remote_code)
        dtype, kinds = choose_dtype(None, skeleton.config, "cpu"), frozenset(configuration.SERVED_KINDS)
        base = Base("", "", dtype, kinds, BaseValues(skeleton), skeleton.trunk)
        return cls(PlannedReader(skeleton), Tokenizers(model_path), base)

    def validate(self, headers: Headers) -> Validation:
        """By headers: problems of values are not seen. Raises AdapterInvalid or NotServed with the reason."""
        from lorikeet.adapters.formats import contents

        opened = contents.of_headers(headers.small, headers.heads)
        self._tokenizers.check_files(dict(headers.small))
        num_bytes = sum(head.size for head in headers.heads.values())
        return _validation(opened, opened.decide(self._reader, self._base), num_bytes)

    def validate_folder(self, folder: Path, max_bytes: int) -> Validation:
        """By all bytes of its files, as the loader does. Raises AdapterError with the reason."""
        from lorikeet.adapters.formats import contents

        with contents.opened(folder, max_bytes) as opened:
            self._tokenizers.check(folder)
            served, _ = opened.lay_out(self._reader, self._base)
            return _validation(opened, served, opened.num_bytes)


def _validation(opened: "Contents", served: "ServedContents", num_bytes: int) -> Validation:
    decision, heads = served.decision, served.heads
    num_modules: int | None = 0
    if opened.values is not None:
        num_modules = None if decision is None else len(decision.changes)
    num_heads: int | None = 0
    if opened.heads_name:
        num_heads = None if heads is None else heads.shape.num_heads
    unread = () if decision is None else decision.unread
    return Validation(served.rank, num_modules, num_bytes, num_heads, unread, served.warnings)


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
