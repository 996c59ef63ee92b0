"""Attention by our own Triton kernels over pages: any window, soft cap, sinks, slopes, and heads of up to 256.

One launch stores a step's K and V, and one computes all of its segments: single tokens, draft tokens and chunks
of prompts. K and V may be kept in eight bits. Tables and launches are here, the kernels are in paged_triton.py.
"""

import numpy as np
import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, KvDestination, LayerKV, PagedKV
from lorikeet.shard.attention.paged_triton import MOST_DIM, attend_paged, store_kv, tile_of, width_of
from lorikeet.shard.attention.spans import SPAN, LayerKind, Packer, SegmentRows, StepTables, capacity, starts_of
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.system import gpu

PAGE_STEP = 64
"""The keys of a tile are in one page, so page sizes are multiples of this."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PROGRAMS_PER_PROCESSOR = 2
"""Programs that fit into the registers and shared memory of one multiprocessor."""
PARTIAL_FLOATS = 1 << 24
"""Memory for the results of single spans."""


class PagedAttention(AttentionBackend):
    """Float32, float16 and bfloat16, on CUDA or in Triton's interpreter."""

    can_capture = can_add_accepted = True

    def __init__(
        self,
        page_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
        span: int = SPAN,
        num_programs: int | None = None,
    ) -> None:
        """`span`: positions of a partial result; `num_programs`: programs per launch, by default as many as the device
        runs at once. Raises ValueError for page sizes that the kernels do not support.
        """
        self.page_size = page_size or PAGE_STEP
        if self.page_size % PAGE_STEP or span % PAGE_STEP:
            raise ValueError(f"the triton attention backend needs a page size that is a multiple of {PAGE_STEP}")
        self.kv_dtype = kv_dtype
        self._span = span
        self._num_programs = num_programs
        self._kinds: dict[LayerKind, int] = {}
        self._sizes: dict[tuple[Bounds, int], int] = {}
        """What `num_numbers` found, for so many kinds."""
        self._bounds: Bounds | None = None
        self._packer: Packer | None = None
        self._tables = StepTables(np.empty(0, np.int32), (), ())
        # int32 of `pack`, on the device
        self._numbers = torch.empty(0, dtype=torch.int32)
        # [PARTIAL_FLOATS] float32 rows of single spans' results, and for each row its largest score and sum of weights
        self._partials = torch.empty(0)
        self._stats = torch.empty(0)
        # int32 zeros, for each tile whose spans programs share and each K and V head: how many have ended
        self._arrived = torch.empty(0, dtype=torch.int32)
        # [T] page id * P + offset in page
        self._kv_slots = torch.empty(0, dtype=torch.long)

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        """Raises ValueError with a reason for a layer that the kernels do not compute."""
        if reason := self.unsupported_reason(spec, dtype, device):
            raise ValueError(reason)
        if self._num_programs is None:
            self._num_programs = PROGRAMS_PER_PROCESSOR * gpu.num_processors(device)
        if self._partials.device != device or self._partials.numel() == 0:
            self._partials = torch.empty(PARTIAL_FLOATS, device=device)
            self._stats = torch.empty(2 * PARTIAL_FLOATS // width_of(1), device=device)
        most = self._num_programs + 2 * spec.num_kv_heads  # as in `capacity`
        if self._arrived.device != device or self._arrived.numel() < most:
            self._arrived = torch.zeros(most, dtype=torch.int32, device=device)
        self._kinds.setdefault(kind_of(spec, dtype, device), len(self._kinds))
        return super().allocate(spec, num_pages, dtype, device)

    def unsupported_reason(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
        if dtype not in DTYPES:
            return f"the triton attention backend does not support {dtype}"
        if not spec.is_causal:
            return "the triton attention backend does not support attention to later tokens"
        if max(spec.key_dim, spec.value_dim) > MOST_DIM:
            return f"the triton attention backend does not support heads of {spec.key_dim} and {spec.value_dim}"
        return ""

    def num_numbers(self, bounds: Bounds) -> int:
        if not self._kinds:
            return 0
        assert self._num_programs is not None
        key = bounds, len(self._kinds)
        if key not in self._sizes:
            self._sizes[key] = capacity(list(self._kinds), bounds, self.page_size, self._num_programs, self._span)
        return self._sizes[key]

    def prepare(self, inputs: StepInputs) -> None:
        self._kv_slots = inputs.kv_slots
        self._bounds = inputs.bounds
        if not self._kinds:
            return
        assert self._num_programs is not None
        num_pages = -(-(inputs.starts + inputs.num_uncertain + inputs.counts) // self.page_size)
        offsets = (np.cumsum(num_pages) - num_pages).astype(np.int32)
        pages = inputs.page_table[np.arange(inputs.page_table.shape[1]) < num_pages[:, None]]
        rows = SegmentRows(inputs.starts, inputs.counts, inputs.first_rows, offsets, inputs.num_uncertain)
        self._packer = self._packer or Packer(self._num_programs, self._span)
        self._tables = self._packer.pack(list(self._kinds), rows, pages)
        size = 0 if inputs.bounds is None else self.num_numbers(inputs.bounds)
        [self._numbers] = inputs.upload.add(self._tables.numbers, capacity=size)
        if np.count_nonzero(inputs.num_uncertain):
            inputs.move(self._numbers, *starts_of(self._tables, rows))

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(kv, PagedKV)
        store(kv, self._kv_slots, key, value)
        return self.read(spec, kv, query)

    def destination(self, kv: LayerKV) -> KvDestination | None:
        return destination(kv, self._kv_slots)

    def read(self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor) -> torch.Tensor:
        """Rows of no segment hold any value."""
        assert isinstance(kv, PagedKV)
        query = query if query.stride(2) == 1 else query.contiguous()
        # [T, num_heads, value_dim]
        output = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        kind = self._kinds[kind_of(spec, query.dtype, query.device)]
        attend_paged(
            query, kv.keys, kv.values, kv.key_scales, kv.value_scales, kv.sinks, kv.slopes, self._numbers,
            self._partials, self._stats, self._arrived, output, kind, spec.window or 0, self._span,
            self._grid(kind, spec.num_kv_heads), spec.scaling, spec.softcap or 0.0,
        )  # fmt: skip
        return output

    def _grid(self, kind: int, num_kv_heads: int) -> int:
        """Number of programs: of the step, or of its bounds alone."""
        assert self._num_programs is not None
        if self._tables.num_folds[kind] * num_kv_heads > self._arrived.numel():
            raise RuntimeError(f"programs share {self._tables.num_folds[kind]} tiles, more than are reserved")
        return self._num_programs if self._bounds is not None else self._tables.num_items[kind] * num_kv_heads


def destination(kv: LayerKV, slots: torch.Tensor) -> KvDestination | None:
    """Destination in KV memory that holds K and V as they are, of one head size. slots: [T]."""
    if not isinstance(kv, PagedKV) or kv.key_scales is not None or kv.keys.shape != kv.values.shape:
        return None
    return KvDestination(slots, kv.keys, kv.values)


def store(kv: PagedKV, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store a step's K and V in one launch. slots: [T] page id * P + offset in page; key, value: [T, kv_heads, dim]."""
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    store_kv(key, value, slots, kv.keys, kv.values, kv.key_scales, kv.value_scales)


def kind_of(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> LayerKind:
    """The kind of a layer; layers of one kind share tables."""
    tile = tile_of(dtype, spec.key_dim, spec.value_dim, gpu.capability(device))
    room = PARTIAL_FLOATS // (spec.num_kv_heads * width_of(spec.value_dim))
    return LayerKind(spec.group, spec.num_kv_heads, spec.window, tile.rows, room)
