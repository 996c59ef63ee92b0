"""Attention on CUDA by torch's variable-length FlashAttention, for the layers that it supports: over the page table, or
over keys and values that are copied from their pages first.

It has no soft caps, sinks or slopes, no float32, and not every head size. The keys are not split, so that a row's bits
do not depend on the other rows of the step (Dao 2023 for the algorithm).
"""

import inspect
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch.nn.attention import varlen

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, LayerKV, PagedKV
from lorikeet.shard.attention.flash import COPIED_PAGE, FA3, PAGE_SIZES, current_implementation, has_page_tables
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.system import gpu

MOST_DIM, DIM_STEP = 256, 8
"""Head sizes that the kernel supports."""
DTYPES = (torch.bfloat16, torch.float16)
OLDEST = (8, 0)
"""Compute capability of the first devices that the kernel runs on."""
MOST_COPIED = 32_768
"""Most tokens of a segment whose keys and values are copied; segments that see more are computed from the pages."""
ANY_CONTEXT = 2**31 - 1

Kernel = Callable[..., torch.Tensor]
Store = Callable[[PagedKV, torch.Tensor, torch.Tensor, torch.Tensor], None]


def copy_rows(kv: PagedKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store a step's K and V. slots: [T] page id * P + offset in page; key, value: [T, kv_heads, dim]."""
    kv.keys.flatten(0, 1).index_copy_(0, slots, key)
    kv.values.flatten(0, 1).index_copy_(0, slots, value)


class VarlenAttention(AttentionBackend):
    """One call per layer for all segments: chunks of prompts, single tokens and draft tokens."""

    can_capture = True
    most_context = ANY_CONTEXT
    """Most tokens that a segment may see."""

    def __init__(self, page_size: int | None = None, kernel: Kernel | None = None, store: Store = copy_rows) -> None:
        """Runs the implementation that is in use in this process (flash.py). Raises ValueError for page sizes that it
        does not support. `kernel` replaces torch's.
        """
        self._is_fa3, least = current_implementation() == FA3, self._least_page_size()
        self.page_size = page_size or least
        if self.page_size % least:
            raise ValueError(f"the varlen attention backend needs a page size that is a multiple of {least}")
        self._kernel = kernel or cast(Kernel, varlen.varlen_attn)
        self._store = store
        self._splits = {"num_splits": 1}
        self._most = (0, 0)
        # [R + 1] int32 first row of each segment, and T
        self._cu_rows = torch.empty(0, dtype=torch.int32)
        # [R] int32 tokens that are visible to the segment's last row
        self._kv_lens = torch.empty(0, dtype=torch.int32)
        # [R, most pages of a segment] int32
        self._page_table = torch.empty(0, 0, dtype=torch.int32)
        # [T] page id * P + offset in page
        self._kv_slots = torch.empty(0, dtype=torch.long)

    def _least_page_size(self) -> int:
        return PAGE_SIZES[current_implementation()]

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        self.reserve(spec, dtype, device)
        return super().allocate(spec, num_pages, dtype, device)

    def reserve(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate what layers of this kind share, apart from pages."""

    def unsupported_reason(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
        if dtype not in DTYPES:
            return f"torch's FlashAttention does not support {dtype}"
        if device.type == "cuda" and gpu.capability(device) < OLDEST:
            return "torch's FlashAttention needs a device of compute capability 8.0 or newer"
        if not spec.is_causal:
            return "attention to later tokens is not supported on pages by torch's FlashAttention"
        for name in ("softcap", "sinks", "alibi_slopes"):
            if getattr(spec, name) is not None:
                return f"torch's FlashAttention does not support {name}"
        if self._is_fa3 and spec.window is not None:
            # it ignores a window that no request of the step exceeds, with tiles of another size
            return "FA3 chooses the kernel of a layer with a window by the longest request of a step"
        if spec.key_dim != spec.value_dim or spec.key_dim % DIM_STEP or spec.key_dim > MOST_DIM:
            return f"torch's FlashAttention does not support heads of {spec.key_dim} and {spec.value_dim}"
        return ""

    def num_numbers(self, bounds: Bounds) -> int:
        return 2 * bounds.num_rows + 1 + bounds.num_rows * -(-bounds.max_kv_len // self.page_size)

    def prepare(self, inputs: StepInputs) -> None:
        """With bounds there are as many segments and pages as these allow; the missing segments have no rows."""
        num_segments, num_pages = inputs.page_table.shape
        most_segments, most_pages = num_segments, num_pages
        kv_lens = inputs.starts + inputs.counts
        self._most = int(inputs.counts.max(initial=1)), int(kv_lens.max(initial=1))
        if inputs.bounds is not None:
            self._most = inputs.bounds.num_rows, inputs.bounds.max_kv_len
            most_segments, most_pages = inputs.bounds.num_rows, -(-inputs.bounds.max_kv_len // self.page_size)
        sizes = [most_segments + 1, most_segments, most_segments * most_pages]
        numbers = np.zeros(sum(sizes), np.int32)
        rows, lens, table = np.split(numbers, np.cumsum(sizes[:2]))
        ends = inputs.first_rows + inputs.counts
        rows[1 : num_segments + 1] = ends
        rows[num_segments + 1 :] = ends[-1:]
        lens[:num_segments] = kv_lens
        table.reshape(most_segments, most_pages)[:num_segments, :num_pages] = inputs.page_table
        [on_device] = inputs.upload.add(numbers)
        self._cu_rows, self._kv_lens, pages = on_device.split(sizes)
        self._page_table = pages.view(most_segments, most_pages)
        self._kv_slots = inputs.kv_slots

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(kv, PagedKV)
        self._store(kv, self._kv_slots, key, value)
        return self.read(spec, kv, query)

    def read(self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor) -> torch.Tensor:
        """query: the rows of its segments alone."""
        assert isinstance(kv, PagedKV)
        most_rows, most_tokens = self._most
        # FA2 requires cu_seqlens of the keys too, and FA3 that there are none; the page table determines the keys
        cu_keys = None if self._is_fa3 else self._cu_rows
        arguments = (query.contiguous(), kv.keys, kv.values, self._cu_rows, cu_keys, most_rows, most_tokens)
        named = {
            "scale": spec.scaling,
            "window_size": _window_of(spec),
            "enable_gqa": spec.group > 1,
            "seqused_k": self._kv_lens,
            "block_table": self._page_table,
        }
        try:
            return self._kernel(*arguments, **named, **self._splits)
        except RuntimeError as error:
            if not self._splits or "num_splits" not in str(error):
                raise
            self._splits = {}  # an older torch, which never splits keys in pages and rejects the argument
        return self._kernel(*arguments, **named)


class CopiedKeysAttention(VarlenAttention):
    """Attention for versions of torch without page tables: for long prompts, next to which copies are short. Each
    segment has calls of its own, so that the memory for copies is that of one.
    """

    can_capture = False
    most_context = MOST_COPIED

    def __init__(self, page_size: int | None = None, kernel: Kernel | None = None, store: Store = copy_rows) -> None:
        super().__init__(page_size, kernel, store)
        # versions without the argument take fewer heads of keys as they are
        self._takes_groups = "enable_gqa" in inspect.signature(self._kernel).parameters
        # first row, end, and number of visible tokens of each segment
        self._spans: list[tuple[int, int, int]] = []
        # int32, for each segment: 0 and its rows, 0 and its visible tokens, and the slots of these
        self._numbers: tuple[torch.Tensor, ...] = ()
        # by heads and size: [2, MOST_COPIED, num_kv_heads, dim] the copies
        self._copies: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def _least_page_size(self) -> int:
        return COPIED_PAGE

    def reserve(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> None:
        kind = spec.num_kv_heads, spec.key_dim, dtype
        if kind not in self._copies or self._copies[kind].device != device:
            self._copies[kind] = torch.empty(2, self.most_context, *kind[:2], dtype=dtype, device=device)

    def num_numbers(self, bounds: Bounds) -> int:
        return 0

    def prepare(self, inputs: StepInputs) -> None:
        """Raises RuntimeError for a segment that sees more tokens than are copied."""
        self._kv_slots = inputs.kv_slots
        kv_lens = inputs.starts + inputs.counts
        if int(kv_lens.max(initial=0)) > self.most_context:
            raise RuntimeError(f"a segment sees {kv_lens.max()} tokens, only {self.most_context} are copied")
        ends = inputs.first_rows + inputs.counts
        self._spans = list(zip(inputs.first_rows.tolist(), ends.tolist(), kv_lens.tolist(), strict=True))
        arrays = []
        for count, length, pages in zip(inputs.counts.tolist(), kv_lens.tolist(), inputs.page_table, strict=True):
            position = np.arange(length)
            slots = pages[position // self.page_size] * self.page_size + position % self.page_size
            arrays.append(np.concatenate([[0, count, 0, length], slots]).astype(np.int32))
        [numbers] = inputs.upload.add(np.concatenate(arrays) if arrays else np.zeros(0, np.int32))
        self._numbers = numbers.split([len(array) for array in arrays])

    def read(self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor) -> torch.Tensor:
        assert isinstance(kv, PagedKV)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        copies = self._copies[spec.num_kv_heads, spec.key_dim, query.dtype]
        named = {"enable_gqa": spec.group > 1} if self._takes_groups else {}
        for (first, end, length), numbers in zip(self._spans, self._numbers, strict=True):
            cu_rows, cu_keys, slots = numbers[:2], numbers[2:4], numbers[4:]
            for pool, copied in zip((kv.keys, kv.values), copies, strict=True):
                torch.index_select(pool.flatten(0, 1), 0, slots, out=copied[:length])
            output[first:end] = self._kernel(
                query[first:end].contiguous(), *copies[:, :length], cu_rows, cu_keys, end - first, length,
                scale=spec.scaling, window_size=_window_of(spec), **named,
            )  # fmt: skip
        return output


def of_this_torch(page_size: int | None, store: Store = copy_rows) -> VarlenAttention:
    """FlashAttention as this version of torch has it."""
    made = VarlenAttention if has_page_tables() else CopiedKeysAttention
    return made(page_size, store=store)


def _window_of(spec: AttentionSpec) -> tuple[int, int]:
    """Tokens before and after itself that a token sees, -1 for any."""
    return (-1 if spec.window is None else spec.window - 1, 0)
