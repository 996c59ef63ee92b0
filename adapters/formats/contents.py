"""The contents of an adapter's folder: weights as PEFT saved them, Medusa heads, or both."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lorikeet.adapters import digests
from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats import configuration, heads, weights
from lorikeet.adapters.formats.heads import ParsedHeads
from lorikeet.adapters.formats.layout import Base, Layout, lay_out
from lorikeet.adapters.formats.peft_plans import PlannedReader
from lorikeet.adapters.formats.weights import Weights
from lorikeet.adapters.sources.base import CONFIG, HEADS, HEADS_CONFIG, PEEK_BYTES, find_heads

_HEADS_ALONE = b"medusa heads"
"""Replaces the configuration in the digest of heads alone, whose config.json does not affect the result."""


@dataclass(frozen=True)
class Contents:
    """The open files of one adapter."""

    values: dict[str, Any] | None
    """The configuration, not yet validated; None for heads alone."""
    changes: Weights | None
    heads: Weights | None
    heads_name: str = ""
    heads_config: bytes | None = None

    @property
    def _files(self) -> list[Weights]:
        return [each for each in (self.changes, self.heads) if each is not None]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._files)

    @property
    def has_patterns(self) -> bool:
        """Whether its configuration has expressions, which may take forever."""
        return self.values is not None and configuration.has_patterns(self.values)

    @property
    def digest(self) -> str:
        """The name of the adapter below the router."""
        known = _HEADS_ALONE if self.values is None else configuration.canonical(self.values)
        return digests.of_adapter(known, b"".join(each.hash.digest() for each in self._files))

    def parsed_heads(self, reader: PlannedReader, kinds: frozenset[str]) -> ParsedHeads | None:
        """Raises AdapterInvalid or NotServed."""
        if self.heads is None:
            return None
        if heads.KIND not in kinds:
            raise NotServed(f"an adapter with Medusa heads ({self.heads_name}) is not served")
        return heads.read(self.heads_name, self.heads.tensors, self.heads_config, reader.skeleton.output_shape)

    def lay_out(self, reader: PlannedReader, base: Base) -> tuple[Layout, tuple[str, ...]]:
        """The served layout, and warnings. Raises AdapterInvalid or NotServed."""
        found = self.parsed_heads(reader, base.kinds)
        layout = Layout({}, {})
        if self.values is not None and self.changes is not None:
            layout = lay_out(reader.read(self.values, self.changes), base)
            ids = configuration.invocation_ids(self.values)
            configuration.check_activated((module["kind"] for module in layout.modules.values()), ids)
            layout = replace(layout, invocation_ids=ids)
        if found is None:
            return layout, ()
        assert reader.skeleton.output_shape is not None
        tensors = heads.lay_out(found, reader.skeleton.output_shape[0], base.dtype)
        layout = replace(layout, tensors={**layout.tensors, **tensors}, heads=heads.metadata(found.shape))
        return layout, found.warnings

    def check_unchanged(self) -> None:
        """Raises AdapterChanged if a file has changed since it was read."""
        for each in self._files:
            each.check_unchanged()


@contextmanager
def opened(folder: Path, limit: int) -> Iterator[Contents]:
    """The adapter in `folder`, of at most `limit` bytes of weights. Tensors are valid inside only.

    Raises AdapterInvalid or AdapterTooLarge with a sentence that names the file.
    """
    names = os.listdir(folder)
    heads_name = find_heads(names, lambda name: weights.read_small(folder / name, PEEK_BYTES))
    if CONFIG not in names and heads_name is None:
        raise AdapterInvalid(f"there is no {CONFIG} and no {HEADS[0]}")
    with ExitStack() as held:
        values = changes = found = None
        if CONFIG in names:
            values = configuration.parse(weights.read_small(folder / CONFIG))
            changes = held.enter_context(weights.opened(folder, limit))
        if heads_name is not None:
            left = limit if changes is None else limit - changes.num_bytes
            found = held.enter_context(weights.opened(folder, left, [heads_name]))
        config = weights.read_small(folder / HEADS_CONFIG) if found is not None and HEADS_CONFIG in names else None
        yield Contents(values, changes, found, heads_name or "", config)
