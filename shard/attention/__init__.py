"""Attention over paged K and V behind one interface; `create` picks a backend by name, device and dtype.

`auto` picks, in this order:

- on CUDA from compute capability 8.0 on, for float16 and bfloat16 with K and V not in fp8, `triton` for short segments
  and `varlen`, torch's FlashAttention, for long prompts (by_length.py), with pages of a multiple of 256 tokens, or of
  64 where FlashAttention 3 runs (flash.py) or torch has no page tables and keys are copied from pages; without triton
  `varlen` alone, if torch has page tables; layers that `varlen` does not support run on `triton`;
- on CUDA otherwise `triton`, our own kernels, if the package triton is installed;
- on CPU `cpu`, our own C kernel, for float32 and bfloat16 if there is a C compiler;
- else `reference`, which is slow.

Layers that `varlen` and `triton` cannot compute run on `reference`.
"""

import importlib.util
import logging

import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, LayerKV, NativeStep
from lorikeet.shard.attention.layerwise import LayerwiseAttention
from lorikeet.shard.attention.reference import FP8, ReferenceAttention
from lorikeet.shard.system import gpu

__all__ = ["AttentionBackend", "AttentionSpec", "LayerKV", "NativeStep", "create"]

CONVERTS_FP8 = (8, 9)
"""Compute capability of the first devices that convert FP8."""

logger = logging.getLogger(__name__)


def create(
    name: str, device: torch.device, dtype: torch.dtype, page_size: int | None, kv_cache_dtype: str = "auto"
) -> AttentionBackend:
    """The backend called `name`; `auto` picks one. Raises ValueError for an unknown name or unsupported arguments.

    `kv_cache_dtype`: `auto` keeps K and V in the dtype of the model, `fp8` in eight bits.
    """
    if kv_cache_dtype not in ("auto", "fp8"):
        raise ValueError(f"unknown --kv-cache-dtype {kv_cache_dtype!r}; known: auto, fp8")
    kv_dtype = FP8 if kv_cache_dtype == "fp8" else None
    if kv_dtype is not None and device.type == "cuda" and gpu.capability(device) < CONVERTS_FP8:
        raise ValueError("--kv-cache-dtype fp8 needs a CUDA device of compute capability 8.9 or newer")
    is_automatic = name == "auto"
    if is_automatic:
        name = _choose(device, dtype, page_size, kv_dtype)
    if name == "reference":
        return ReferenceAttention(page_size or 16, kv_dtype)
    if name in ("cpu", "varlen") and kv_dtype is not None:
        raise ValueError(f"the {name} attention backend does not support --kv-cache-dtype fp8")
    if name == "cpu":
        from lorikeet.shard.attention.cpu import CpuAttention

        if device.type != "cpu":
            raise ValueError(f"the cpu attention backend does not run on {device}")
        return CpuAttention(dtype, page_size)
    if name == "triton" and not has_triton():
        raise ValueError("the triton attention backend needs the package triton")
    if name == "varlen" and not is_automatic:
        from lorikeet.shard.attention.flash import has_page_tables

        if not has_page_tables():
            raise ValueError(
                f"--attention varlen needs page tables, which FlashAttention of torch {torch.__version__} lacks: "
                "install torch 2.13 or newer, or use --attention auto"
            )
    if name in ("varlen", "triton"):
        return _layerwise(name, device, page_size, kv_dtype, splits=is_automatic and has_triton())
    raise ValueError(f"unknown attention backend {name!r}; known: auto, reference, cpu, varlen, triton")


def _layerwise(
    name: str, device: torch.device, page_size: int | None, kv_dtype: torch.dtype | None, splits: bool = False
) -> LayerwiseAttention:
    """`name`, then the triton backend if it can run here, then the reference. With `splits` first both by length."""
    backends: list[AttentionBackend] = []
    on_cuda = has_triton() and device.type == "cuda"
    if name == "varlen":
        from lorikeet.shard.attention.flash import FA2, current_implementation, has_page_tables
        from lorikeet.shard.attention.varlen import VarlenAttention, copy_rows, of_this_torch

        implementation, store = current_implementation(), copy_rows
        if on_cuda:
            from lorikeet.shard.attention.paged import store
        if splits:
            from lorikeet.shard.attention.by_length import ByLengthAttention
            from lorikeet.shard.attention.flash import kind_in_use
            from lorikeet.shard.attention.kernel_limits import read_limits
            from lorikeet.shard.attention.paged import PagedAttention

            table, long = read_limits(gpu.capability(device), kind_in_use()), of_this_torch(page_size, store)
            backends.append(ByLengthAttention(PagedAttention(long.page_size), long, table))
        # FA3's bits of a short segment would depend on the step's longest one
        if not splits or (implementation == FA2 and has_page_tables()):
            backends.append(VarlenAttention(page_size, store=store))
        page_size = backends[0].page_size
    if name == "triton" or on_cuda:
        from lorikeet.shard.attention.paged import PagedAttention

        backends.append(PagedAttention(page_size, kv_dtype))
    return LayerwiseAttention([*backends, ReferenceAttention(backends[-1].page_size, kv_dtype)])


def has_triton() -> bool:
    """Whether the package triton is installed."""
    return importlib.util.find_spec("triton") is not None


def _choose(device: torch.device, dtype: torch.dtype, page_size: int | None, kv_dtype: torch.dtype | None) -> str:
    """The backend that `auto` stands for. Activates FlashAttention 3 where it runs. Logs a warning if it returns the
    reference although another one could run.
    """
    if device.type == "cuda":
        from lorikeet.shard.attention.flash import choose_implementation, has_page_tables, least_page_size
        from lorikeet.shard.attention.varlen import DTYPES, OLDEST

        is_supported = (has_page_tables() or has_triton()) and gpu.capability(device) >= OLDEST
        if dtype in DTYPES and is_supported and kv_dtype is None:
            if has_triton():  # FA3 is for long prompts alone, and without triton FlashAttention computes everything
                choose_implementation(device)
            if (page_size or 0) % least_page_size() == 0:
                return "varlen"
        if has_triton():
            return "triton"
        logger.warning("attention runs on the slow reference backend: the package triton is not installed")
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        from lorikeet.shard.attention.cpu import load
        from lorikeet.shard.system.native import CompilerMissing

        try:
            load(dtype == torch.bfloat16)
            return "cpu"
        except CompilerMissing as reason:
            logger.warning("attention runs on the slow reference backend: %s", reason)
    return "reference"
