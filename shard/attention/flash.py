"""Which implementation of FlashAttention torch's variable-length attention runs: FA2, or FA3 where torch offers it.

FA3 needs a device of compute capability 9.x, a version of torch with a registry of implementations, and the package
flash_attn_interface, whose kernels torch registers in place of its own, for the whole process.
"""

import inspect

import structlog
import torch
from torch.nn import attention
from torch.nn.attention import varlen

from lorikeet.shard.system import gpu

log = structlog.get_logger()

FA2, FA3 = "FA2", "FA3"
FA3_MAJOR = 9
"""The only major compute capability on which torch runs FA3."""
PAGE_SIZES = {FA2: 256, FA3: 64}
"""Tokens of a page. FA2 needs a multiple of it; FA3 takes pages of any size, our paged kernel multiples of 64."""
COPIED_PAGE = 64
"""The same where keys are copied from pages of any size."""


def has_page_tables() -> bool:
    """Whether this version of torch reads keys and values through page tables."""
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters


def current_implementation() -> str:
    """`FA3` where it was activated in this process, else `FA2`."""
    # torch 2.11 may lack the function
    current = getattr(attention, "current_flash_attention_impl", lambda: None)()
    return FA3 if current == FA3 else FA2


def kind_in_use() -> str:
    """The implementation, and whether keys are copied: what limits are measured for."""
    return current_implementation() if has_page_tables() else f"{current_implementation()} copied keys"


def least_page_size() -> int:
    """Tokens of which pages have a multiple."""
    return PAGE_SIZES[current_implementation()] if has_page_tables() else COPIED_PAGE


def choose_implementation(device: torch.device) -> str:
    """Activate FA3 where it runs. Logs and returns what is in use."""
    reason = ""
    if current_implementation() != FA3:
        reason = _activate(device)
    implementation = current_implementation()
    if device.type == "cuda":
        keys = "in pages" if has_page_tables() else "copied from their pages"
        log.info("flash_attention", implementation=implementation, keys=keys, **({"reason": reason} if reason else {}))
    return implementation


def _activate(device: torch.device) -> str:
    """Returns why FA3 is not in use; empty if it is."""
    if device.type != "cuda" or gpu.capability(device)[0] != FA3_MAJOR:
        return f"FA3 needs compute capability {FA3_MAJOR}.x"
    if FA3 not in getattr(attention, "list_flash_attention_impls", list)():
        return "this version of torch offers no FA3"
    try:
        attention.activate_flash_attention_impl(FA3)
        _try(device)
    except ModuleNotFoundError as error:
        return f"the package {error.name} is not installed"
    except Exception as error:  # whatever it is, FA2 can run
        if current_implementation() == FA3:
            attention.restore_flash_attention_impl()
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        log.warning("flash_attention_3_failed", reason=reason, effect="FA2 computes long prompts")
        return reason
    return ""


def _try(device: torch.device) -> None:
    """Compute two tokens over one page with the arguments that steps use. Raises where that fails."""
    query, page = (torch.zeros(*size, 1, 64, dtype=torch.bfloat16, device=device) for size in ((2,), (1, 64)))
    cu_rows, kv_lens, pages = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0, 2], [2], [[0]])
    )
    if has_page_tables():
        output = varlen.varlen_attn(
            query, page, page, cu_rows, None, 2, 2,
            window_size=(-1, 0), seqused_k=kv_lens, block_table=pages, num_splits=1,
        )  # fmt: skip
    else:
        output = varlen.varlen_attn(query, query, query, cu_rows, cu_rows, 2, 2, window_size=(-1, 0))
    if not isinstance(output, torch.Tensor) or float(output.abs().max()):  # waits for the kernel
        raise RuntimeError("attention to zeros is not zero")
