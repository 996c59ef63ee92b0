"""From the files of an adapter to the served layout: one file that shards map, with factors scaled, cast and stacked.

For a module `m` of the base: `m.A` [rank, in] and `m.B` [out, rank] (the scaling inside B), `m.magnitude` and `m.bias`
[out] float32 (added to the base's bias), or `m.scale` [out] float32 (factors of the output without
the base's bias). An embedding's A is [rank, V]. Experts have one more leading axis, and are
named by their parameter. The file's metadata give the kind and rank of each module.
Medusa heads are `heads.j.weight` [H, H] and `heads.j.bias` [H] (`heads.j.l.weight` if they have several blocks);
those of version 1 also have `heads.j.output` [V, H]; the metadata give their number, version and number of blocks, the
invocation tokens of an activated LoRA, and a checksum (`proto/digest.py`).
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lorikeet.adapters import refs
from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats import configuration, header, norms, vocabulary, weights
from lorikeet.adapters.formats.base_model import BaseValues, Skeleton
from lorikeet.adapters.formats.changes import TENSORS, ModuleChange, PlannedReader
from lorikeet.adapters.formats.gguf_file import read as read_gguf
from lorikeet.adapters.formats.heads import HEADS_KIND, ParsedHeads, heads_metadata, lay_out_heads, parse_heads
from lorikeet.adapters.formats.kinds import CONVERT
from lorikeet.adapters.formats.weights import Weights, is_finite, not_finite
from lorikeet.adapters.sources.base import CONFIG, HEADS, HEADS_CONFIG, PEEK_BYTES, FileHead, find_heads, gguf_file
from lorikeet.proto.digest import CHECKSUM_FIELD, CHECKSUM_UNKNOWN, with_checksum

FORMAT = "lorikeet-adapter-1"
_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Base:
    """The base that adapters are converted for."""

    hash: str
    weights_hash: str
    dtype: torch.dtype
    kinds: frozenset[str]
    """Kinds of changes that the shards support."""
    values: BaseValues
    max_rank: int = configuration.MAX_RANK
    """The largest rank of a module that the shards compute."""


@dataclass(frozen=True)
class ServedLayout:
    """An adapter ready to be written."""

    tensors: dict[str, torch.Tensor]
    modules: dict[str, dict[str, Any]]
    """Module → kind and rank."""
    heads: dict[str, int] | None = None
    """Configuration of the Medusa heads: count, version, layers (residual blocks)."""
    invocation_ids: tuple[int, ...] = ()
    """Token ids that activate the adapter, if it is an activated LoRA."""
    changes_nothing: bool = False
    """Whether it computes what the base does: all of B is zero."""
    factor_scaling: float | None = None
    """As in `ServedChanges`."""
    num_added: int = 0
    """Tokens that it adds to the base's, in the rows behind those."""

    @property
    def num_virtual(self) -> int:
        """Virtual tokens before the prompt."""
        return sum(len(tensor) for name, tensor in self.tensors.items() if name.endswith(".virtual"))

    @property
    def scaling(self) -> float | None:
        """As in the store's `Entry`."""
        return None if self.heads is not None or self.invocation_ids else self.factor_scaling

    @property
    def rank(self) -> int:
        return max((module["rank"] for module in self.modules.values()), default=0)

    @property
    def num_heads(self) -> int:
        return 0 if self.heads is None else self.heads["count"]


@dataclass(frozen=True)
class ServedChanges:
    """How an adapter is served."""

    changes: tuple[ModuleChange, ...]
    """What shards compute, one per module."""
    unread: tuple[str, ...] = ()
    """Parameters of the base in its files that were not read: they must equal the base's."""
    scaling: float | None = None
    """Of all changes, 0 where their scalings or ranks differ; None where one is more than factors of a linear layer or
    of an embedding.
    """

    @property
    def rank(self) -> int:
        """The largest of its modules, 0 if it changes none."""
        return max((change.rank for change in self.changes), default=0)


def decide(changes: Iterable[ModuleChange], base: Base, has_values: bool = True) -> ServedChanges:
    """Whether and how changes are served. Without values, tensors have shapes only, and are taken as finite.

    Raises NotServed for kinds that no shard supports, and AdapterInvalid if nothing changes.
    """
    served: list[ModuleChange] = []
    unread: list[str] = []
    has_factors_alone = True
    for change in without_unchanged(changes, base) if has_values else changes:
        if not has_values:
            change, names = _without_unread(change, base)
            unread += names
            if not _has_tensors(change):
                continue
        has_factors_alone = has_factors_alone and is_factors(change)
        if change.weight is not None and change.kind == "norm":
            change = _as_scale(change, base, has_values)
        elif change.weight is not None and change.kind != "other":
            change = _as_factors(change, base, has_values)
        if change.kind not in base.kinds:
            raise NotServed(f"{_DESCRIPTIONS[change.kind]} ({change.module}) is not served")
        if _needs_own_bias(change, base.values) and base.values.has(f"{change.module}.bias") is False:
            raise NotServed(f"the bias of {change.module} is needed, but the checkpoint stores it in another form")
        if change.rank > base.max_rank:
            raise NotServed(
                f"its change to {change.module} has rank {change.rank}; the limit on this device is {base.max_rank}: "
                f"{CONVERT}"
            )
        served.append(change)
    if not served and not unread:
        raise AdapterInvalid("it does not change the base")
    kinds = {(change.scaling, change.rank) for change in served}
    scaling = max(0.0, served[0].scaling) if len(kinds) == 1 else 0.0
    return ServedChanges(tuple(served), tuple(unread), scaling if has_factors_alone and not unread else None)


def is_factors(change: ModuleChange) -> bool:
    """Whether a change is the product of two factors of a linear layer or of an embedding, and nothing else."""
    others = {field: getattr(change, field) for field in TENSORS if field not in ("a", "b")}
    has_others = any(tensor is not None for tensor in others.values())
    return change.kind in ("linear", "embedding") and change.a is not None and not has_others


def lay_out(decision: ServedChanges, base: Base) -> ServedLayout:
    """Raises AdapterInvalid for numbers that are not finite, and NotServed if the base's own are needed and missing."""
    layout = ServedLayout({}, {})
    for change in decision.changes:
        layout.modules[change.module] = {"kind": change.kind, "rank": change.rank}
        layout.tensors.update({f"{change.module}.{part}": tensor for part, tensor in _module(change, base).items()})
    changes_nothing = not any(map(_changes, layout.tensors.items()))
    changes_nothing = changes_nothing and not layout.num_virtual
    return replace(layout, changes_nothing=changes_nothing, factor_scaling=decision.scaling)


def _changes(part: tuple[str, torch.Tensor]) -> bool:
    """Whether a part of a module may make its output another one."""
    name, tensor = part
    kind = name.rpartition(".")[2]
    return kind != "A" and bool((tensor != (1 if kind == "scale" else 0)).any())


def _as_factors(change: ModuleChange, base: Base, has_values: bool) -> ModuleChange:
    """A new weight as an adapter on the base's: the difference of the two is the product of itself and the identity.

    Raises NotServed for a module that has DoRA, too, which reads the base's weight.
    """
    assert change.weight is not None
    if change.magnitude is not None:
        raise NotServed(f"a new weight of {change.module} together with DoRA on it is not served")
    difference = change.weight
    if has_values:
        difference = difference.float() - _own_rows(change, base).float()
    if change.row_ids:
        rows = torch.zeros(change.num_rows, len(change.row_ids))
        rows[change.row_ids, range(len(change.row_ids))] = 1
        a, b = difference, rows
    else:
        is_wide = difference.shape[0] <= difference.shape[1]
        rank = min(difference.shape)
        a, b = (difference, torch.eye(rank)) if is_wide else (torch.eye(rank), difference)
    if change.kind == "embedding":
        a, b = b.t(), a.t()
    scaling = change.weight_scaling
    if change.a is not None and change.b is not None:
        a = torch.cat([a, change.a.float()])
        b, scaling = torch.cat([scaling * b, change.scaling * change.b.float()], 1), 1.0
    return replace(change, rank=a.shape[0], scaling=scaling, a=a, b=b, weight=None, row_ids=())


def _as_scale(change: ModuleChange, base: Base, has_values: bool) -> ModuleChange:
    """New weights of a norm as factors of its outputs. Raises NotServed."""
    assert change.weight is not None
    scale = change.weight
    if has_values:
        scale = norms.scale(change.module, scale, base.values[f"{change.module}.weight"], change.weight_offset)
    return replace(change, weight=None, scale=scale)


def _own_rows(change: ModuleChange, base: Base) -> torch.Tensor:
    """The base's own values of a new weight. Raises NotServed."""
    own = base.values[f"{change.module}.weight"]
    return own[list(change.row_ids)] if change.row_ids else own


def _without_unread(change: ModuleChange, base: Base) -> tuple[ModuleChange, list[str]]:
    """Leave out whole parameters that are only served if they equal the base's, and name them."""
    names: list[str] = []
    if change.weight is not None:
        is_small = min(change.weight.shape, default=0) <= base.max_rank
        if change.kind == "other" or change.a is not None or not is_small:
            change, names = replace(change, weight=None), [f"{change.module}.weight"]
    if change.new_bias is not None and change.kind == "other":
        change, names = replace(change, new_bias=None), [*names, f"{change.module}.bias"]
    return change, names


def without_unchanged(changes: Iterable[ModuleChange], base: Base) -> Iterator[ModuleChange]:
    """Drop values that equal the base's: PEFT also saves embeddings with adapters on them, and unchanged biases."""
    for change in changes:
        if change.weight is not None and _is_own(change.weight, partial(_own_rows, change, base), base):
            change = replace(change, weight=None, row_ids=())
        change = _changed_rows(change, base)
        if change.new_bias is not None and _is_own(
            change.new_bias, partial(base.values.__getitem__, f"{change.module}.bias"), base
        ):
            change = replace(change, new_bias=None)
        if _has_tensors(change):
            yield change


def _changed_rows(change: ModuleChange, base: Base) -> ModuleChange:
    """With the rows of a new weight that differ from the base's, where they are few."""
    if change.weight is None or change.row_ids or change.kind not in ("linear", "embedding"):
        return change
    try:
        own = base.values[f"{change.module}.weight"]
    except NotServed:
        return change
    saved, given = change.weight.to(base.dtype), change.weight.dtype
    rounded = (own.to(dtype).to(given).to(base.dtype) for dtype in dict.fromkeys((own.dtype, *_TRAINED_IN)))
    ids = min(((value != saved).any(1).nonzero()[:, 0] for value in rounded), key=len).tolist()
    if len(ids) >= min(saved.shape):
        return change
    return replace(change, weight=change.weight[ids], row_ids=tuple(ids), num_rows=saved.shape[0])


def _has_tensors(change: ModuleChange) -> bool:
    return any(getattr(change, field) is not None for field in TENSORS)


_TRAINED_IN = (torch.bfloat16, torch.float16)
"""What training may round the base's values to before they are saved, in any type."""


def _is_own(saved: torch.Tensor, own: Callable[[], torch.Tensor], base: Base) -> bool:
    """Whether a saved parameter is the base's, unchanged but for the rounding of the type that it was trained in."""
    try:
        value = own()
    except NotServed:
        return False
    served = saved.to(base.dtype)
    types = dict.fromkeys((value.dtype, *_TRAINED_IN))
    return any(torch.equal(value.to(dtype).to(saved.dtype).to(base.dtype), served) for dtype in types)


_DESCRIPTIONS = {
    "linear": "an adapter on a linear layer",
    "embedding": "an adapter on an embedding",
    "experts": "an adapter on experts",
    "router": "an adapter on the router of experts",
    "norm": "replacing the weights of norms of this base",
    "virtual": "an adapter with virtual tokens",
    "other": "replacing a parameter of a module that is neither linear nor an embedding",
}


@dataclass(frozen=True)
class LayoutFile:
    """A file in the served layout, in parts that are written one after the other."""

    parts: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def write(self, file: BinaryIO) -> None:
        """Write it. Safetensors' own writer takes twice as long for many small tensors, on cores that steps need
        (docs/log/2026-11-22-adapter-layout-cost.md).
        """
        for part in self.parts:
            file.write(part)


def served_file(layout: ServedLayout, digest: str, base: Base) -> LayoutFile:
    """The file of an adapter. Its parts are views of the layout's tensors."""
    metadata = {
        "format": FORMAT,
        CHECKSUM_FIELD: CHECKSUM_UNKNOWN,
        "digest": digest,
        "base": base.hash,
        "weights": base.weights_hash,
        "dtype": str(base.dtype).removeprefix("torch."),
        "rank": str(layout.rank),
        "modules": json.dumps(layout.modules, separators=(",", ":")),
    }
    if layout.heads is not None:
        metadata["heads"] = json.dumps(layout.heads, separators=(",", ":"))
    if layout.scaling is not None:
        metadata["scaling"] = repr(float(layout.scaling))
    if layout.num_virtual:
        metadata["num_virtual"] = str(layout.num_virtual)
    if layout.num_added:
        metadata["num_added"] = str(layout.num_added)
    if layout.changes_nothing:
        metadata["changes_nothing"] = "1"
    if layout.invocation_ids:
        metadata["invocation_ids"] = json.dumps(layout.invocation_ids, separators=(",", ":"))
    described = {name: (_TYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in layout.tensors.items()}
    head, order = header.compose(described, metadata)
    values = [layout.tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in order]
    return LayoutFile((memoryview(with_checksum(head, values)), *values))


def _module(change: ModuleChange, base: Base) -> dict[str, torch.Tensor]:
    """The module's parts, contiguous."""
    parts: dict[str, torch.Tensor] = {}
    if change.a is not None and change.b is not None:
        parts["A"], parts["B"] = _factors(change, base.dtype)
    if change.magnitude is not None:
        parts["magnitude"] = change.magnitude.float().reshape(-1)
    if (bias := _added_bias(change, base.values)) is not None:
        parts["bias"] = bias
    if change.scale is not None:
        parts["scale"] = change.scale.float()
    if change.virtual is not None:
        parts["virtual"] = change.virtual.float()
    if change.prefix is not None:
        parts["prefix"] = change.prefix.float()
    for tensor in parts.values():
        if not is_finite(tensor):
            raise AdapterInvalid(_not_finite_message(change, base.dtype))
    return {part: tensor.contiguous() for part, tensor in parts.items()}


def _factors(change: ModuleChange, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B, with the scaling in B, computed in float32 and rounded once."""
    assert change.a is not None and change.b is not None
    a, b = change.a, change.b if change.b.dtype == dtype else change.b.float()
    b = torch.mul(b, change.scaling, out=torch.empty_like(b, dtype=dtype))  # in float32 whatever the dtypes are
    if change.kind == "experts":
        a = a.reshape(change.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, change.num_experts).permute(2, 0, 1)
    return a.to(dtype), b


def _added_bias(change: ModuleChange, values: BaseValues) -> torch.Tensor | None:
    """[out] float32, or None if nothing is added."""
    added: torch.Tensor | None = None
    if change.b_bias is not None:
        added = change.b_bias.float() * change.scaling
    if _needs_own_bias(change, values):
        own = values[f"{change.module}.bias"].float()
        final = own if change.new_bias is None else change.new_bias.float()
        if change.scale is not None and change.kind != "norm":
            final = final * change.scale.float()
        difference = final - own
        added = difference if added is None else added + difference
    return added


def _needs_own_bias(change: ModuleChange, values: BaseValues) -> bool:
    """Whether the change is computed from the base's bias."""
    if change.kind == "norm":
        return change.new_bias is not None
    return change.new_bias is not None or (change.scale is not None and values.is_parameter(f"{change.module}.bias"))


def _not_finite_message(change: ModuleChange, dtype: torch.dtype) -> str:
    tensors = (getattr(change, field) for field in TENSORS)
    return not_finite(change.module, all(tensor is None or is_finite(tensor) for tensor in tensors), dtype)


CHANGES_NOTHING = "it changes nothing: all of its B, its biases and its new weights are zero"
DEFAULT_RANK = 8
"""PEFT's, for a configuration without one."""
_HEADS_ALONE = b"medusa heads"
"""Replaces the configuration in the digest of heads only, because their config.json does not affect the result."""


@dataclass(frozen=True)
class ServedContents:
    """An adapter that is served, as far as its files were read."""

    decision: ServedChanges | None
    """None for heads without an adapter, and for a `.bin` of which only the headers were asked for."""
    heads: ParsedHeads | None
    invocation_ids: tuple[int, ...]
    warnings: tuple[str, ...]
    rank: int
    """The largest of its modules, 0 if it changes none."""
    num_added: int = 0
    """Tokens that it adds to the base's."""


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
    def is_folded(self) -> bool:
        """Whether its change to each module is computed."""
        return self.values is not None and configuration.is_folded(self.values)

    @property
    def digest(self) -> str:
        """The name of the adapter below the router."""
        known = _HEADS_ALONE if self.values is None else configuration.canonical(self.values)
        return refs.adapter_digest(known, b"".join(file.hash.digest() for file in self._files))

    def decide(self, reader: PlannedReader, base: Base) -> ServedContents:
        """Whether and how the adapter is served. Raises AdapterInvalid or NotServed."""
        parsed = self._parsed_heads(reader, base.kinds)
        warnings = [] if parsed is None else list(parsed.warnings)
        decision: ServedChanges | None = None
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
        rank = 0 if decision is None else decision.rank
        return ServedContents(decision, parsed, ids, tuple(warnings), rank, self.num_added(reader.skeleton))

    def lay_out(self, reader: PlannedReader, base: Base) -> tuple[ServedContents, ServedLayout]:
        """What was decided, and the served layout. Raises AdapterInvalid or NotServed."""
        served = self.decide(reader, base)
        layout = ServedLayout({}, {}) if served.decision is None else lay_out(served.decision, base)
        layout = replace(layout, invocation_ids=served.invocation_ids, num_added=served.num_added)
        if served.heads is not None:
            assert reader.skeleton.output_shape is not None
            tensors = lay_out_heads(served.heads, reader.skeleton.output_shape[0], base.dtype)
            layout = replace(layout, tensors={**layout.tensors, **tensors}, heads=heads_metadata(served.heads.shape))
            layout = replace(layout, changes_nothing=False)
        if layout.changes_nothing:
            served = replace(served, warnings=(*served.warnings, CHANGES_NOTHING))
        return served, layout

    def num_added(self, skeleton: Skeleton) -> int:
        """Tokens that it adds to the base's. Raises AdapterInvalid."""
        return 0 if self.changes is None else vocabulary.num_added(skeleton, self.changes.tensors)

    def _parsed_heads(self, reader: PlannedReader, kinds: frozenset[str]) -> ParsedHeads | None:
        """Raises AdapterInvalid or NotServed."""
        if self.heads is None:
            return None
        if HEADS_KIND not in kinds:
            raise NotServed(f"an adapter with Medusa heads ({self.heads_name}) is not served")
        return parse_heads(self.heads_name, self.heads.tensors, self.heads_config, reader.skeleton.output_shape)

    def check_unchanged(self) -> None:
        """Raises AdapterChanged if a file has changed since it was read."""
        for file in self._files:
            file.check_unchanged()


def adapter_of_headers(small: Mapping[str, bytes], heads: Mapping[str, FileHead], skeleton: Skeleton) -> Contents:
    """Contents without values: `small` are the small files, `heads` the beginnings of the weight files, by name.
    `skeleton`: of the base, for files of llama.cpp.

    Raises AdapterInvalid, AdapterTooLarge or NotServed.
    """
    heads_name = find_heads(small.keys() | heads.keys(), lambda name: heads[name].content)
    if heads_name is None and (file := gguf_file(small.keys() | heads.keys())) is not None:
        head = heads[file]
        read, tensors = read_gguf(head.content, head.size, file, skeleton, has_values=False)
        return Contents(read, Weights(tensors, hashlib.sha256(), head.size, False, has_values=False), None)
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
def open_adapter(folder: Path, limit: int, skeleton: Skeleton | None = None) -> Iterator[Contents]:
    """The adapter in `folder`, of at most `limit` bytes of weights. Tensors are valid inside only. `skeleton`: of the
    base, for files of llama.cpp.

    Raises AdapterInvalid or AdapterTooLarge with a sentence that names the file.
    """
    names = os.listdir(folder)
    heads_name = find_heads(names, lambda name: weights.read_small(folder / name, PEEK_BYTES))
    if heads_name is None and skeleton is not None and (file := gguf_file(names)) is not None:
        with weights.opened(folder, limit, [file]) as mapped:
            assert mapped.memory is not None
            read, mapped.tensors = read_gguf(mapped.memory, mapped.num_bytes, file, skeleton)
            yield Contents(read, mapped, None)
        return
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
