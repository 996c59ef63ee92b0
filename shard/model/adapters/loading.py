"""From a file in the served layout to what slots hold: low-rank factors by module, ready for the kernels.

Whoever wrote the file has checked it against the base; here only what would break the kernels is checked again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.adapters.plan import NOWHERE, Form, Plan, plan_for, shapes
from lorikeet.shard.model.lora.memory import HostMemory
from lorikeet.shard.model.lora.served_file import ServedFile
from lorikeet.shard.model.lora.targets import Kernels, LoraTarget, SlotImage, SlotWeights, compiled, library_for
from lorikeet.shard.model.medusa.heads import HeadsPool
from lorikeet.shard.model.medusa.loading import HeadsContent, read_heads
from lorikeet.shard.system.native import CompilerMissing

MOST_PLANS = 64
NICENESS = 9
"""How far behind the steps factors are laid out, on Linux; as the loader of adapters."""


RowParallelSum = Callable[[torch.Tensor], torch.Tensor]
"""[n] in host memory, of each rank: their sum."""


@dataclass(frozen=True)
class AdapterContent:
    """One adapter in host memory."""

    targets: Sequence[LoraTarget]
    # [sites, 5] its rank, as the kernels count it, and where in memory a, b, scale and bias begin, -1 for none
    entries: npt.NDArray[np.int64]
    # [bytes] uint8
    memory: torch.Tensor
    form: Form
    dtype: torch.dtype
    image: SlotImage | None = None
    """What a device's slot would say of it."""
    heads: HeadsContent | None = None

    @property
    def num_bytes(self) -> int:
        return self.memory.numel() + (0 if self.heads is None else self.heads.num_bytes)

    @property
    def num_heads(self) -> int:
        return 0 if self.heads is None else self.heads.shape.num_heads

    def addresses(self) -> npt.NDArray[np.int64]:
        """[sites, 5] the entries with addresses in this process, 0 for none."""
        found = np.where(self.entries == NOWHERE, 0, self.entries + self.memory.data_ptr())
        found[:, 0] = self.entries[:, 0]
        return found

    def weights(self, index: int) -> SlotWeights:
        """Views of what it adds to one of its sites."""
        site, (rank, a, b, scale, bias) = self.targets[index], self.entries[index].tolist()
        shape_a, shape_b = shapes(self.form, site, rank, self.dtype)
        vector = (site.num_out,)
        factor = None if a == NOWHERE else self._view(a, shape_a, self.dtype)
        return SlotWeights(
            factor.t() if factor is not None and site.is_embedding and self.form is Form.ROWS else factor,
            None if b == NOWHERE else self._view(b, shape_b, self.dtype),
            None if scale == NOWHERE else self._view(scale, vector, torch.float32),
            None if bias == NOWHERE else self._view(bias, vector, torch.float32),
            self.form is Form.BLOCKS and a != NOWHERE,
        )

    def _view(self, first: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return _view(self.memory, first, shape, dtype)


@dataclass(frozen=True)
class Destination:
    """How an adapter is to lie in host memory."""

    dtype: torch.dtype
    memory: HostMemory
    kernels: Kernels | None = None
    """Of the device that it is for; None for the CPU."""

    @property
    def form(self) -> Form:
        """What the kernels read."""
        return Form.BLOCKS if self.kernels is None and compiled(self.dtype) is not None else Form.ROWS


@dataclass(frozen=True)
class Opened:
    """An adapter's file that fits the base."""

    file: ServedFile
    plan: Plan


class AdapterFiles:
    """Reads adapters for the sites of one model. One thread."""

    def __init__(
        self,
        targets: Mapping[str, Target],
        destination: Destination,
        heads: HeadsPool | None = None,
        add_up: RowParallelSum | None = None,
    ) -> None:
        """`heads`: where those of adapters are to compute, None where they are refused. `add_up`: over all ranks, what
        each finds in its columns of a weight.
        """
        self._targets = targets
        self._heads = heads
        self._add_up = add_up
        self._destination = destination
        self._form = destination.form
        self._plans: dict[str, Plan] = {}

    def read(self, path: Path) -> AdapterContent:
        """An adapter from its file. Raises ValueError with a reason, and FileNotFoundError."""
        return self.lay_out(self.open(path))

    def open(self, path: Path) -> Opened:
        """A file and what is to be done with it. Raises ValueError with a reason, and FileNotFoundError."""
        if not path.exists():
            raise FileNotFoundError(path)
        file = ServedFile(path)
        return Opened(file, self._plan(file))

    def lay_out(self, opened: Opened) -> AdapterContent:
        """Do it. Raises ValueError with a reason."""
        file, plan, destination = opened.file, opened.plan, self._destination
        memory = destination.memory.take(plan.num_bytes)
        _lay_out(plan, file, memory)
        for vector in plan.biases:
            _view(memory, vector.to, vector.values.shape, torch.float32).copy_(file.tensor(vector.values))
        for vector in plan.magnitudes:
            scale = file.tensor(vector.values).clone()
            if vector.pair is not None:
                squares = row_squares(vector.site, file.tensor(vector.pair.a), file.tensor(vector.pair.b).t())
                if self._add_up is not None and vector.site.cut is not None and vector.site.cut.is_row_parallel:
                    squares = self._add_up(squares)
                scale /= squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
            _view(memory, vector.to, scale.shape, torch.float32).copy_(scale)
        entries, kernels = plan.image(), destination.kernels
        image = None if kernels is None else kernels.image(plan.targets, entries)
        heads = read_heads(file, self._heads, destination.memory, destination.dtype, kernels is not None)
        return AdapterContent(plan.targets, entries, memory, self._form, destination.dtype, image, heads)

    def _plan(self, file: ServedFile) -> Plan:
        plan = self._plans.get(file.likeness)
        if plan is None or file.num_bytes < plan.file_bytes:
            plan = plan_for(file, self._targets, self._form, self._destination.dtype)
            if len(self._plans) == MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[file.likeness] = plan
        return plan


def _lay_out(plan: Plan, file: ServedFile, memory: torch.Tensor) -> None:
    """Write the factors into memory, [bytes] uint8, as the kernels read them."""
    if not plan.pairs:
        return
    try:
        code = library_for(torch.float32 if plan.pairs[0].a.dtype.itemsize == 4 else torch.bfloat16)
    except CompilerMissing:
        for pair in plan.pairs:
            a, b = file.tensor(pair.a), file.tensor(pair.b).t()
            arranged = SlotWeights(a, b).arranged(pair.site.is_embedding)
            for to, tensor in ((pair.to_a, arranged.a), (pair.to_b, arranged.b)):
                assert tensor is not None and plan.form is Form.ROWS
                _view(memory, to, tensor.shape, tensor.dtype).copy_(tensor)
        return
    table = plan.table()
    table[:, :2] += file.address
    joined = {index: file.tensor(pair.b) for index, pair in enumerate(plan.pairs) if pair.b.parts}
    for index, tensor in joined.items():
        table[index, 1] = tensor.data_ptr()
    table[:, 2:4] += memory.data_ptr()
    code.pack(table.ctypes.data, len(table), plan.form, NICENESS)  # gives up the interpreter meanwhile


def _view(memory: torch.Tensor, first: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """memory: [bytes] uint8."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return memory[first : first + num_bytes].view(dtype).view(tuple(shape))


def row_squares(site: LoraTarget, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Squared lengths of the rows of `W + B A`, from those of W and its product with A (DoRA, Liu et al. 2024): [out]
    float32.

    a: [rank, in], b: [rank, out], in host memory, as what is returned; computed where W is.
    """
    if site.project is None:
        raise ValueError(f"{site.name} has no rows whose length DoRA could divide by")
    rank, device = a.shape[0], site.squared_norms.device
    a, b = a.to(device), b.to(device)
    # [rank, out] W times each row of A; two rows at least, as everywhere
    products = site.project(a if rank > 1 else a.expand(2, -1).contiguous())[:rank].float()
    wide = b.float()
    # [rank, rank]
    gram = a.float() @ a.float().t()
    squares = site.squared_norms + 2 * (products * wide).sum(0) + (wide * (gram @ wide)).sum(0)
    return squares.cpu()
