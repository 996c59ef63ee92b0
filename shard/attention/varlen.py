"""Attention on CUDA by torch's own variable-length FlashAttention over the page table, where it covers the layer.

It has no soft caps, sinks or slopes, no float32, and not every size of a head. One split of the keys, so that a row's
bits do not depend on the rows beside it (Dao 2023 for the algorithm).
"""

import inspect
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch.nn.attention import varlen

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, LayerKV
from lorikeet.shard.attention.metadata import StepMetadata
from lorikeet.shard.attention.paged_kv import PagedKV
from lorikeet.shard.batch.inputs import StepInputs

PAGE_SIZE = 256
"""Tokens; the kernel takes multiples of it."""
MOST_DIM, DIM_STEP = 256, 8
"""Sizes of a head that the kernel has."""
DTYPES = (torch.bfloat16, torch.float16)

Kernel = Callable[..., torch.Tensor]
Store = Callable[[PagedKV, torch.Tensor, torch.Tensor, torch.Tensor], None]


def copy_rows(kv: PagedKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Keep a step's K and V. slots: [T] page id * P + offset in page; key, value: [T, kv_heads, dim]."""
    kv.keys.flatten(0, 1).index_copy_(0, slots, key)
    kv.values.flatten(0, 1).index_copy_(0, slots, value)


class VarlenAttention(AttentionBackend):
    """One call per layer for all segments: chunks of prompts, single tokens and guesses to verify alike."""

    can_capture = True

    def __init__(self, page_size: int | None = None, kernel: Kernel | None = None, store: Store = copy_rows) -> None:
        """Raises ValueError for page sizes that the kernel does not have. `kernel`: in place of torch's."""
        self.page_size = page_size or PAGE_SIZE
        if self.page_size % PAGE_SIZE:
            raise ValueError(f"the varlen attention backend takes page sizes that are multiples of {PAGE_SIZE}")
        self._kernel = kernel or cast(Kernel, varlen.varlen_attn)
        self._store = store
        self._metadata = StepMetadata()
        self._splits = {"num_splits": 1}
        self._most = (0, 0)
        # [R + 1] int32 first row of each segment, and T
        self._cu_rows = torch.empty(0, dtype=torch.int32)
        # [R] int32 tokens that the segment's last row sees
        self._kv_lens = torch.empty(0, dtype=torch.int32)
        # [R, most pages of a segment] int32
        self._page_table = torch.empty(0, 0, dtype=torch.int32)
        # [T] page id * P + offset in page
        self._kv_slots = torch.empty(0, dtype=torch.long)

    def unsupported_reason(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
        return unsupported_reason(spec, dtype)

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> PagedKV:
        return PagedKV(spec, num_pages, self.page_size, dtype, device)

    def prepare(self, inputs: StepInputs) -> None:
        """Under bounds there are as many segments and pages of each as these allow: the missing ones have no rows."""
        num_segments, num_pages = inputs.page_table.shape
        most_segments, most_pages = num_segments, num_pages
        kv_lens = inputs.starts + inputs.counts
        self._most = int(inputs.counts.max(initial=1)), int(kv_lens.max(initial=1))
        if inputs.bounds is not None:
            self._most = inputs.bounds.num_rows, inputs.bounds.max_kv_len
            most_segments, most_pages = inputs.bounds.num_rows, -(-inputs.bounds.max_kv_len // self.page_size)
        sizes = [most_segments + 1, most_segments, most_segments * most_pages]
        told = np.zeros(sum(sizes), np.int32)
        rows, lens, table = np.split(told, np.cumsum(sizes[:2]))
        ends = inputs.first_rows + inputs.counts
        rows[1 : num_segments + 1] = ends
        rows[num_segments + 1 :] = ends[-1:]
        lens[:num_segments] = kv_lens
        table.reshape(most_segments, most_pages)[:num_segments, :num_pages] = inputs.page_table
        on_device = self._metadata.send(told, inputs.device, inputs.bounds, told.size)
        self._cu_rows, self._kv_lens, pages = on_device.split(sizes)
        self._page_table = pages.view(most_segments, most_pages)
        self._kv_slots = inputs.kv_slots

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(kv, PagedKV)
        self._store(kv, self._kv_slots, key, value)
        most_rows, most_tokens = self._most
        # torch refuses first rows of queries without those of keys; which keys there are, the page table says alone
        arguments = (query.contiguous(), kv.keys, kv.values, self._cu_rows, self._cu_rows, most_rows, most_tokens)
        named = {
            "scale": spec.scaling,
            "window_size": (-1 if spec.window is None else spec.window - 1, 0),
            "enable_gqa": spec.group > 1,
            "seqused_k": self._kv_lens,
            "block_table": self._page_table,
        }
        try:
            return self._kernel(*arguments, **named, **self._splits)
        except RuntimeError as error:
            if not self._splits or "num_splits" not in str(error):
                raise
            self._splits = {}  # an older torch, which splits no keys that lie in pages and will not be told so
        return self._kernel(*arguments, **named)


def is_there() -> bool:
    """Whether this torch attends through a page table."""
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters


def unsupported_reason(spec: AttentionSpec, dtype: torch.dtype) -> str:
    """What of a layer the kernel does not have; empty if it has all."""
    if dtype not in DTYPES:
        return f"{dtype} is not what FlashAttention computes in"
    for name in ("softcap", "sinks", "alibi_slopes"):
        if getattr(spec, name) is not None:
            return f"torch's FlashAttention has no {name}"
    if spec.key_dim != spec.value_dim or spec.key_dim % DIM_STEP or spec.key_dim > MOST_DIM:
        return f"torch's FlashAttention has no heads of {spec.key_dim} and {spec.value_dim}"
    return ""
