"""Sums of small tensors over the ranks by one kernel of torch's symmetric memory in place of NCCL's.

Each rank copies its part into memory that all ranks map, waits for the others, and adds all parts in the order of the
ranks (`one_shot_all_reduce`). A rank reads what all have written, so it is for small tensors: those of decode steps.
"""

import importlib
from typing import Any

import torch
from torch import distributed

FLAG = "--symmetric-memory-all-reduce"
MODULE = "torch.distributed._symmetric_memory"
OPERATOR = "one_shot_all_reduce_copy_out"
DTYPES = (torch.bfloat16, torch.float32)
"""What torch's kernel adds."""
ALIGNMENT = 16
"""Bytes that one thread reads at once."""
FEW_RANKS, MOST_BYTES_OF_FEW, MOST_BYTES_OF_MANY = 4, 512 << 10, 256 << 10
"""Up to so many ranks, the largest tensor, and the largest one of more ranks; NCCL adds larger ones."""


class OneShotAllReduce:
    """The sum over all ranks of a CUDA shard. All ranks must make it, and call it, in the same order."""

    def __init__(self, device: torch.device, size: int) -> None:
        """Raises ValueError naming the flag, with the reason, where it is not supported."""
        if reason := unsupported_reason(device, size):
            raise ValueError(f"{FLAG} is refused: {reason}")
        module = _module()
        self._group_name, self._add = _group_name(), _operator()
        most = MOST_BYTES_OF_FEW if size <= FEW_RANKS else MOST_BYTES_OF_MANY
        torch.cuda.set_device(device)  # torch takes the memory from a pool of the current device
        try:
            # [bytes of the largest tensor] uint8, at one address, which captured graphs hold
            self._memory: torch.Tensor = module.empty(most, dtype=torch.uint8, device=device)
            module.rendezvous(self._memory, self._group_name)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{FLAG} is refused: the ranks cannot map each other's memory: {reason}") from error

    def takes(self, y: torch.Tensor) -> bool:
        """Whether it adds tensors like y: [..., n]. Ranks agree, because their tensors are alike."""
        num_bytes, first_byte = y.numel() * y.itemsize, y.storage_offset() * y.itemsize
        is_aligned = num_bytes % ALIGNMENT == 0 and first_byte % ALIGNMENT == 0
        return y.dtype in DTYPES and is_aligned and y.is_contiguous() and num_bytes <= self._memory.numel()

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """y: [..., n] of each rank. Returns their sum, in y."""
        part = self._memory[: y.numel() * y.itemsize].view(y.dtype).view(y.shape)
        # each thread reads its elements of y before any rank adds, and later writes the same ones
        self._add(part, y, "sum", self._group_name, y)
        return y


def unsupported_reason(device: torch.device, size: int) -> str:
    """Why `size` ranks on such a device cannot add by symmetric memory; empty if this version of torch can."""
    if size == 1:
        return "a model on one device has nothing to add up; it is for --num-shard 2 or more"
    if device.type != "cuda":
        return f"it needs CUDA devices, not {device.type}"
    if _module() is None or _operator() is None:
        return f"torch {torch.__version__} has no {OPERATOR}"
    return ""


def _group_name() -> str:
    """The name of the group of all ranks."""
    group = distributed.group.WORLD
    assert group is not None
    return str(group.group_name)


def _module() -> Any:
    """torch's module for symmetric memory, which its documentation does not promise to keep; None without it."""
    try:
        return importlib.import_module(MODULE)
    except ImportError:
        return None


def _operator() -> Any:
    """None where this version of torch does not have it."""
    return getattr(torch.ops.symm_mem, OPERATOR, None)
