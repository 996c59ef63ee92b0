"""What is to be done with an adapter's file: which of its bytes go where in the memory of the kernels.

Files whose headers are alike have the same plan, so that most adapters of a base cost a few table look-ups.
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
    """How factors lie; the values of targets.c's `pack`."""

    BLOCKS = 0
    """For targets.c: A [rank'/8, in'/step, 8, step], of embeddings [in, rank'], B [out'/64, rank', 64]; ' rounds up."""
    ROWS = 1
    """For kernels of a device and for the specification: A [rank, in], of embeddings [in, rank], B [rank, out]."""


@dataclass(frozen=True)
class Pair:
    """The factors of one module."""

    site: LoraTarget
    # [rank, in] and [out, rank] in the file
    a: Place
    b: Place
    to_a: int
    """In bytes from the beginning of the adapter's memory …"""
    to_b: int
    """… as all that begins with `to`."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Vector:
    """A bias, or the magnitude of DoRA, which becomes a scale. [out] float32."""

    site: LoraTarget
    values: Place
    to: int
    pair: Pair | None = None
    """Whose rows a magnitude is for."""


@dataclass
class Plan:
    """For all files that are alike."""

    form: Form
    targets: list[LoraTarget] = field(default_factory=list)
    # of each site its rank, as the kernels count it, and where a, b, scale and bias begin in memory
    entries: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    biases: list[Vector] = field(default_factory=list)
    magnitudes: list[Vector] = field(default_factory=list)
    num_bytes: int = 0
    """Of the adapter's memory."""
    file_bytes: int = 0
    """That a file's tensors take at least."""

    def add(self, site: LoraTarget, places: Mapping[str, Place], dtype: torch.dtype) -> None:
        """One more module. `places`: by key of the served layout. Raises ValueError for what does not fit it."""
        places = _own(site, places)
        a, b = places.get("A"), places.get("B")
        pair = None if a is None or b is None else self._pair(site, a, b, dtype)
        bias, magnitude = (self._vector(site, places.get(key), pair) for key in ("bias", "magnitude"))
        self.biases += [] if bias is None else [bias]
        self.magnitudes += [] if magnitude is None else [magnitude]
        rank, to_a, to_b = (0, NOWHERE, NOWHERE) if pair is None else (self.wide(pair.rank), pair.to_a, pair.to_b)
        to_scale, to_bias = (NOWHERE if vector is None else vector.to for vector in (magnitude, bias))
        self.targets.append(site)
        self.entries.append((rank, to_a, to_b, to_scale, to_bias))

    def wide(self, rank: int) -> int:
        """A rank as the kernels count it."""
        return -(-rank // RANK_BLOCK) * RANK_BLOCK if self.form is Form.BLOCKS else rank

    def _pair(self, site: LoraTarget, a: Place, b: Place, dtype: torch.dtype) -> Pair:
        rank = a.shape[0]
        if a.shape != (rank, site.num_in) or b.shape != (site.num_out, rank) or not 0 < rank <= MOST_RANK:
            raise ValueError(f"{site.name}: factors of shapes {list(a.shape)} and {list(b.shape)} do not fit")
        if a.dtype != dtype or b.dtype != dtype:
            raise ValueError(f"{site.name}: factors of {a.dtype} and {b.dtype} beside a base of {dtype}")
        shape_a, shape_b = shapes(self.form, site, rank, dtype)
        to_a = self._take(math.prod(shape_a) * dtype.itemsize)
        pair = Pair(site, a, b, to_a, self._take(math.prod(shape_b) * dtype.itemsize))
        self.pairs.append(pair)
        return pair

    def _vector(self, site: LoraTarget, values: Place | None, pair: Pair | None) -> Vector | None:
        if values is None:
            return None
        if values.shape != (site.num_out,) or values.dtype != torch.float32:
            raise ValueError(f"{site.name}: a vector of shape {list(values.shape)} does not fit {site.num_out} outputs")
        return Vector(site, values, self._take(4 * site.num_out), pair)

    def _take(self, num_bytes: int) -> int:
        first = self.num_bytes
        self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return first

    def image(self) -> npt.NDArray[np.int64]:
        """[sites, 5] the entries."""
        return np.array(self.entries, np.int64).reshape(-1, 5)

    def table(self) -> npt.NDArray[np.int64]:
        """[pairs, 9] `Factors` of targets.c, with places for addresses."""
        rows = [
            (pair.a.start, pair.b.start, pair.to_a, pair.to_b, pair.rank, site.num_in, site.num_out, site.is_embedding,
             pair.a.stride or site.num_in)
            for pair in self.pairs
            for site in (pair.site,)
        ]  # fmt: skip
        return np.array(rows, np.int64).reshape(-1, 9)


def shapes(form: Form, site: LoraTarget, rank: int, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of A and B in memory."""
    if form is Form.ROWS:
        return ((site.num_in, rank) if site.is_embedding else (rank, site.num_in)), (rank, site.num_out)
    num_ranks, step = -(-rank // RANK_BLOCK), 64 // dtype.itemsize
    wide = num_ranks * RANK_BLOCK
    a = (site.num_in, wide) if site.is_embedding else (num_ranks, -(-site.num_in // step), RANK_BLOCK, step)
    return a, (-(-site.num_out // OUT_BLOCK), wide, OUT_BLOCK)


KEYS = ("A", "B", "magnitude", "bias")


def plan_for(file: ServedFile, targets: Mapping[str, Target], form: Form, dtype: torch.dtype) -> Plan:
    """Raises ValueError for what this base, or this shard, has no place for."""
    plan, places = Plan(form, file_bytes=file.num_bytes), file.places()
    for name in _modules(file):
        site = targets.get(name)
        if site is None:
            raise ValueError(f"the base has no module {name} that an adapter could change")
        found = {key: places.pop(f"{name}.{key}") for key in KEYS if f"{name}.{key}" in places}
        if isinstance(site, ExpertTargets):
            _add_experts(plan, site, found, dtype)
        else:
            plan.add(site, found, dtype)
    if "heads" in file.metadata:
        places = {name: place for name, place in places.items() if not name.startswith(HEADS)}
    if places:
        raise ValueError(f"this shard does not compute what {min(places)} of the adapter changes")
    return plan


def _own(site: LoraTarget, places: Mapping[str, Place]) -> Mapping[str, Place]:
    """What of a module's tensors this rank holds. Raises ValueError where they do not fit the whole module."""
    cut = site.cut
    if cut is None:
        return places
    whole = {"A": (1, cut.num_in), "B": (0, cut.num_out), "magnitude": (0, cut.num_out), "bias": (0, cut.num_out)}
    for key, place in places.items():
        axis, wanted = whole[key]
        if len(place.shape) <= axis or place.shape[axis] != wanted:
            raise ValueError(f"{site.name}: {key} of shape {list(place.shape)} does not fit")
    own = dict(places)
    if cut.is_row_parallel:
        if "A" in own:
            own["A"] = own["A"].columns(cut.columns)
        if cut.rank > 0:  # the results of all ranks are added up
            own.pop("bias", None)
    else:
        own |= {key: place.rows(cut.rows) for key, place in places.items() if key != "A"}
    return own


def _modules(file: ServedFile) -> list[str]:
    try:
        return list(json.loads(file.metadata["modules"]))
    except (KeyError, TypeError, ValueError) as failure:
        raise ValueError(f"the adapter's file does not say which modules it changes: {failure}") from failure


def _add_experts(plan: Plan, targets: ExpertTargets, places: Mapping[str, Place], dtype: torch.dtype) -> None:
    """The factors of a block's experts lie one expert after the other."""
    num_experts = len(targets.experts)
    if set(places) != {"A", "B"} or any(place.shape[0] != num_experts for place in places.values()):
        raise ValueError(f"{targets.name}: experts take two factors for each of {num_experts}, and nothing else")
    for index, site in enumerate(targets.experts):
        plan.add(site, {key: _part(place, index) for key, place in places.items()}, dtype)


def _part(place: Place, index: int) -> Place:
    shape = place.shape[1:]
    return Place(place.dtype, shape, place.start + index * math.prod(shape) * place.dtype.itemsize)
