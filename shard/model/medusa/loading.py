"""Reads Medusa heads from a file in the served layout: packed for the CPU, or unchanged for a device.

The loader has checked the file against the base; here only what would break the products is checked again.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional

from lorikeet.shard.model.kernels.packing import StreamedMatrix, can_pack, pack
from lorikeet.shard.model.lora.memory import ALIGNMENT, HostMemory
from lorikeet.shard.model.lora.partition import Partition
from lorikeet.shard.model.lora.served_file import HEADS, Place, ServedFile
from lorikeet.shard.model.medusa.heads import HeadsPool, Product, SlotHeads

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
