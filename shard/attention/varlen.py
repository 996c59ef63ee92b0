"""Attention on CUDA by torch's own variable-length FlashAttention over the page table, where it covers the layer.

Layers with soft caps, sinks or slopes, in float32, or with heads that the kernel has no room for are computed by the
reference, one segment at a time: right, and slow. So is everything where the kernel does not give what the reference
gives for a few random rows. One split of the keys, so that a row's bits do not depend on the rows beside it (Dao 2023
for the algorithm).
"""

import inspect
import logging
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch.nn.attention import varlen

from shard.attention.base import AttentionBackend, AttentionSpec, LayerKV
from shard.attention.reference import ReferenceAttention
from shard.batch import Segment, StepInputs

logger = logging.getLogger(__name__)

PAGE_SIZE = 256
"""Tokens; the kernel takes multiples of it."""
MOST_DIM, DIM_STEP = 256, 8
"""Sizes of a head that the kernel has."""
DTYPES = (torch.bfloat16, torch.float16)

TOLERANCE = 2.0**-5
"""Of values around one: rounding to bfloat16 moves them by a quarter of that at most."""

Kernel = Callable[..., torch.Tensor]


class PagedKV(LayerKV):
    """Whole pages, as the kernel reads them."""

    def __init__(
        self, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype, on: torch.device
    ) -> None:
        shape = (num_pages, page_size, spec.num_kv_heads, spec.key_dim)
        # [N, P, num_kv_heads, key_dim]
        self.keys = torch.zeros(shape, dtype=dtype, device=on)
        # [N, P, num_kv_heads, key_dim]
        self.values = torch.zeros(shape, dtype=dtype, device=on)


class VarlenAttention(AttentionBackend):
    """One call per layer for all segments: chunks of prompts, single tokens and guesses to verify alike."""

    def __init__(self, page_size: int | None = None, kernel: Kernel | None = None) -> None:
        """Raises ValueError for page sizes that the kernel does not have. `kernel`: in place of torch's."""
        self.page_size = page_size or PAGE_SIZE
        if self.page_size % PAGE_SIZE:
            raise ValueError(f"the varlen attention backend takes page sizes that are multiples of {PAGE_SIZE}")
        self._kernel = kernel or cast(Kernel, varlen.varlen_attn)
        self._reference = ReferenceAttention(self.page_size)
        self._has_warned = False
        self._proved: dict[tuple[object, ...], str] = {}
        self._most = (0, 0)
        # [R + 1] int32 first row of each segment, and T
        self._cu_rows = torch.empty(0, dtype=torch.int32)
        # [R] int32 tokens that the segment's last row sees
        self._kv_lens = torch.empty(0, dtype=torch.int32)
        # [R, most pages of a segment] int32
        self._page_table = torch.empty(0, 0, dtype=torch.int32)
        # [T] page id * P + offset in page
        self._kv_slots = torch.empty(0, dtype=torch.long)

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        reason = why_not(spec, dtype) or self._disproof(spec, dtype, device)
        if not reason:
            return PagedKV(spec, num_pages, self.page_size, dtype, device)
        if not self._has_warned:
            logger.warning("attention runs on the slow reference backend: %s", reason)
        self._has_warned = True
        return self._reference.allocate(spec, num_pages, dtype, device)

    def prepare(self, inputs: StepInputs) -> None:
        self._reference.prepare(inputs)
        num_segments, num_pages = inputs.page_table.shape
        kv_lens = inputs.starts + inputs.counts
        self._most = int(inputs.counts.max(initial=1)), int(kv_lens.max(initial=1))
        ends = inputs.first_rows + inputs.counts
        # one copy to the device for all three
        told = np.concatenate([[0], ends, kv_lens, inputs.page_table.ravel()]).astype(np.int32)
        on_device = torch.from_numpy(told).to(inputs.device, non_blocking=True)
        self._cu_rows, self._kv_lens, table = on_device.split(
            [num_segments + 1, num_segments, num_segments * num_pages]
        )
        self._page_table = table.view(num_segments, num_pages)
        self._kv_slots = inputs.kv_slots

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if not isinstance(kv, PagedKV):
            return self._reference.attend(spec, kv, query, key, value)
        kv.keys.flatten(0, 1).index_copy_(0, self._kv_slots, key)
        kv.values.flatten(0, 1).index_copy_(0, self._kv_slots, value)
        return self._ask(spec, kv, query)

    def _ask(self, spec: AttentionSpec, kv: PagedKV, query: torch.Tensor) -> torch.Tensor:
        most_rows, most_tokens = self._most
        return self._kernel(
            query.contiguous(),
            kv.keys,
            kv.values,
            self._cu_rows,
            None,
            most_rows,
            most_tokens,
            scale=spec.scaling,
            window_size=(-1 if spec.window is None else spec.window - 1, 0),
            enable_gqa=spec.group > 1,
            seqused_k=self._kv_lens,
            block_table=self._page_table,
            num_splits=1,
        )

    def _disproof(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
        """Why the kernel is not to be used for such a layer here; empty where it gives what the reference gives."""
        facts = (spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.scaling, spec.window, dtype)
        if facts not in self._proved:
            self._proved[facts] = self._compare(spec, dtype, device)
        return self._proved[facts]

    def _compare(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
        generator = torch.Generator().manual_seed(0)

        def draw(num_heads: int) -> torch.Tensor:
            return torch.randn(num_rows, num_heads, spec.key_dim, generator=generator).to(device, dtype)

        far = self.page_size - 2
        segments = [Segment(0, 5, [3]), Segment(far, 1, [1]), Segment(far, 4, [4, 2])]
        num_rows = sum(segment.num_tokens for segment in segments)
        inputs = StepInputs(self.page_size, device)
        ids = torch.zeros(num_rows, dtype=torch.long, device=device)
        inputs.fill(segments, ids, ids[:1])
        kv = PagedKV(spec, 5, self.page_size, dtype, device)
        for pool in (kv.keys, kv.values):
            pool.copy_(torch.randn(pool.shape, generator=generator))
        theirs = self._reference.allocate(spec, 5, dtype, device)
        theirs.keys.copy_(kv.keys.flatten(0, 1))
        theirs.values.copy_(kv.values.flatten(0, 1))
        self.prepare(inputs)
        query, key, value = draw(spec.num_heads), draw(spec.num_kv_heads), draw(spec.num_kv_heads)
        wanted = self._reference.attend(spec, theirs, query, key, value).float()
        try:
            found = self.attend(spec, kv, query, key, value).float()
        except Exception as error:  # whatever it is, there is another way
            said = str(error).partition("\n")[0]
            return f"torch's FlashAttention does not run: {type(error).__name__}: {said}"
        worst = float((found - wanted).abs().max())
        return "" if worst <= TOLERANCE else f"torch's FlashAttention is off by {worst:.3g} for a few random rows"


def is_there() -> bool:
    """Whether this torch attends through a page table."""
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters


def covers(spec: AttentionSpec, dtype: torch.dtype) -> bool:
    """Whether the kernel computes such a layer."""
    return not why_not(spec, dtype)


def why_not(spec: AttentionSpec, dtype: torch.dtype) -> str:
    """What of a layer the kernel does not have; empty if it has all."""
    if dtype not in DTYPES:
        return f"{dtype} is not what FlashAttention computes in"
    for name in ("softcap", "sinks", "alibi_slopes"):
        if getattr(spec, name) is not None:
            return f"torch's FlashAttention has no {name}"
    if spec.key_dim != spec.value_dim or spec.key_dim % DIM_STEP or spec.key_dim > MOST_DIM:
        return f"torch's FlashAttention has no heads of {spec.key_dim} and {spec.value_dim}"
    return ""
