"""A memory-mapped file in the served layout: its metadata and its tensors."""

import json
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

FORMAT = "lorikeet-adapter-1"
HEADS = "heads."
"""Prefix of the names of Medusa heads' tensors."""
_PREFIX = 8  # bytes of the header's length at the start of a safetensors file, little endian
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset in bytes from the first tensor."""
    stride: int = 0
    """Elements between rows of a matrix whose rows are not contiguous; else 0."""

    parts: tuple["Place", ...] = ()
    """The parts that it is concatenated from; empty where it is contiguous."""

    def rows(self, wanted: Sequence[slice]) -> "Place":
        """Some rows of it, range by range."""
        num_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        parts = [
            Place(self.dtype, (rows.stop - rows.start, *self.shape[1:]), self.start + rows.start * num_bytes)
            for rows in wanted
        ]
        if len(parts) == 1:
            return parts[0]
        shape = (sum(part.shape[0] for part in parts), *self.shape[1:])
        return Place(self.dtype, shape, parts[0].start, parts=tuple(parts))

    def columns(self, wanted: slice) -> "Place":
        """Some columns of a matrix."""
        shape = (self.shape[0], wanted.stop - wanted.start)
        return Place(self.dtype, shape, self.start + wanted.start * self.dtype.itemsize, self.shape[1])


def map_file(path: Path) -> mmap.mmap:
    """A file's content, whose changes do not reach the file. Raises FileNotFoundError, and ValueError with a reason."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch needs writable memory
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as failure:
        raise ValueError(f"the adapter's file cannot be read: {type(failure).__name__}: {failure}") from failure


def header_end(content: mmap.mmap) -> int:
    """Offset of the first tensor in a file, as its header says."""
    return _PREFIX + int.from_bytes(content[:_PREFIX], "little")


class ServedFile:
    """Cheap until its tensors are read. They are views of its memory and must not outlive it."""

    def __init__(self, content: mmap.mmap) -> None:
        """content: the file, by `map_file`. Raises ValueError with a reason."""
        self._mapped, self._begin = content, header_end(content)
        try:
            self._header: dict[str, Any] = json.loads(content[_PREFIX : self._begin])
            self.metadata: dict[str, str] = self._header.pop("__metadata__", {})
            if self.metadata.get("format") != FORMAT:
                raise ValueError(f"it is not in the served layout {FORMAT}")
            self.likeness = f"{self.metadata.get('modules')} {self.metadata.get('heads')} {self._header}"
            """Equal for files whose tensors have the same names, types, shapes and offsets."""
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise ValueError(f"the adapter's file cannot be read: {type(failure).__name__}: {failure}") from failure

    @property
    def address(self) -> int:
        """Address of the first tensor in memory."""
        return int(np.frombuffer(self._mapped, np.uint8).ctypes.data) + self._begin

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return len(self._mapped) - self._begin

    def places(self) -> dict[str, Place]:
        """Places of every tensor, by name. Raises ValueError where one lies outside the file."""
        try:
            return {name: self._place(entry) for name, entry in self._header.items()}
        except (KeyError, TypeError, ValueError) as failure:
            raise ValueError(f"the adapter's file cannot be read: {type(failure).__name__}: {failure}") from failure

    def tensor(self, place: Place) -> torch.Tensor:
        """A view of the file's memory, or a copy of several parts; writes to it do not reach the file."""
        if place.parts:
            return torch.cat([self.tensor(part) for part in place.parts])
        count, start = math.prod(place.shape), self._begin + place.start
        if place.stride:
            count = (place.shape[0] - 1) * place.stride + place.shape[1]
        found = torch.frombuffer(self._mapped, dtype=place.dtype, count=count, offset=start)
        return found.as_strided(place.shape, (place.stride, 1)) if place.stride else found.view(place.shape)

    def _place(self, entry: dict[str, Any]) -> Place:
        dtype, shape, (start, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if not 0 <= start < end <= self.num_bytes or math.prod(shape) * dtype.itemsize != end - start:
            raise ValueError(f"a tensor of shape {list(shape)} cannot lie from {start} to {end}")
        return Place(dtype, shape, start)
