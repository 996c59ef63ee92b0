"""Medusa heads in a step: draft rows are appended to the hidden rows at the output head's input.

A head is a few residual blocks, `x + SiLU(W x + b)`; version 2 then uses the base's output head, version 1 a matrix of
each head (Cai et al. 2024). Draft rows go through the output head with the request's LoRA, as in training. A row's bits
do not depend on its neighbours. adapters/formats/heads.py is the specification.

They are read from a file in the served layout: packed for the CPU, or unchanged for a device. The loader has checked
the file against the base; here only what would break the products is checked again.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from lorikeet.shard.batch.inputs import HeadsRow, StepInputs
from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.model.kernels import cpu
from lorikeet.shard.model.kernels.packing import StreamedMatrix, can_pack, pack
from lorikeet.shard.model.lora.memory import ALIGNMENT, HostMemory
from lorikeet.shard.model.lora.partition import Partition
from lorikeet.shard.model.lora.served_file import HEADS, Place, ServedFile
from lorikeet.shard.model.lora.targets import LoraTarget

Product = Callable[[torch.Tensor], torch.Tensor]
"""`x Wᵀ + b` of rows x: [rows, in]; at least two rows, for equal bits with any number of rows."""


@dataclass(frozen=True)
class SlotHeads:
    """The heads of one adapter."""

    num_heads: int
    hidden_size: int
    blocks: Sequence[Sequence[Product]]
    """Per block one product for each head; the first block may be one product, [H] → [heads * H]."""
    outputs: Sequence[Product] = ()
    """Output heads of version 1: per head [H] → [V]."""
    tensors: Sequence[torch.Tensor] = ()
    """On a device: per block [heads, H, H] and [heads, H], then version 1's [heads, V, H]."""

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, H]. Returns [n, heads, H], the input of the output head."""
        n = rows.shape[0]
        x = rows[:, None].expand(n, self.num_heads, self.hidden_size)
        for products in self.blocks:
            if len(products) == 1:
                y = products[0](rows).view(n, self.num_heads, self.hidden_size)
            else:
                y = torch.stack([product(x[:, j].contiguous()) for j, product in enumerate(products)], dim=1)
            x = x + _silu(y)
        return x


@dataclass(frozen=True)
class _OwnRows:
    """Hidden rows whose logits a version 1 head computes."""

    # [n] rows of the output
    places: torch.Tensor
    # [n, H]
    hidden: torch.Tensor
    product: Product


class HeadKernels(Protocol):
    """Medusa heads on a device other than the CPU. `DeviceHeads` implements it, whose module imports this one."""

    def bind(self, slot: int, heads: SlotHeads) -> None: ...

    def clear(self, slot: int) -> None: ...

    def assumed_outputs(self) -> AbstractContextManager[None]: ...

    def draft(self, rows: torch.Tensor) -> torch.Tensor: ...

    def put_logits(self, x: torch.Tensor, logits: torch.Tensor) -> None: ...


class HeadsPool:
    """The heads of all slots, for the output head of one network."""

    def __init__(self, inputs: StepInputs) -> None:
        self.output: nn.Module | None = None
        """The output head, if the network has one."""
        self.vocab_size = self.hidden_size = 0
        """Vocabulary size and hidden size of the output head."""
        self.partition: Partition | None = None
        """Which rows of it this rank holds; None is all of them."""
        self.is_reached = False
        """Whether the network's logits come from its output head, so that heads can use it."""
        self.kernels: HeadKernels | None = None
        """Replace separate products on a device."""
        self._inputs = inputs
        self._slots: dict[int, SlotHeads] = {}
        self._own: list[_OwnRows] = []

    def attach(self, network: nn.Module, target: LoraTarget) -> None:
        """Add draft rows at the network's output head, which must be in place already. `target`: of that head."""
        output = getattr(network, "get_output_embeddings", lambda: None)()
        if isinstance(output, nn.Module):
            self.vocab_size, self.hidden_size, self.partition = target.num_out, target.num_in, target.partition
            self.output = output
            output.register_forward_pre_hook(self._before)
            output.register_forward_hook(self._after)

    def put(self, slot: int, heads: SlotHeads) -> None:
        """Put heads into `slot`."""
        self._slots[slot] = heads
        if self.kernels is not None:
            self.kernels.bind(slot, heads)

    def clear(self, slot: int) -> None:
        """Empty `slot`, if it has heads."""
        if self._slots.pop(slot, None) is not None and self.kernels is not None:
            self.kernels.clear(slot)

    def prepare(self) -> None:
        """Check a step whose heads a device computes. Raises RuntimeError for heads that are not in their slots."""
        if self.kernels is not None:
            _, slots, num_drafts = self._inputs.heads.T
            for slot in np.unique(slots).tolist():
                self._heads(slot, int(num_drafts[slots == slot].max()))

    def _before(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Append the draft rows to the output head's input, [1, rows, H]."""
        self.is_reached = True
        self._own.clear()  # rows of a step that failed
        drafting = self._inputs.heads
        if not self._inputs.num_draft_rows:
            return None
        num_rows = self._inputs.logits_rows.shape[0]
        rows = args[0].reshape(-1, args[0].shape[-1])[:num_rows]  # without the second row of a step of one
        if self.kernels is not None:
            return (self.kernels.draft(rows)[None], *args[1:])
        if self._inputs.bounds is not None:
            raise RuntimeError("Medusa heads in a padded step need kernels of a device")
        drafts = self._draft(rows, [HeadsRow(*each) for each in drafting.tolist()])
        return (torch.cat([rows, drafts])[None], *args[1:])

    def _draft(self, rows: torch.Tensor, drafting: Sequence[HeadsRow]) -> torch.Tensor:
        """rows: [S, H]. Returns [E, H] in the order of `drafting`."""
        # [E] index of each draft row among the hidden rows of all slots
        sources = [0] * sum(request.num_drafts for request in drafting)
        ends = list(accumulate(request.num_drafts for request in drafting))
        parts: list[torch.Tensor] = []
        first = 0
        by_slot = sorted(range(len(drafting)), key=lambda i: drafting[i].slot)
        for slot, group in groupby(by_slot, lambda i: drafting[i].slot):
            members = list(group)
            heads = self._heads(slot, max(drafting[i].num_drafts for i in members))
            hidden = _of_rows(heads, rows, [drafting[i].row for i in members])
            for index, member in enumerate(members):
                begin, count = ends[member] - drafting[member].num_drafts, drafting[member].num_drafts
                at = first + index * heads.num_heads
                sources[begin : begin + count] = range(at, at + count)
            self._keep_own(heads, hidden, [(ends[i] - drafting[i].num_drafts, drafting[i].num_drafts) for i in members])
            parts.append(hidden.flatten(0, 1))
            first += parts[-1].shape[0]
        drafts = torch.cat(parts) if len(parts) > 1 else parts[0]
        if sources == list(range(first)):
            return drafts
        return drafts.index_select(0, _indices(sources, rows.device))

    def _heads(self, slot: int, num_drafts: int) -> SlotHeads:
        heads = self._slots.get(slot)
        if heads is None or heads.num_heads < num_drafts:
            has = "no" if heads is None else heads.num_heads
            raise RuntimeError(f"slot {slot} has {has} heads, the step needs {num_drafts}")
        return heads

    def _keep_own(self, heads: SlotHeads, hidden: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Record the rows of version 1 heads. hidden: [n, heads, H]; spans: first place and number per row."""
        num_rows = self._inputs.logits_rows.shape[0]
        for head, product in enumerate(heads.outputs):
            members = [index for index, (_, count) in enumerate(spans) if head < count]
            if members:
                places = _indices([num_rows + spans[index][0] + head for index in members], hidden.device)
                rows = hidden[:, head].index_select(0, _indices(members, hidden.device))
                self._own.append(_OwnRows(places, rows, product))

    def _after(self, _: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Write the logits of version 1 heads into their rows, [1, rows, V]."""
        if self.kernels is not None:
            if self._inputs.num_draft_rows:
                self.kernels.put_logits(args[0][0], output.view(-1, output.shape[-1]))
            return
        kept, self._own = self._own, []
        for own in kept:
            output.view(-1, output.shape[-1]).index_copy_(0, own.places, _at_least_two(own.product, own.hidden))


def _of_rows(heads: SlotHeads, rows: torch.Tensor, row_ids: Sequence[int]) -> torch.Tensor:
    """rows: [S, H]. Returns [n, heads, H] of those in `row_ids`."""
    if list(row_ids) != list(range(rows.shape[0])):
        rows = rows.index_select(0, _indices(row_ids, rows.device))
    return _at_least_two(heads.hidden, rows)


def _at_least_two(function: Product, rows: torch.Tensor) -> torch.Tensor:
    """`function` of rows [n, H], a single row computed as two."""
    if rows.shape[0] > 1:
        return function(rows)
    return function(rows.expand(2, -1).contiguous())[:1]


def _indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=torch.long), device)


def _silu(y: torch.Tensor) -> torch.Tensor:
    """y: [n, heads, H] contiguous. On CPU row by row: torch splits larger tensors over vectors and threads, which
    changes the last bit.
    """
    if y.device.type != "cpu":
        return functional.silu(y)
    flat = y.view(y.shape[0], -1)
    if y.dtype == torch.bfloat16 and flat.shape[1] % 16 == 0 and cpu.available():
        return cpu.gate_times(flat, torch.ones_like(flat)).view(y.shape)
    return torch.stack([functional.silu(row) for row in flat]).view(y.shape)


MOST_HEADS = 32
MOST_BLOCKS = 8

Stacked = torch.Tensor | Sequence[torch.Tensor]
"""One tensor per head."""
Make = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""weight: [out, in], bias: [out]."""


@dataclass(frozen=True)
class HeadsShape:
    """Shared by all heads of one adapter."""

    num_heads: int
    num_blocks: int
    hidden_size: int
    vocab_size: int
    """Rows of each head's output matrix (version 1); 0 where the heads use the base's (version 2)."""

    def tensors(self) -> Iterator[tuple[int, ...]]:
        """Shapes of the tensors: per block weights and biases, then the output matrices."""
        for _ in range(self.num_blocks):
            yield (self.num_heads, self.hidden_size, self.hidden_size)
            yield (self.num_heads, self.hidden_size)
        if self.vocab_size:
            yield (self.num_heads, self.vocab_size, self.hidden_size)


@dataclass(frozen=True)
class HeadsContent:
    """The heads of one adapter in host memory."""

    shape: HeadsShape
    dtype: torch.dtype
    num_bytes: int
    # [bytes] uint8 all tensors, for a copy to a device; empty on CPU
    memory: torch.Tensor
    packed: SlotHeads | None = None
    """The heads, on CPU."""

    def on(self, memory: torch.Tensor) -> SlotHeads:
        """The heads in a copy of `memory`."""
        tensors = list(_views(memory, self.shape, self.dtype))
        return replace(bind(self.shape, tensors, _plain), tensors=tensors)


def read_heads(
    file: ServedFile, pool: HeadsPool | None, memory: HostMemory, dtype: torch.dtype, is_for_device: bool
) -> HeadsContent | None:
    """The heads in an adapter's file, None if it has none. Raises ValueError with a reason."""
    if "heads" not in file.metadata:
        return None
    places = {name: place for name, place in file.places().items() if name.startswith(HEADS)}
    if pool is None or not pool.is_reached:
        raise ValueError("Medusa heads need a base whose logits come from its output head (lm_head)")
    shape = _shape(file.metadata.get("heads", ""), pool)
    if shape.vocab_size and pool.partition is not None:
        places = _own_outputs(places, pool.partition)
    parts = [list(_taken(places, names, size)) for names, size in zip(_names(shape), shape.tensors(), strict=True)]
    if places:
        raise ValueError(f"this shard does not support tensor {min(places)} of the adapter")
    num_bytes = sum(_up(math.prod(size) * dtype.itemsize) for size in shape.tensors())
    if not is_for_device:
        tensors = [[file.tensor(place).to(dtype) for place in of_heads] for of_heads in parts]
        product = partial(_packed, memory) if can_pack(dtype) else _copied
        return HeadsContent(shape, dtype, num_bytes, torch.empty(0, dtype=torch.uint8), bind(shape, tensors, product))
    room = memory.take(num_bytes)
    for stacked, of_heads in zip(_views(room, shape, dtype), parts, strict=True):
        for tensor, place in zip(stacked, of_heads, strict=True):
            tensor.copy_(file.tensor(place))
    return HeadsContent(shape, dtype, num_bytes, room)


def bind(shape: HeadsShape, tensors: Sequence[Stacked], product: Make) -> SlotHeads:
    """The heads of these tensors, in the order of `HeadsShape.tensors`."""
    blocks: list[list[Product]] = []
    for block in range(shape.num_blocks):
        weights, biases = tensors[2 * block : 2 * block + 2]
        if block == 0:
            blocks.append([product(_flattened(weights), _flattened(biases))])
        else:
            blocks.append([product(weight, bias) for weight, bias in zip(weights, biases, strict=True)])
    outputs = [product(weight, None) for weight in tensors[-1]] if shape.vocab_size else []
    return SlotHeads(shape.num_heads, shape.hidden_size, blocks, outputs)


def _flattened(tensors: Stacked) -> torch.Tensor:
    """[heads, n, ...]. Returns [heads * n, ...]."""
    return tensors.flatten(0, 1) if isinstance(tensors, torch.Tensor) else torch.cat(list(tensors))


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return partial(functional.linear, weight=weight, bias=bias)


def _copied(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return _plain(weight.clone(), None if bias is None else bias.clone())


def _packed(memory: HostMemory, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """In our layout the packed weight lies in the memory for adapters."""
    matrix = pack(weight, bias)
    if isinstance(matrix, StreamedMatrix):
        room = memory.take(2 * matrix.packed.numel())
        matrix.packed = room.view(torch.bfloat16).copy_(matrix.packed)
    return matrix


def _shape(text: str, pool: HeadsPool) -> HeadsShape:
    try:
        facts = json.loads(text)
        num_heads, version, num_blocks = (int(facts[name]) for name in ("count", "version", "layers"))
    except (KeyError, TypeError, ValueError) as failure:
        raise ValueError(f"the adapter's file does not describe its heads: {failure}") from None
    if not 0 < num_heads <= MOST_HEADS or not 0 <= num_blocks <= MOST_BLOCKS or version not in (1, 2):
        raise ValueError(f"{num_heads} heads of version {version} and {num_blocks} blocks are not supported")
    return HeadsShape(num_heads, num_blocks, pool.hidden_size, pool.vocab_size if version == 1 else 0)


def _names(shape: HeadsShape) -> Iterator[list[str]]:
    """For each of `HeadsShape.tensors`, the tensors of the file that it is stacked from."""
    heads = range(shape.num_heads)
    for block in range(shape.num_blocks):
        middle = f".{block}" if shape.num_blocks > 1 else ""
        for part in ("weight", "bias"):
            yield [f"heads.{head}{middle}.{part}" for head in heads]
    if shape.vocab_size:
        yield [f"heads.{head}.output" for head in heads]


def _own_outputs(places: dict[str, Place], partition: Partition) -> dict[str, Place]:
    """`places` with this rank's rows of the output matrices."""
    own = dict(places)
    for name, place in places.items():
        if name.endswith(".output"):
            if place.shape[0] != partition.num_out:
                raise ValueError(f"{name} of the adapter is {list(place.shape)}, not of {partition.num_out} rows")
            own[name] = place.rows(partition.rows)
    return own


def _taken(places: dict[str, Place], names: Sequence[str], size: tuple[int, ...]) -> Iterator[Place]:
    """Take `names` out of the places. Raises ValueError unless each has the shape of one head."""
    for name in names:
        place = places.pop(name, None)
        if place is None or place.shape != size[1:]:
            has = "nothing" if place is None else list(place.shape)
            raise ValueError(f"{name} of the adapter is {has}, the base needs {list(size[1:])}")
        yield place


def _views(memory: torch.Tensor, shape: HeadsShape, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """memory: [bytes] uint8. Yields a view for each of `shape.tensors`."""
    offset = 0
    for size in shape.tensors():
        num_bytes = math.prod(size) * dtype.itemsize
        yield memory[offset : offset + num_bytes].view(dtype).view(size)
        offset += _up(num_bytes)


def _up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
