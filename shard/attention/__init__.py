"""Attention over paged K and V behind one narrow interface. `create` picks a backend by name, device and dtype."""

import importlib.util
import logging

import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, LayerKV, NativeAttention
from lorikeet.shard.attention.layerwise import LayerwiseAttention
from lorikeet.shard.attention.quantized_kv import dtype_of
from lorikeet.shard.attention.reference import ReferenceAttention

__all__ = ["AttentionBackend", "AttentionSpec", "LayerKV", "NativeAttention", "create"]

logger = logging.getLogger(__name__)


def create(
    name: str, device: torch.device, dtype: torch.dtype, page_size: int | None, kv_cache_dtype: str = "auto"
) -> AttentionBackend:
    """The backend called `name`; `auto` picks one. Raises ValueError for names that do not exist or do not fit.

    `kv_cache_dtype`: `auto` keeps K and V as the model computes them, `fp8` in eight bits.
    """
    kv_dtype = dtype_of(kv_cache_dtype)
    if name == "auto":
        name = _choose(device, dtype, page_size, is_kept_small=kv_dtype is not None)
    if name == "reference":
        return ReferenceAttention(page_size or 16, kv_dtype)
    if name in ("cpu", "varlen") and kv_dtype is not None:
        raise ValueError(f"the {name} attention backend keeps KV in the number format of the model, not in fp8")
    if name == "cpu":
        from lorikeet.shard.attention.cpu import (
            CpuAttention,  # builds on import of its kernel, so only where it is wanted
        )

        if device.type != "cpu":
            raise ValueError(f"the cpu attention backend does not run on {device}")
        return CpuAttention(dtype, page_size)
    if name == "triton" and not has_triton():
        raise ValueError("the triton attention backend needs the package triton")
    if name in ("varlen", "triton"):
        return _layerwise(name, device, page_size, kv_dtype)
    raise ValueError(f"unknown attention backend {name!r}; known: auto, reference, cpu, varlen, triton")


def _layerwise(
    name: str, device: torch.device, page_size: int | None, kv_dtype: torch.dtype | None
) -> LayerwiseAttention:
    """What computes a layer where `name` does not: our own kernels if they can be, else the reference."""
    backends: list[AttentionBackend] = []
    if name == "varlen":
        from lorikeet.shard.attention.varlen import PAGE_SIZE, VarlenAttention, copy_rows

        page_size = page_size or PAGE_SIZE
        store = copy_rows
        if has_triton() and device.type == "cuda":
            from lorikeet.shard.attention.paged import store
        backends.append(VarlenAttention(page_size, store=store))
    if name == "triton" or (has_triton() and device.type == "cuda"):
        from lorikeet.shard.attention.paged import PagedAttention

        backends.append(PagedAttention(page_size, kv_dtype))
    return LayerwiseAttention([*backends, ReferenceAttention(backends[-1].page_size, kv_dtype)])


def has_triton() -> bool:
    """Whether our own kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


def _choose(device: torch.device, dtype: torch.dtype, page_size: int | None, is_kept_small: bool) -> str:
    """The fastest backend that works here, with a warning where that is a slow one."""
    if device.type == "cuda":
        from lorikeet.shard.attention.varlen import DTYPES, PAGE_SIZE, is_there

        has_pages = (page_size or PAGE_SIZE) % PAGE_SIZE == 0
        if dtype in DTYPES and is_there() and has_pages and not is_kept_small:
            return "varlen"
        if has_triton():
            return "triton"
        logger.warning("attention runs on the slow reference backend: there is no package triton")
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        from lorikeet.shard.attention.cpu import load
        from lorikeet.shard.system.native import CompilerMissing

        try:
            load(dtype == torch.bfloat16)
        except CompilerMissing as reason:
            logger.warning("attention runs on the slow reference backend: %s", reason)
        else:
            return "cpu"
    return "reference"
