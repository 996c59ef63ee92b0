"""What kernels ask about the CUDA device that they run on, and what its torch computes otherwise than the CPU's."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

NEWEST = (9, 0)
"""What is assumed where there is no device: in Triton's interpreter and for tensors on `meta`."""
_assumed: list[tuple[int, int]] = []


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, for example (8, 9) for Ada."""
    if _assumed:
        return _assumed[-1]
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else NEWEST


@cache
def has_triton(device: torch.device) -> bool:
    """Whether kernels in Triton run on the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 for any other."""
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """`x / divisor`, correctly rounded on every device. On CUDA torch multiplies by the reciprocal of a number, which
    rounds twice: scales of 8 bits would then differ from those of kernels and of the CPU.
    """
    return x / torch.full_like(x, divisor)


@contextmanager
def assumed(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, every device has this compute capability: for compiling without a device."""
    _assumed.append(capability)
    try:
        yield
    finally:
        _assumed.pop()
