"""Copies between host and device that do not make the host wait for a step that is still running."""

from collections.abc import Iterator, Sequence

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
