"""Attention over paged K and V behind one narrow interface. `create` picks a backend by name, device and dtype."""

import logging

import torch

from shard.attention.base import AttentionBackend, AttentionSpec, LayerKV, NativeAttention
from shard.attention.reference import ReferenceAttention

__all__ = ["AttentionBackend", "AttentionSpec", "LayerKV", "NativeAttention", "create"]

logger = logging.getLogger(__name__)


def create(name: str, device: torch.device, dtype: torch.dtype, page_size: int | None) -> AttentionBackend:
    """The backend called `name`; `auto` picks one. Raises ValueError for names that do not exist or do not fit."""
    if name == "auto":
        name = _choose(device, dtype, page_size)
    if name == "reference":
        return ReferenceAttention(page_size or 16)
    if name == "cpu":
        from shard.attention.cpu import CpuAttention  # builds on import of its kernel, so only where it is wanted

        if device.type != "cpu":
            raise ValueError(f"the cpu attention backend does not run on {device}")
        return CpuAttention(dtype, page_size)
    if name == "varlen":
        from shard.attention.varlen import VarlenAttention

        return VarlenAttention(page_size)
    raise ValueError(f"unknown attention backend {name!r}; known: auto, reference, cpu, varlen")


def _choose(device: torch.device, dtype: torch.dtype, page_size: int | None) -> str:
    """The fastest backend that works here, with a warning where that is a slow one."""
    if device.type == "cuda":
        from shard.attention.varlen import DTYPES, PAGE_SIZE, is_there

        if dtype in DTYPES and is_there() and (page_size or PAGE_SIZE) % PAGE_SIZE == 0:
            return "varlen"
        logger.warning("attention runs on the slow reference backend: %s on CUDA", dtype)
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        from shard.attention.cpu import load
        from shard.native import CompilerMissing

        try:
            load(dtype == torch.bfloat16)
        except CompilerMissing as reason:
            logger.warning("attention runs on the slow reference backend: %s", reason)
        else:
            return "cpu"
    return "reference"
