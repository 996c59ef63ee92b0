"""Reads a file in the served layout into the content of a slot: low-rank factors by module, ready for the kernels.

The loader has checked the file against the base; here only what would break the kernels is checked again.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.adapters.plan import NOWHERE, Form, LayoutPlan, Vector, plan_for, shapes
from lorikeet.shard.model.lora.memory import HostMemory
from lorikeet.shard.model.lora.served_file import ServedFile, map_file
from lorikeet.shard.model.lora.targets import Kernels, LoraTarget, SlotImage, SlotWeights, compiled, library_for
from lorikeet.shard.model.medusa.heads import HeadsPool
from lorikeet.shard.model.medusa.loading import HeadsContent, read_heads
from lorikeet.shard.system.cores import usable_cores
from lorikeet.shard.system.native import CompilerMissing

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
    # [tokens, H] float32: embeddings of virtual tokens, and their module
    virtual: tuple[LoraTarget, torch.Tensor] | None = None
    # [layers, 2, tokens, heads, dim] float32: keys and values in place of those of the embeddings
    prefix: torch.Tensor | None = None

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
        for vector in plan.vectors:
            _view(memory, vector.to, vector.values.shape, torch.float32).copy_(file.tensor(vector.values))
        for vector in plan.magnitudes:
            scale = file.tensor(vector.values).clone()
            if vector.pair is not None:
                part = vector.target.partition
                squares = row_squares(vector.target, file.tensor(vector.pair.a), file.tensor(vector.pair.b).t())
                if self._sum_over_ranks is not None and part is not None and part.is_row_parallel:
                    squares = self._sum_over_ranks(squares)
                scale /= squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
            _view(memory, vector.to, scale.shape, torch.float32).copy_(scale)
        entries, kernels = plan.image(), destination.kernels
        image = None if kernels is None else kernels.image(plan.targets, entries)
        virtual, prefix = (
            None if vector is None else self._table(file, vector, memory) for vector in (plan.virtual, plan.prefix)
        )
        if prefix is not None:
            (num_layers, _, _, *shape), layers = prefix.shape, destination.layers
            if len(layers) != num_layers or any((heads, key) != tuple(shape) or key != value
                                                for heads, key, value in layers):  # fmt: skip
                raise ValueError(f"keys and values of {num_layers} layers and heads {shape} do not fit this model's")
        of_module = None if plan.virtual is None or virtual is None else (plan.virtual.target, virtual)
        heads = read_heads(file, self._heads, destination.memory, destination.dtype, kernels is not None)
        form, dtype = self._form, destination.dtype
        return AdapterContent(plan.targets, entries, memory, form, dtype, image, heads, of_module, prefix)

    @staticmethod
    def _table(file: ServedFile, vector: Vector, memory: torch.Tensor) -> torch.Tensor:
        return _view(memory, vector.to, vector.values.shape, torch.float32).copy_(file.tensor(vector.values))

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
