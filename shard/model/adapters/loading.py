"""Reads a file in the served layout into the content of a slot: low-rank factors by module, ready for the kernels.

The loader has checked the file against the base; here only what would break the kernels is checked again.
A `LayoutPlan` says which of its bytes go where in memory. Files with equal headers share a plan, so most adapters of a
base need only a few table look-ups.
"""

import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.proto.process import usable_cores
from lorikeet.shard.model.adapters.added_tokens import AddedTokens
from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.attention_binding import AttentionBinding
from lorikeet.shard.model.lora.memory import ALIGNMENT, HostMemory
from lorikeet.shard.model.lora.served_file import HEADS, Place, ServedFile, map_file
from lorikeet.shard.model.lora.targets import (
    MOST_RANK,
    OUT_BLOCK,
    RANK_BLOCK,
    ExpertTargets,
    Kernels,
    LoraTarget,
    SlotImage,
    SlotWeights,
    compiled,
    library_for,
)
from lorikeet.shard.model.medusa.heads import HeadsContent, HeadsPool, read_heads
from lorikeet.shard.system.native import CompilerMissing

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
    """Float32 values: [out] of a bias, a scale, or DoRA's magnitude, from which the scale is computed; or a table of
    virtual tokens.
    """

    target: LoraTarget
    values: Place
    to: int
    pair: Pair | None = None
    """The factors that a magnitude belongs to."""

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Its values in an adapter's memory, [bytes] uint8."""
        return _view(memory, self.to, self.values.shape, torch.float32)


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
        is_here = target.is_embedding and target.partition is None
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


MOST_PLANS = 64
NICENESS = 9
"""Niceness of the threads that lay out factors, on Linux: steps come first. The same as the adapter loader's."""
MOST_THREADS = 4
"""Threads that lay out factors: as many as the memory of a large machine serves."""


RowParallelSum = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor [n] in host memory over all ranks."""


@dataclass(frozen=True)
class AdapterContent:
    """One adapter in host memory."""

    targets: Sequence[LoraTarget]
    # [targets, 5] padded rank, and offsets in memory of a, b, scale and bias, -1 for none
    entries: npt.NDArray[np.int64]
    # [bytes] uint8
    memory: torch.Tensor
    form: Form
    dtype: torch.dtype
    image: SlotImage | None = None
    """Its entries in a device's table."""
    heads: HeadsContent | None = None
    # [tokens, H]: embeddings of virtual tokens
    virtual: Vector | None = None
    # [layers, 2, tokens, heads, dim]: keys and values in place of those of the embeddings
    prefix: Vector | None = None
    num_added: int = 0
    """Tokens that it adds to the base's."""

    @property
    def num_bytes(self) -> int:
        return self.memory.numel() + (0 if self.heads is None else self.heads.num_bytes)

    @property
    def num_heads(self) -> int:
        return 0 if self.heads is None else self.heads.shape.num_heads

    def addresses(self) -> npt.NDArray[np.int64]:
        """[targets, 5] the entries with addresses of this process, 0 for none."""
        found = np.where(self.entries == NOWHERE, 0, self.entries + self.memory.data_ptr())
        found[:, 0] = self.entries[:, 0]
        return found

    def weights(self, index: int) -> SlotWeights:
        """Views of its weights for one of its targets."""
        target, (rank, a, b, scale, bias) = self.targets[index], self.entries[index].tolist()
        shape_a, shape_b = shapes(self.form, target, rank, self.dtype)
        vector = (target.num_out,)
        factor = None if a == NOWHERE else self._view(a, shape_a, self.dtype)
        return SlotWeights(
            factor.t() if factor is not None and target.is_embedding and self.form is Form.ROWS else factor,
            None if b == NOWHERE else self._view(b, shape_b, self.dtype),
            None if scale == NOWHERE else self._view(scale, vector, torch.float32),
            None if bias == NOWHERE else self._view(bias, vector, torch.float32),
            self.form is Form.BLOCKS and a != NOWHERE,
        )

    def _view(self, first: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return _view(self.memory, first, shape, dtype)


class SlotParts:
    """What adapters in slots have apart from factors, scales and biases: virtual tokens, and tokens that they add."""

    def __init__(self, bindings: Sequence[AttentionBinding], added_tokens: AddedTokens) -> None:
        """`bindings`: of all layers, in order."""
        self._bindings, self._added_tokens = bindings, added_tokens

    def put(self, slot: int, content: AdapterContent, memory: torch.Tensor) -> None:
        """Put the parts of `content` into `slot`. memory: [bytes] uint8, the adapter's on the device of the model."""
        if content.virtual is not None:
            content.virtual.target.virtual[slot] = content.virtual.of(memory)
        if content.prefix is not None:
            for binding, (keys, values) in zip(self._bindings, content.prefix.of(memory), strict=True):
                binding.prefixes[slot] = keys, values
        self._added_tokens.put(slot, content.num_added)

    def clear(self, slot: int, content: AdapterContent) -> None:
        """Empty `slot`, which has `content`."""
        if content.virtual is not None:
            content.virtual.target.virtual.pop(slot, None)
        for binding in self._bindings:
            binding.prefixes.pop(slot, None)
        self._added_tokens.clear(slot)


@dataclass(frozen=True)
class HostLayout:
    """The layout and place of adapters in host memory."""

    dtype: torch.dtype
    memory: HostMemory
    kernels: Kernels | None = None
    """Kernels of the device; None for the CPU."""
    layers: tuple[tuple[int, int, int], ...] = ()
    """Heads of K and V, and dimensions of each, of every layer's attention."""

    @property
    def form(self) -> Form:
        """The layout that the kernels read."""
        return Form.BLOCKS if self.kernels is None and compiled(self.dtype) is not None else Form.ROWS


@dataclass(frozen=True)
class Opened:
    """An adapter's file, valid for the base, with its plan."""

    file: ServedFile
    plan: LayoutPlan


class AdapterFiles:
    """Reads adapters for the targets of one model. Not thread-safe."""

    def __init__(
        self,
        targets: Mapping[str, Target],
        destination: HostLayout,
        heads: HeadsPool | None = None,
        sum_over_ranks: RowParallelSum | None = None,
    ) -> None:
        """`heads`: the pool for heads of adapters, None where they are rejected. `sum_over_ranks`: of values that each
        rank computes from its columns of a weight.
        """
        self._targets = targets
        self._heads = heads
        self._sum_over_ranks = sum_over_ranks
        self._destination = destination
        self._form = destination.form
        self._plans: dict[str, LayoutPlan] = {}

    def read(self, path: Path) -> AdapterContent:
        """Read an adapter's file. Raises ValueError with a reason, and FileNotFoundError."""
        return self.lay_out(self.open(path))

    def open(self, path: Path) -> Opened:
        """Open a file and plan its layout. Raises ValueError with a reason, and FileNotFoundError."""
        return self.plan(map_file(path))

    def plan(self, content: mmap.mmap) -> Opened:
        """Plan the layout of an opened file. Raises ValueError with a reason."""
        file = ServedFile(content)
        return Opened(file, self._plan(file))

    def lay_out(self, opened: Opened) -> AdapterContent:
        """Copy its tensors into host memory as planned. Raises ValueError with a reason."""
        file, plan, destination = opened.file, opened.plan, self._destination
        memory = destination.memory.take(plan.num_bytes)
        _lay_out(plan, file, memory)
        for vector in (*plan.vectors, plan.virtual, plan.prefix):
            if vector is not None:
                vector.of(memory).copy_(file.tensor(vector.values))
        for vector in plan.magnitudes:
            scale = file.tensor(vector.values).clone()
            if vector.pair is not None:
                part = vector.target.partition
                squares = row_squares(vector.target, file.tensor(vector.pair.a), file.tensor(vector.pair.b).t())
                if self._sum_over_ranks is not None and part is not None and part.is_row_parallel:
                    squares = self._sum_over_ranks(squares)
                scale /= squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
            vector.of(memory).copy_(scale)
        entries, kernels = plan.image(), destination.kernels
        image = None if kernels is None else kernels.image(plan.targets, entries)
        self._check_virtual(plan)
        heads = read_heads(file, self._heads, destination.memory, destination.dtype, kernels is not None)
        form, dtype = self._form, destination.dtype
        num_added = int(file.metadata.get("num_added", 0))
        tables = plan.virtual, plan.prefix
        return AdapterContent(plan.targets, entries, memory, form, dtype, image, heads, *tables, num_added)

    def _check_virtual(self, plan: LayoutPlan) -> None:
        """Raise ValueError for virtual tokens that the model cannot compute."""
        kernels, layers = self._destination.kernels, self._destination.layers
        if plan.virtual is not None and kernels is not None and self._sum_over_ranks is not None:
            raise ValueError("virtual tokens are not served by several devices (--num-shard)")
        if plan.prefix is None:
            return
        num_layers, _, _, *shape = plan.prefix.values.shape
        if len(layers) != num_layers or any((heads, key) != tuple(shape) or key != value
                                            for heads, key, value in layers):  # fmt: skip
            raise ValueError(f"keys and values of {num_layers} layers and heads {shape} do not fit this model's")

    def _plan(self, file: ServedFile) -> LayoutPlan:
        plan = self._plans.get(file.likeness)
        if plan is None or file.num_bytes < plan.file_bytes:
            plan = plan_for(file, self._targets, self._form, self._destination.dtype)
            if len(self._plans) == MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[file.likeness] = plan
        return plan


def reading_threads() -> int:
    """How many threads copy an adapter's factors, and as many compare its file with the checksum at the same time."""
    return min(MOST_THREADS, usable_cores())


def _lay_out(plan: LayoutPlan, file: ServedFile, memory: torch.Tensor) -> None:
    """Write the factors into memory, [bytes] uint8, as the kernels read them."""
    if not plan.pairs:
        return
    try:
        code = library_for(torch.float32 if plan.pairs[0].a.dtype.itemsize == 4 else torch.bfloat16)
    except CompilerMissing:
        for pair in plan.pairs:
            a, b = file.tensor(pair.a), file.tensor(pair.b).t()
            arranged = SlotWeights(a, b).arranged(pair.target.is_embedding)
            for to, tensor in ((pair.to_a, arranged.a), (pair.to_b, arranged.b)):
                assert tensor is not None and plan.form is Form.ROWS
                _view(memory, to, tensor.shape, tensor.dtype).copy_(tensor)
        return
    table = plan.table()
    table[:, :2] += file.address
    fused = {index: file.tensor(pair.b) for index, pair in enumerate(plan.pairs) if pair.b.parts}
    for index, tensor in fused.items():
        table[index, 1] = tensor.data_ptr()
    table[:, 2:4] += memory.data_ptr()
    # releases the interpreter lock
    code.pack(table.ctypes.data, len(table), plan.form, NICENESS, reading_threads())


def _view(memory: torch.Tensor, first: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """memory: [bytes] uint8."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return memory[first : first + num_bytes].view(dtype).view(tuple(shape))


def row_squares(target: LoraTarget, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Squared norms of the rows of `W + B A`, from those of W and its product with A (DoRA, Liu et al. 2024): [out]
    float32.

    a: [rank, in], b: [rank, out], in host memory, as the result is; computed on the device of W.
    """
    if target.project is None:
        raise ValueError(f"{target.name} has no rows, whose norms DoRA divides by")
    device = target.squared_norms.device
    with apart_from_steps(device):
        return _row_squares(target, a.to(device), b.to(device)).cpu()


def _row_squares(target: LoraTarget, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a: [rank, in], b: [rank, out] on the device of W, as the result is: [out] float32."""
    assert target.project is not None
    rank = a.shape[0]
    # [rank, out] W times each row of A; two rows at least, for equal bits
    products = target.project(a if rank > 1 else a.expand(2, -1).contiguous())[:rank].float()
    wide = b.float()
    # [rank, rank]
    gram = a.float() @ a.float().t()
    return target.squared_norms + 2 * (products * wide).sum(0) + (wide * (gram @ wide)).sum(0)


@contextmanager
def apart_from_steps(device: torch.device) -> Iterator[None]:
    """Launches inside wait for no running step, and no step waits for them: on CUDA they have a stream of their own."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_reader_stream(device)):
        yield


@cache
def _reader_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
