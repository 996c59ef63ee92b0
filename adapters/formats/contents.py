"""The contents of an adapter's folder: weights as PEFT saved them, Medusa heads, or both."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lorikeet.adapters import digests
from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats import configuration, heads, weights
from lorikeet.adapters.formats.heads import ParsedHeads
from lorikeet.adapters.formats.layout import Base, Decision, Layout, decide, lay_out
from lorikeet.adapters.formats.peft_plans import PlannedReader
from lorikeet.adapters.formats.weights import Weights
from lorikeet.adapters.sources.base import CONFIG, HEADS, HEADS_CONFIG, PEEK_BYTES, FileHead, find_heads

DEFAULT_RANK = 8
"""PEFT's, for a configuration without one."""
_HEADS_ALONE = b"medusa heads"
"""Replaces the configuration in the digest of heads only, because their config.json does not affect the result."""


@dataclass(frozen=True)
class ServedContents:
    """An adapter that is served, as far as its files were read."""

    decision: Decision | None
    """None for heads without an adapter, and for a `.bin` of which only the headers were asked for."""
    heads: ParsedHeads | None
    invocation_ids: tuple[int, ...]
    warnings: tuple[str, ...]
    rank: int
    """The largest of its modules, 0 if it changes none."""


@dataclass(frozen=True)
class Contents:
    """The open files of one adapter."""

    values: dict[str, Any] | None
    """The configuration, not yet validated; None for heads without an adapter."""
    changes: Weights | None
    """None for heads without an adapter, and if only headers were read and there are none."""
    heads: Weights | None
    heads_name: str = ""
    heads_config: bytes | None = None

    @property
    def _files(self) -> list[Weights]:
        return [file for file in (self.changes, self.heads) if file is not None]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self._files)

    @property
    def has_patterns(self) -> bool:
        """Whether its configuration has expressions, which may take forever."""
        return self.values is not None and configuration.has_patterns(self.values)

    @property
    def digest(self) -> str:
        """The name of the adapter below the router."""
        known = _HEADS_ALONE if self.values is None else configuration.canonical(self.values)
        return digests.of_adapter(known, b"".join(file.hash.digest() for file in self._files))

    def decide(self, reader: PlannedReader, base: Base) -> ServedContents:
        """Whether and how the adapter is served. Raises AdapterInvalid or NotServed."""
        parsed = self._parsed_heads(reader, base.kinds)
        warnings = [] if parsed is None else list(parsed.warnings)
        decision: Decision | None = None
        ids: tuple[int, ...] = ()
        if self.values is not None:
            settings = configuration.served(self.values)
            if self.changes is None:
                ranks = [settings.get("r", DEFAULT_RANK), *settings.get("rank_pattern", {}).values()]
                return ServedContents(None, parsed, (), tuple(warnings), max(ranks))
            decision = decide(reader.read(self.values, self.changes), base, self.changes.has_values)
            ids = configuration.invocation_ids(self.values)
            configuration.check_activated((change.kind for change in decision.changes), ids)
            if fields := configuration.unknown(self.values):
                names = ", ".join(f"`{field[:60]}`" for field in fields[:5])
                warnings.append(f"{names} of {CONFIG}: not a setting of PEFT, without effect")
        return ServedContents(decision, parsed, ids, tuple(warnings), 0 if decision is None else decision.rank)

    def lay_out(self, reader: PlannedReader, base: Base) -> tuple[ServedContents, Layout]:
        """What was decided, and the served layout. Raises AdapterInvalid or NotServed."""
        served = self.decide(reader, base)
        layout = Layout({}, {}) if served.decision is None else lay_out(served.decision, base)
        layout = replace(layout, invocation_ids=served.invocation_ids)
        if served.heads is not None:
            assert reader.skeleton.output_shape is not None
            tensors = heads.lay_out(served.heads, reader.skeleton.output_shape[0], base.dtype)
            layout = replace(layout, tensors={**layout.tensors, **tensors}, heads=heads.metadata(served.heads.shape))
        return served, layout

    def _parsed_heads(self, reader: PlannedReader, kinds: frozenset[str]) -> ParsedHeads | None:
        """Raises AdapterInvalid or NotServed."""
        if self.heads is None:
            return None
        if heads.KIND not in kinds:
            raise NotServed(f"an adapter with Medusa heads ({self.heads_name}) is not served")
        return heads.read(self.heads_name, self.heads.tensors, self.heads_config, reader.skeleton.output_shape)

    def check_unchanged(self) -> None:
        """Raises AdapterChanged if a file has changed since it was read."""
        for file in self._files:
            file.check_unchanged()


def of_headers(small: Mapping[str, bytes], heads: Mapping[str, FileHead]) -> Contents:
    """Contents without values: `small` are the small files, `heads` the beginnings of the weight files, by name.

    Raises AdapterInvalid or AdapterTooLarge.
    """
    heads_name = find_heads(small.keys() | heads.keys(), lambda name: heads[name].content)
    if CONFIG not in small and heads_name is None:
        raise AdapterInvalid(f"there is no {CONFIG} and no {HEADS[0]}")
    values = changes = heads_file = None
    if CONFIG in small:
        values = configuration.parse(small[CONFIG])
        changes = _header_only({name: head for name, head in heads.items() if name != heads_name})
    if heads_name is not None:
        heads_file = _header_only({heads_name: heads[heads_name]})
    return Contents(values, changes, heads_file, heads_name or "", small.get(HEADS_CONFIG))


def _header_only(heads: Mapping[str, FileHead]) -> Weights | None:
    """None if a file has no header."""
    return weights.header_only(heads) if all(name.endswith(".safetensors") for name in heads) else None


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
        values = changes = heads_file = None
        if CONFIG in names:
            values = configuration.parse(weights.read_small(folder / CONFIG))
            changes = held.enter_context(weights.opened(folder, limit))
        if heads_name is not None:
            remaining = limit if changes is None else limit - changes.num_bytes
            heads_file = held.enter_context(weights.opened(folder, remaining, [heads_name]))
        config = weights.read_small(folder / HEADS_CONFIG) if heads_file is not None and HEADS_CONFIG in names else None
        yield Contents(values, changes, heads_file, heads_name or "", config)
