"""Copies between host and device that do not make the host wait for a step that is still running. The arrays of a
padded step are one copy.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNED = 16
"""Bytes: tensors in one memory begin at multiples of it. Kernels are compiled for that; elements are divisors."""


def sendable(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor in pinned memory, from which a copy is asynchronous; from other memory the host waits."""
    return host.pin_memory() if device.type == "cuda" else host


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start to copy a host tensor to the device, in order with the next launches."""
    return sendable(host, device).to(device, non_blocking=True)


class HostCopy:
    """An asynchronous copy of tensors to the host, started here. It waits for no step launched later; such a step may
    overwrite the tensors.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not any(tensor.is_cuda for tensor in tensors):
            self._tensors = [tensor.clone() for tensor in tensors]
        else:
            packed = pack(tensors)
            self._tensors = list(unpack(packed.to("cpu", non_blocking=True), tensors))
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(packed.device))

    def wait(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[bytes] uint8: all of them in order, each from a multiple of 16 on. One alone is not copied."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1).view(torch.uint8)
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        parts += [flat, flat.new_zeros(-flat.numel() % ALIGNED)]
    return torch.cat(parts)


def packed_size(like: Sequence[torch.Tensor]) -> int:
    """Bytes of tensors with these shapes and types."""
    return sum(size + -size % ALIGNED for tensor in like for size in [tensor.numel() * tensor.element_size()])


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """packed: [bytes] uint8. Views of it with the shapes and types of `like`."""
    first = 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        yield packed[first : first + size].view(tensor.dtype).view(tensor.shape)
        first += size + -size % ALIGNED


_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.float32: np.dtype(np.float32),
}


def unpacked(packed: npt.NDArray[np.uint8], like: Sequence[torch.Tensor]) -> Iterator[npt.NDArray[Any]]:
    """Split memory of the host as `unpack` splits memory of the device."""
    for first, end, dtype, shape in _parts(tuple(like)):
        yield packed[first:end].view(dtype).reshape(shape)


@lru_cache(1024)
def _parts(like: tuple[torch.Tensor, ...]) -> list[tuple[int, int, np.dtype[Any], tuple[int, ...]]]:
    """The first byte of each, the byte after it, its type and shape."""
    parts, first = [], 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        parts.append((first, first + size, _NUMPY[tensor.dtype], tuple(tensor.shape)))
        first += size + -size % ALIGNED
    return parts


Array = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Placed = list[tuple[int, Array]]
"""Arrays, each with the byte that it begins at."""

_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class DeviceArrays:
    """Memory on the device for the arrays of one step."""

    def __init__(self, memory: torch.Tensor) -> None:
        """memory: [bytes] uint8."""
        self.memory = memory
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def view(self, first: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """[length] from byte `first` on. Steps with equal arrays get the same tensor."""
        key = first, length, dtype
        found = self._views.get(key)
        if found is None:
            part = self.memory[first : first + length * dtype.itemsize]
            found = self._views[key] = part.view(dtype)
        return found


class Upload:
    """The arrays of one step at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._target: DeviceArrays | None = None
        self._placed: Placed = []
        self._end = 0

    def begin(self, target: DeviceArrays | None) -> None:
        """Begin a step. With `target`, arrays are copied to it by `send`."""
        self._target, self._placed, self._end = target, [], 0

    def add(self, *arrays: Array, capacity: int = 0) -> list[torch.Tensor]:
        """Returns the arrays on the device, as they will be after `send`. `capacity`: elements that are reserved for
        one array of a padded step, behind its own hold any value. Raises RuntimeError if the memory is too small.
        """
        if capacity and arrays[0].size > capacity:
            raise RuntimeError(f"a step needs {arrays[0].size} numbers, {capacity} are reserved")
        if self._target is None and self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        target, end = self._target, self._end if self._target else 0
        placed, sizes = Placed(), list[int]()
        for array in arrays:
            placed.append((end, array))
            sizes.append(max(array.size, capacity) if target else array.size)
            end += -(-sizes[-1] * array.itemsize // ALIGNED) * ALIGNED
        if target is None:
            target = DeviceArrays(_staged(placed, end, self._device).to(self._device, non_blocking=True))
        elif end > target.memory.numel():
            raise RuntimeError(f"the arrays of a step need {end} bytes, {target.memory.numel()} are reserved")
        else:
            self._placed += placed
            self._end = end
        pairs = zip(placed, sizes, strict=True)
        return [target.view(first, size, _DTYPES[array.dtype]) for (first, array), size in pairs]

    def send(self) -> None:
        """Start to copy the arrays of a padded step, in order with the next launches."""
        if self._target is not None and self._placed:
            first, last = self._placed[-1]
            size = first + last.nbytes
            self._target.memory[:size].copy_(_staged(self._placed, size, self._device), non_blocking=True)
            self._placed = []


def _staged(placed: Sequence[tuple[int, Array]], size: int, device: torch.device) -> torch.Tensor:
    """[size] uint8 on the host with all arrays; pinned for CUDA, in memory that torch reuses once it was copied."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    for first, array in placed:
        numbers[first : first + array.nbytes] = array.view(np.uint8)
    return host
