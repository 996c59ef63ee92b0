"""What a failure of a step means: whether a smaller step may succeed, and whether the device can still be trusted."""

import torch

from lorikeet.shard.batch.inputs import RankDesync

STICKY_ERRORS = ("illegal", "misaligned", "unspecified launch failure", "assert", "hardware stack")
"""Parts of a Triton launch error that mean that an earlier kernel left the device unusable."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller step may succeed where this one failed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def is_device_broken(error: Exception) -> bool:
    """Whether no result of the device, or of all ranks together, can be trusted after this error."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.AcceleratorError | RankDesync) or "CUDA error" in str(error):
        return True
    return "Triton Error" in str(error) and any(word in str(error) for word in STICKY_ERRORS)
