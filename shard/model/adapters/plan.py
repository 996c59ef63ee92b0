"""Plans how an adapter's file is laid out for the kernels: which of its bytes go where in memory.

Files with equal headers share a plan, so most adapters of a base need only a few table look-ups.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.lora.memory import ALIGNMENT
from lorikeet.shard.model.lora.served_file import HEADS, Place, ServedFile
from lorikeet.shard.model.lora.targets import MOST_RANK, OUT_BLOCK, RANK_BLOCK, ExpertTargets, LoraTarget

NOWHERE = -1


class Form(IntEnum):
    """The layout of factors; the values of `pack` in targets.c."""

    BLOCKS = 0
    """For targets.c: A [rank'/8, in'/step, 8, step], of embeddings [in, rank'], B [out'/64, rank', 64]; ' rounds up."""
    ROWS = 1
    """For kernels of a device and for the specification: A [rank, in], of embeddings [in, rank], B [rank, out]."""


@dataclass(frozen=True)
class Pair:
    """The factors of one module."""

    target: LoraTarget
    # [rank, in] and [out, rank] in the file
    a: Place
    b: Place
    to_a: int
    """Offset of A in the adapter's memory, in bytes."""
    to_b: int
    """Offset of B in the adapter's memory, in bytes."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Vector:
    """A bias, a scale, or DoRA's magnitude, from which the scale is computed. [out] float32."""

    target: LoraTarget
    values: Place
    to: int
    pair: Pair | None = None
    """The factors that a magnitude belongs to."""


@dataclass
class LayoutPlan:
    """For all files with equal headers."""

    form: Form
    targets: list[LoraTarget] = field(default_factory=list)
    # padded rank of each target, and the offsets of a, b, scale and bias in memory
    entries: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    """Biases and scales, which are used as they are."""
    magnitudes: list[Vector] = field(default_factory=list)
    virtual: Vector | None = None
    """Embeddings of virtual tokens, [tokens, out] float32."""
    prefix: Vector | None = None
    """Their keys and values, [layers, 2, tokens, heads, dim] float32."""
    num_bytes: int = 0
    """Bytes of the adapter's memory."""
    file_bytes: int = 0
    """Least size of a file's tensors."""

    def add(self, target: LoraTarget, places: Mapping[str, Place], dtype: torch.dtype) -> None:
        """Add a module. `places`: by key of the served layout. Raises ValueError for tensors that do not fit it."""
        places = _own(target, places)
        a, b = places.get("A"), places.get("B")
        pair = None if a is None or b is None else self._pair(target, a, b, dtype)
        bias, scale = (self._vector(target, places.get(key), pair) for key in ("bias", "scale"))
        magnitude = self._vector(target, places.get("magnitude"), pair)
        self.vectors += [vector for vector in (bias, scale) if vector is not None]
        self.magnitudes += [] if magnitude is None else [magnitude]
        if (rows := places.get("virtual")) is not None:
            self.virtual = self._virtual(target, rows)
            if (prefix := places.get("prefix")) is not None:
                self.prefix = self._prefix(target, prefix, rows.shape[0])
        rank, to_a, to_b = (0, NOWHERE, NOWHERE) if pair is None else (self.padded(pair.rank), pair.to_a, pair.to_b)
        to_scale, to_bias = (NOWHERE if vector is None else vector.to for vector in (magnitude or scale, bias))
        self.targets.append(target)
        self.entries.append((rank, to_a, to_b, to_scale, to_bias))

    def padded(self, rank: int) -> int:
        """A rank padded as the kernels need it."""
        return -(-rank // RANK_BLOCK) * RANK_BLOCK if self.form is Form.BLOCKS else rank

    def _pair(self, target: LoraTarget, a: Place, b: Place, dtype: torch.dtype) -> Pair:
        rank = a.shape[0]
        if (
            a.shape != (rank, target.num_in)
            or b.shape != (target.num_out, rank)
            or not 0 < rank <= MOST_RANK["cpu" if target.kernels is None else "cuda"]
        ):
            raise ValueError(f"{target.name}: factors of shapes {list(a.shape)} and {list(b.shape)} do not fit")
        if a.dtype != dtype or b.dtype != dtype:
            raise ValueError(f"{target.name}: factors are {a.dtype} and {b.dtype}, the base is {dtype}")
        shape_a, shape_b = shapes(self.form, target, rank, dtype)
        to_a = self._take(math.prod(shape_a) * dtype.itemsize)
        pair = Pair(target, a, b, to_a, self._take(math.prod(shape_b) * dtype.itemsize))
        self.pairs.append(pair)
        return pair

    def _vector(self, target: LoraTarget, values: Place | None, pair: Pair | None) -> Vector | None:
        if values is None:
            return None
        if values.shape != (target.num_out,) or values.dtype != torch.float32:
            raise ValueError(f"{target.name}: a vector of shape {list(values.shape)} for {target.num_out} outputs")
        return Vector(target, values, self._take(4 * target.num_out), pair)

    def _virtual(self, target: LoraTarget, rows: Place) -> Vector:
        is_here = target.is_embedding and target.kernels is None and target.partition is None
        if not is_here or len(rows.shape) != 2 or rows.shape[1] != target.num_out or rows.dtype != torch.float32:
            raise ValueError(f"this shard does not support virtual tokens of shape {list(rows.shape)} on {target.name}")
        return Vector(target, rows, self._take(4 * math.prod(rows.shape)))

    def _prefix(self, target: LoraTarget, values: Place, num_tokens: int) -> Vector:
        if len(values.shape) != 5 or values.shape[1:3] != (2, num_tokens) or values.dtype != torch.float32:
            raise ValueError(f"keys and values of shape {list(values.shape)} do not fit {num_tokens} virtual tokens")
        return Vector(target, values, self._take(4 * math.prod(values.shape)))

    def _take(self, num_bytes: int) -> int:
        first = self.num_bytes
        self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return first

    def image(self) -> npt.NDArray[np.int64]:
        """[targets, 5] the entries."""
        return np.array(self.entries, np.int64).reshape(-1, 5)

    def table(self) -> npt.NDArray[np.int64]:
        """[pairs, 9] `Factors` of targets.c, with offsets in place of addresses."""
        rows = [
            (pair.a.start, pair.b.start, pair.to_a, pair.to_b, pair.rank, of.num_in, of.num_out, of.is_embedding,
             pair.a.stride or of.num_in)
            for pair in self.pairs
            for of in (pair.target,)
        ]  # fmt: skip
        return np.array(rows, np.int64).reshape(-1, 9)


def shapes(form: Form, target: LoraTarget, rank: int, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B in memory."""
    if form is Form.ROWS:
        return ((target.num_in, rank) if target.is_embedding else (rank, target.num_in)), (rank, target.num_out)
    num_ranks, step = -(-rank // RANK_BLOCK), 64 // dtype.itemsize
    wide = num_ranks * RANK_BLOCK
    a = (target.num_in, wide) if target.is_embedding else (num_ranks, -(-target.num_in // step), RANK_BLOCK, step)
    return a, (-(-target.num_out // OUT_BLOCK), wide, OUT_BLOCK)


KEYS = ("A", "B", "magnitude", "scale", "bias", "virtual", "prefix")


def plan_for(file: ServedFile, targets: Mapping[str, Target], form: Form, dtype: torch.dtype) -> LayoutPlan:
    """The plan for a file. Raises ValueError for tensors that this base, or this shard, does not support."""
    plan, places = LayoutPlan(form, file_bytes=file.num_bytes), file.places()
    for name in _modules(file):
        target = targets.get(name)
        if target is None:
            raise ValueError(f"the base has no module {name} that an adapter can change")
        found = {key: places.pop(f"{name}.{key}") for key in KEYS if f"{name}.{key}" in places}
        if isinstance(target, ExpertTargets):
            _add_experts(plan, target, found, dtype)
        else:
            plan.add(target, found, dtype)
    if "heads" in file.metadata:
        places = {name: place for name, place in places.items() if not name.startswith(HEADS)}
    if places:
        raise ValueError(f"this shard does not support tensor {min(places)} of the adapter")
    return plan


def _own(target: LoraTarget, places: Mapping[str, Place]) -> Mapping[str, Place]:
    """The rank's part of a module's tensors. Raises ValueError if they do not fit the whole module."""
    partition = target.partition
    if partition is None:
        return places
    whole = {
        "A": (1, partition.num_in),
        "B": (0, partition.num_out),
        "magnitude": (0, partition.num_out),
        "bias": (0, partition.num_out),
        "scale": (0, partition.num_out),
    }
    for key, place in places.items():
        axis, wanted = whole[key]
        if len(place.shape) <= axis or place.shape[axis] != wanted:
            raise ValueError(f"{target.name}: {key} of shape {list(place.shape)} does not fit")
    own = dict(places)
    if partition.is_row_parallel:
        if "A" in own:
            own["A"] = own["A"].columns(partition.columns)
        if partition.rank > 0:  # the sum over ranks has the first rank's
            own.pop("bias", None)
    else:
        own |= {key: place.rows(partition.rows) for key, place in places.items() if key != "A"}
    return own


def _modules(file: ServedFile) -> list[str]:
    try:
        return list(json.loads(file.metadata["modules"]))
    except (KeyError, TypeError, ValueError) as failure:
        raise ValueError(f"the adapter's file does not list the modules it changes: {failure}") from failure


def _add_experts(plan: LayoutPlan, targets: ExpertTargets, places: Mapping[str, Place], dtype: torch.dtype) -> None:
    """The factors of a block's experts are stacked by expert."""
    num_experts = len(targets.experts)
    if set(places) != {"A", "B"} or any(place.shape[0] != num_experts for place in places.values()):
        raise ValueError(f"{targets.name}: experts take exactly two factors for each of {num_experts}")
    for index, target in enumerate(targets.experts):
        plan.add(target, {key: _part(place, index) for key, place in places.items()}, dtype)


def _part(place: Place, index: int) -> Place:
    shape = place.shape[1:]
    return Place(place.dtype, shape, place.start + index * math.prod(shape) * place.dtype.itemsize)
