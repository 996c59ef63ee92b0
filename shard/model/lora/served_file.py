"""A file in the served layout, mapped: what it says of itself, and its tensors where they lie."""

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
"""Begins the names of tensors that are of Medusa heads and of no module."""
_PREFIX = 8  # a safetensors file begins with the length of its header, little endian, in so many bytes
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Place:
    """Of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """In bytes from the first tensor."""
    stride: int = 0
    """Elements from row to row of a matrix, where these are not neighbours in the file; else 0."""

    parts: tuple["Place", ...] = ()
    """What it is put together from, one below the other; empty where it lies in one piece."""

    def rows(self, wanted: Sequence[slice]) -> "Place":
        """Some rows of it, stretch by stretch."""
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


class ServedFile:
    """Costs next to nothing until its tensors are read. They lie in its memory, and must not outlive it."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError with a reason."""
        try:
            with path.open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch takes no read-only memory
            self._begin = _PREFIX + int.from_bytes(self._mapped[:_PREFIX], "little")
            self._header: dict[str, Any] = json.loads(self._mapped[_PREFIX : self._begin])
            self.metadata: dict[str, str] = self._header.pop("__metadata__", {})
            if self.metadata.get("format") != FORMAT:
                raise ValueError(f"it is not in the served layout {FORMAT}")
            self.likeness = f"{self.metadata.get('modules')} {self.metadata.get('heads')} {self._header}"
            """Equal for files whose tensors have the same names, types, shapes and places."""
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
            raise ValueError(f"the adapter's file cannot be read: {type(failure).__name__}: {failure}") from failure

    @property
    def address(self) -> int:
        """Of the first tensor."""
        return int(np.frombuffer(self._mapped, np.uint8).ctypes.data) + self._begin

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return len(self._mapped) - self._begin

    def places(self) -> dict[str, Place]:
        """Of every tensor, by name. Raises ValueError where one does not lie in the file."""
        try:
            return {name: self._place(entry) for name, entry in self._header.items()}
        except (KeyError, TypeError, ValueError) as failure:
            raise ValueError(f"the adapter's file cannot be read: {type(failure).__name__}: {failure}") from failure

    def tensor(self, place: Place) -> torch.Tensor:
        """A view of the file's memory, a copy where it is in parts; what is written to it does not reach the file."""
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
