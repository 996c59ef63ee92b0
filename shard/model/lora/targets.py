"""Low-rank adapters on the modules of the base: one target per module, a slot per adapter, many adapters in one step.

`y = scale ⊙ (W x + B A x) + base_bias + bias`, row by row; scale is 1 without DoRA (Hu et al. 2021, Liu et al. 2024).
`adapt_row` is the reference. A row's bits do not depend on its neighbours. `shard/scheduler/adapter_slots.py` assigns
slots.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.proto.params import MAX_MERGED, Composition
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.row_groups import AdapterRows
from lorikeet.shard.model.kernels.pairs import PairTasks, SortedPairs
from lorikeet.shard.model.lora.partition import Partition
from lorikeet.shard.system.memory import mapped_zeros
from lorikeet.shard.system.native import CompilerMissing, library

MOST_RANK = {"cpu": 4096, "cuda": 512}
"""Largest rank of a module's factors, by type of device. On CPU a new weight of 4096 inputs is one."""
RANK_BLOCK = 8
OUT_BLOCK = 64
"""In the layout of targets.c."""

_SOURCE = Path(__file__).with_name("targets.c")
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _Weights(ctypes.Structure):
    """`Weights` of targets.c."""

    _fields_ = [("rank", _SIZE), *((name, _POINTER) for name in ("a", "b", "scale", "bias", "sum"))]


class _Composition(ctypes.Structure):
    """`Composition` of targets.c."""

    _fields_ = [
        *(("count", ctypes.c_int32), ("shares_factors", ctypes.c_int32), ("slots", ctypes.c_int32 * MAX_MERGED)),
        *(("shrink", ctypes.c_float * MAX_MERGED), ("expand", ctypes.c_float * MAX_MERGED)),
    ]


class _Part(ctypes.Structure):
    """`Part` of targets.c."""

    _fields_ = [
        ("slots", _POINTER),
        *(("x", _POINTER), ("x_stride", _SIZE), ("num_in", _SIZE)),
        *(("y", _POINTER), ("y_stride", _SIZE), ("num_out", _SIZE)),
        ("base_bias", _POINTER),
    ]


@dataclass(frozen=True)
class SlotWeights:
    """The weights of one adapter for one module."""

    # [rank, in] and [rank, out]: b is B transposed, times the scaling; None where only the bias differs
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    # [out] float32: DoRA's magnitude divided by the norm of the adapted weight's row
    scale: torch.Tensor | None = None
    # [out] float32, added to the base's bias
    bias: torch.Tensor | None = None
    is_packed: bool = False
    """Whether a and b have the layout of targets.c."""

    def arranged(self, is_embedding: bool) -> "SlotWeights":
        """In the layout of device kernels, which read rows: A of embeddings is [in, rank]."""
        if self.a is None or self.b is None:
            return self
        return replace(self, a=(self.a.t() if is_embedding else self.a).contiguous(), b=self.b.contiguous())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are not None, by name."""
        named = {"a": self.a, "b": self.b, "scale": self.scale, "bias": self.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def rank(self) -> int:
        """Padded if packed."""
        if self.b is None:
            return 0
        return self.b.shape[1] if self.is_packed else self.b.shape[0]


class ComposedSlots:
    """Sums of adapters in slots: each has a slot of its own, behind those of adapters."""

    def __init__(self, num_slots: int, num_sums: int) -> None:
        self.num_slots, self.num_sums = num_slots, num_sums
        self.table = (_Composition * num_sums)()
        self._sums: dict[int, tuple[Composition, tuple[int, ...]]] = {}

    def put(self, slot: int, composition: Composition, slots: Sequence[int]) -> None:
        """Make `slot` the sum of the adapters in `slots`, which have factors alone."""
        self._sums[slot] = composition, tuple(slots)
        entry = self.table[slot - self.num_slots]
        entry.count, entry.shares_factors = len(slots), composition.shares_factors
        entry.slots[: len(slots)] = slots
        entry.shrink[: len(slots)], entry.expand[: len(slots)] = composition.shrink_weights, composition.expand_weights

    def clear(self, slot: int) -> None:
        """Empty `slot`."""
        del self._sums[slot]
        self.table[slot - self.num_slots].count = 0

    def weights(self, slot: int, of: Sequence[SlotWeights | None]) -> SlotWeights | None:
        """The specification of a sum: the factors of the adapter that equals it. of: the weights of every slot."""
        if slot not in self._sums:
            return None
        composition, slots = self._sums[slot]
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for other, shrink, expand in zip(slots, composition.shrink_weights, composition.expand_weights, strict=True):
            weights = of[other]
            if weights is not None and weights.a is not None and weights.b is not None:
                pairs.append((shrink * weights.a.float(), expand * weights.b.float()))
        if not pairs:
            return None
        every_a, every_b = zip(*pairs, strict=True)
        if composition.shares_factors:
            return SlotWeights(torch.stack(every_a).sum(0), torch.stack(every_b).sum(0))
        return SlotWeights(torch.cat(every_a), torch.cat(every_b))


NO_SUMS = ComposedSlots(0, 0)


@dataclass(frozen=True)
class SlotImage:
    """An adapter's rows of a device's table, before the adapter has an address there."""

    # [targets, 5] rank, and offsets in the adapter's memory of a, b, scale and bias, -1 for none
    entries: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shrunk:
    """`A x` of some modules with one input, computed or being computed."""

    # [rows, parts, room] float32, see lora/triton.py
    h: torch.Tensor
    # [parts, 4] int64, the modules and their columns
    parts: torch.Tensor
    splits: int
    stream: torch.cuda.Stream | None
    """The stream that computes it, None for the current one."""


class Kernels(Protocol):
    """Adapters on a device other than the CPU. `DeviceKernels` implements it, whose module imports this one."""

    def image(self, targets: Sequence["LoraTarget"], entries: npt.NDArray[np.int64]) -> SlotImage: ...

    def begin(self, rows: AdapterRows, targets: Sequence["LoraTarget"], x: torch.Tensor) -> Shrunk | None: ...

    def adapt(self, rows: AdapterRows, products: Sequence["Product"], shrunk: Shrunk | None = None) -> None: ...

    def adapt_embedding(self, rows: AdapterRows, target: "LoraTarget", ids: torch.Tensor, y: torch.Tensor) -> None: ...

    def change(self, rows: AdapterRows, target: "LoraTarget") -> bool: ...

    def norm_changes(
        self, rows: AdapterRows, target: "LoraTarget", num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]: ...

    def pair_slots(self, rows: AdapterRows, num_rows: int) -> tuple[torch.Tensor, int]: ...

    def pair_tasks(self, pairs: SortedPairs) -> PairTasks: ...

    def adapt_pairs(self, tasks: PairTasks, targets: "ExpertTargets", x: torch.Tensor, y: torch.Tensor) -> None: ...


class LoraTarget:
    """One module of the base that adapters can change."""

    def __init__(self, name: str, num_in: int, num_out: int, inputs: StepInputs, is_head: bool = False) -> None:
        self.name = name
        self.num_in, self.num_out = num_in, num_out
        self.is_embedding = False
        self.is_norm = False
        """Whether the module is a norm, of which adapters change scale and bias."""
        self.is_adapted_inside = False
        """Of a norm, whether its own kernel does so, in captured steps too."""
        # [out] float32, the module's bias, or None
        self.base_bias: torch.Tensor | None = None
        # [out] float32: squared norm of each row of W; empty for embeddings
        self.squared_norms = torch.empty(0)
        self.project: Callable[[torch.Tensor], torch.Tensor] | None = None
        """`x Wᵀ` of rows x: [rows, in]."""
        self.partition: Partition | None = None
        """This rank's part of the module; None for all of it."""
        self.slots: list[SlotWeights | None] = []
        self.table = (_Weights * 0)()
        self._sums = NO_SUMS
        # by slot, [tokens, out] float32: of an embedding, the rows of virtual tokens
        self.virtual: dict[int, torch.Tensor] = {}
        self.kernels: Kernels | None = None
        """A device's kernels, used in place of `adapt_row` and its compiled form; None on a CPU."""
        self._inputs, self.is_head = inputs, is_head

    @property
    def rows(self) -> AdapterRows:
        """The rows of the current step at this module that belong to an adapter."""
        return self._inputs.head_adapter_rows if self.is_head else self._inputs.adapter_rows

    def allocate(self, num_slots: int, sums: ComposedSlots = NO_SUMS) -> None:
        """Allocate slots for adapters, and for sums of them."""
        self.slots = [None] * (num_slots + sums.num_sums)
        kind = _Weights * (num_slots + sums.num_sums)
        # a thousand slots of each module: most are never used
        self.table = kind.from_buffer(mapped_zeros(ctypes.sizeof(kind)))
        self._sums = sums
        for index in range(sums.num_sums):
            self.table[num_slots + index].sum = ctypes.addressof(sums.table) + index * ctypes.sizeof(_Composition)

    def put(self, slot: int, weights: SlotWeights | None) -> None:
        """Put weights into `slot`, or empty it. They have the base's dtype and are packed where they can be."""
        self.slots[slot] = weights
        tensors = (None if weights is None else getattr(weights, name) for name in ("a", "b", "scale", "bias"))
        rank = 0 if weights is None else weights.rank
        self.bind(slot, (rank, *(0 if tensor is None else tensor.data_ptr() for tensor in tensors)))

    def bind(self, slot: int, entry: Sequence[int]) -> None:
        """Set the entry of `slot` for compiled code: rank and addresses of a, b, scale and bias, 0 for none."""
        self.table[slot] = _Weights(*entry)
        if self.is_norm:
            self.note_norm(slot, any(entry))

    def note_norm(self, slot: int, changes: bool) -> None:
        """Let steps know whether the adapter in `slot` changes norms after they are computed."""
        (self._inputs.norm_slots.add if changes else self._inputs.norm_slots.discard)(slot)

    def adapt_norm(self, y: torch.Tensor) -> torch.Tensor:
        """Change a norm's output as the step's adapters do. y: [..., H], in place, of all tokens.

        Raises RuntimeError for fewer rows.
        """
        if self._inputs.changes_norms:
            if y.shape[:-1].numel() < len(self._inputs.input_ids):
                raise RuntimeError(f"{self.name}: adapters need the rows of all tokens")
            adapt_output(self, y, y)
        return y

    def replace_virtual(self, y: torch.Tensor) -> None:
        """Put the embeddings of virtual tokens that are of this module into their rows. y: [rows, H], in place."""
        for slot, rows, places in self._inputs.virtual_rows:
            if (table := self.virtual.get(slot)) is not None:
                y[rows] = table[places].to(y.dtype)

    def weights(self, slot: int) -> SlotWeights | None:
        """What is in `slot`, for the specification."""
        return self.slots[slot] or self._sums.weights(slot, self.slots)

    def changes(self, slot: int) -> bool:
        """Whether the adapter in `slot` changes this module; False for sums of adapters."""
        entry = self.table[slot]
        return bool(entry.rank or entry.scale or entry.bias)


def begin(targets: Sequence[LoraTarget], x: torch.Tensor) -> Shrunk | None:
    """Start `A x` of the step's adapters, on a device that computes it next to the base's product. x: [..., in], the
    input of targets whose outputs are neighbouring columns. Returns what `adapt` takes after the product.
    """
    if not targets or targets[0].kernels is None or not len(rows := targets[0].rows):
        return None
    return targets[0].kernels.begin(rows, targets, x.reshape(-1, targets[0].num_in))


def adapt_output(target: LoraTarget, x: torch.Tensor, y: torch.Tensor, shrunk: Shrunk | None = None) -> None:
    """x: [..., in], y: [..., out] contiguous, changed in place. shrunk: as in `adapt`."""
    if len(rows := target.rows):
        adapt(rows, Product(target, x.reshape(-1, target.num_in), y.view(-1, target.num_out)), shrunk=shrunk)


class ExpertTargets:
    """One parameter of a block of experts: a target per expert."""

    def __init__(self, name: str, num_experts: int, num_in: int, num_out: int, inputs: StepInputs) -> None:
        self.name = name
        self.num_in, self.num_out = num_in, num_out
        self._inputs = inputs
        self.experts = [LoraTarget(f"{name}.{index}", num_in, num_out, inputs) for index in range(num_experts)]

    def allocate(self, num_slots: int, sums: ComposedSlots = NO_SUMS) -> None:
        """Allocate slots for adapters, and for sums of them, which change no experts."""
        for target in self.experts:
            target.allocate(num_slots, sums)

    @property
    def kernels(self) -> Kernels | None:
        """A device's kernels, used in place of `adapt_row` and its compiled form; None on a CPU."""
        return self.experts[0].kernels

    @property
    def rows(self) -> AdapterRows:
        """The rows of the current step that belong to an adapter."""
        return self.experts[0].rows

    @property
    def is_modified(self) -> bool:
        """Whether an adapter of the current step changes this parameter; of a padded step, whether one could."""
        if not len(self.rows):
            return False
        if self.kernels is None:
            return any(self.experts[0].changes(slot) for slot, _, _ in self.rows.tasks.tolist())
        return self._inputs.bounds is not None or self.kernels.change(self.rows, self.experts[0])

    def slots_of(self, num_rows: int) -> npt.NDArray[np.int32]:
        """[rows] the slot of each row of the step, -1 for none."""
        slots = np.full(num_rows, -1, np.int32)
        for slot, first, count in self.rows.tasks.tolist():
            slots[first : first + count] = slot
        return slots


@dataclass(frozen=True)
class Product:
    """A module's input and output in one step. `y` is changed in place."""

    target: LoraTarget
    # [rows, in], [rows, out], contiguous along the last axis
    x: torch.Tensor
    y: torch.Tensor

    def part(self) -> _Part:
        target, x, y = self.target, self.x, self.y
        bias = None if target.base_bias is None else target.base_bias.data_ptr()
        table = ctypes.addressof(target.table)
        return _Part(table, x.data_ptr(), x.stride(0), target.num_in, y.data_ptr(), y.stride(0), target.num_out, bias)


def adapt(rows: AdapterRows, *products: Product, shrunk: Shrunk | None = None) -> None:
    """Add the rows' adapters to every product. shrunk: what `begin` returned for their targets and input."""
    if not len(rows):
        return
    kernels = products[0].target.kernels
    if kernels is not None:
        kernels.adapt(rows, products, shrunk)
        return
    dtype = products[0].y.dtype
    if products[0].y.device.type == "cpu" and compiled(dtype) is not None:
        parts = (_Part * len(products))(*(product.part() for product in products))
        library_for(dtype).adapt(parts, len(products), rows.address, len(rows), torch.get_num_threads())
        return
    for product in products:
        for slot, first, count in rows.tasks.tolist():
            weights = product.target.weights(slot)
            if weights is not None:
                for row in range(first, first + count):
                    adapt_row(weights, product.target.base_bias, product.x[row], product.y[row])


def adapt_row(weights: SlotWeights, base_bias: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor) -> None:
    """One row, as compiled code and kernels compute it too. x: [in]; y: [out] = W x + base_bias, changed in place.

    `y = scale * (W x + B A x) + base_bias + bias`: the scale of DoRA does not apply to the base's bias.
    """
    value = y.float()
    delta = value.new_zeros(())
    if weights.a is not None and weights.b is not None:
        delta = (weights.a.float() @ x.float()) @ weights.b.float()
    if weights.scale is None:
        value = value + delta
    else:
        base = value.new_zeros(()) if base_bias is None else base_bias
        value = weights.scale * (value - base + delta) + base
    y.copy_(value if weights.bias is None else value + weights.bias)


def adapt_embedding(rows: AdapterRows, target: LoraTarget, ids: torch.Tensor, y: torch.Tensor) -> None:
    """ids: [rows] token ids; y: [rows, H], in place. The id selects a column of A."""
    if not len(rows):
        return
    if target.kernels is not None:
        target.kernels.adapt_embedding(rows, target, ids, y)
        return
    if y.device.type == "cpu" and compiled(y.dtype) is not None:
        part = Product(target, y, y).part()
        library_for(y.dtype).adapt_embedding(ctypes.byref(part), ids.data_ptr(), rows.address, len(rows))
        return
    for slot, first, count in rows.tasks.tolist():
        weights = target.weights(slot)
        if weights is not None and weights.a is not None and weights.b is not None:
            for row in range(first, first + count):
                y[row] += (weights.a[:, ids[row]].float() @ weights.b.float()).to(y.dtype)


@cache
def compiled(dtype: torch.dtype) -> int | None:
    """Address of targets.c's `adapt` for this element type, or None where there is no compiler."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        return ctypes.cast(library_for(dtype).adapt, ctypes.c_void_p).value
    except CompilerMissing:
        return None


@cache
def library_for(dtype: torch.dtype) -> ctypes.CDLL:
    """targets.c for this element type. Raises CompilerMissing."""
    loaded = library(_SOURCE, f"BF16={int(dtype == torch.bfloat16)}")
    loaded.adapt.argtypes = [_POINTER, _INT, _POINTER, _INT, _INT]
    loaded.adapt_embedding.argtypes = [_POINTER, _POINTER, _POINTER, _INT]
    loaded.pack.argtypes = [_POINTER, _INT, _INT, _INT, _INT]
    loaded.adapt.restype = loaded.adapt_embedding.restype = loaded.pack.restype = None
    return loaded
