"""Fast attention on CPU: passes a step's metadata and each layer's tensors to the compiled kernel in cpu.c.

The kernel reads pages in place, so nothing is gathered, and a row's bits depend on its own request alone.
"""

import math
import mmap
from ctypes import CDLL, POINTER, Structure, addressof, c_float, c_int, c_int64, c_void_p, cast
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, LayerKV, NativeStep, Region
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.system.memory import mapped_zeros
from lorikeet.shard.system.native import library

SOURCE = Path(__file__).with_name("cpu.c")
LANES = 16
TILE_ROWS = 64
"""Maximum of query rows (tokens times heads of a group) per tile."""
TILE_SCORES = 1 << 17
"""Maximum of scores per tile, unless one token has more."""


def load(bf16: bool, paired: bool = True) -> CDLL:
    """The kernel for bfloat16 or float32 elements. Raises CompilerMissing.

    `paired`: bfloat16 products two at a time, with weights rounded to bfloat16, if the processor has AVX512-BF16.
    """
    return library(SOURCE, f"BF16={int(bf16)}", f"PAIRED={int(paired)}")


def _typed(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Layer(Structure):
    """`Layer` of cpu.c."""

    _fields_ = [
        *_typed(c_int64, "num_heads num_kv_heads key_dim key_width value_dim value_width window is_causal"),
        *_typed(c_float, "scaling softcap"),
        *_typed(c_void_p, "sinks slopes keys values"),
    ]


class AttentionStep(Structure):
    """`Step` of cpu.c."""

    _fields_ = [
        *_typed(c_int64, "num_segments num_tokens page_size page_stride num_items scratch"),
        *_typed(c_void_p, "starts first_rows counts pages items slots memory"),
    ]


SMALL_PAGES_BYTES = 2 << 20
"""Of a region of KV memory, from its start: not in huge pages."""


def widths(spec: AttentionSpec) -> tuple[int, int]:
    """Elements of a position per kv head in K and in V: padded to pairs, and to vectors of LANES."""
    return -(-spec.key_dim // 2) * 2, -(-spec.value_dim // LANES) * LANES


def fresh_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take time and memory only when they are first written, in huge pages if the system provides them, but
    for the first bytes: these are written in every server, and a huge page in every layer would be mostly empty.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mapped_zeros(num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes > SMALL_PAGES_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE, SMALL_PAGES_BYTES)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class CpuKV(LayerKV):
    """K and V of one layer in the kernel's layout, with its `Layer`."""

    def __init__(self, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        self.spec = spec
        key_width, value_width = widths(spec)
        # [N, kv_heads, key_width * P] in the order of cpu.c for this processor
        self.keys = fresh_zeros((num_pages, spec.num_kv_heads, key_width * page_size), dtype)
        # [N, kv_heads, P * value_width] likewise
        self.values = fresh_zeros((num_pages, spec.num_kv_heads, page_size * value_width), dtype)
        self.sinks = None if spec.sinks is None else spec.sinks.detach().float().contiguous()
        self.slopes = None if spec.alibi_slopes is None else spec.alibi_slopes.float().contiguous()
        self.layer = Layer(
            **{name: getattr(spec, name) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "scaling")},
            key_width=key_width,
            value_width=value_width,
            window=spec.window or 0,
            is_causal=spec.is_causal,
            softcap=spec.softcap or 0.0,
            sinks=None if self.sinks is None else self.sinks.data_ptr(),
            slopes=None if self.slopes is None else self.slopes.data_ptr(),
            keys=self.keys.data_ptr(),
            values=self.values.data_ptr(),
        )

    def fresh_regions(self) -> list[Region]:
        return [Region(pool.data_ptr(), pool[0].nbytes) for pool in (self.keys, self.values)]


class CpuAttention(AttentionBackend):
    """Float32 and bfloat16 on CPU, any head size, window, soft-cap, sinks and alibi."""

    def __init__(self, dtype: torch.dtype, page_size: int | None = None, paired: bool = True) -> None:
        self.page_size = page_size or 32
        if self.page_size % 32:
            raise ValueError(f"the cpu attention backend needs pages of a multiple of 32 tokens, not {self.page_size}")
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the cpu attention backend supports float32 and bfloat16, not {dtype}")
        self.dtype = dtype
        self._attend = load(dtype == torch.bfloat16, paired).attend
        self._attend.restype = None
        self._attend.argtypes = [
            POINTER(Layer), POINTER(AttentionStep), c_void_p, c_void_p, c_void_p, POINTER(c_int64), c_void_p, c_int,
        ]  # fmt: skip
        self._attend_address = cast(self._attend, c_void_p).value or 0
        self._step = AttentionStep()
        self._strides = (c_int64 * 6)()
        self._memory = torch.empty(0)
        self._items = np.empty((0, 3), np.int32)
        self._inputs: StepInputs | None = None
        self._tile_group = 1
        self._tile_dims = 0
        self._num_threads = 1

    def page_bytes(self, spec: AttentionSpec, dtype: torch.dtype) -> int:
        return spec.num_kv_heads * sum(widths(spec)) * self.page_size * dtype.itemsize

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> CpuKV:
        self._tile_group = max(self._tile_group, spec.group)
        self._tile_dims = max(self._tile_dims, sum(widths(spec)) + 1)
        if spec.alibi_slopes is not None and not spec.is_causal:
            raise ValueError("the cpu attention backend has alibi for causal attention only")
        return CpuKV(spec, num_pages, self.page_size, dtype)

    def prepare(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        self._num_threads = torch.get_num_threads()
        self._items, most = self._tiles(inputs)
        self._reserve(most)
        self._step = AttentionStep(
            num_segments=len(inputs.segments),
            num_tokens=inputs.kv_slots.shape[0],
            page_size=self.page_size,
            page_stride=inputs.page_table.shape[1],
            num_items=len(self._items),
            scratch=self._memory.shape[1],
            starts=inputs.starts.ctypes.data,
            first_rows=inputs.first_rows.ctypes.data,
            counts=inputs.counts.ctypes.data,
            pages=inputs.page_table.ctypes.data,
            items=self._items.ctypes.data,
            slots=inputs.kv_slots.data_ptr(),
            memory=self._memory.data_ptr(),
        )

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(kv, CpuKV)
        query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
        self._strides[:] = [*query.stride()[:2], *key.stride()[:2], *value.stride()[:2]]
        # [T, num_heads, value_dim]
        output = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        rows = (x.data_ptr() for x in (query, key, value))
        self._attend(kv.layer, self._step, *rows, self._strides, output.data_ptr(), self._num_threads)
        return output

    def native_step(self) -> NativeStep:
        return NativeStep(self._attend_address, addressof(self._step), self._step.num_tokens)

    def native_layer(self, kv: LayerKV) -> int:
        assert isinstance(kv, CpuKV)
        return addressof(kv.layer)

    def _tiles(self, inputs: StepInputs) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int32]], int]:
        """[tiles, 3] segment, first token in it, tokens; and the scratch floats of the largest tile."""
        spans = ((inputs.starts + inputs.counts) // self.page_size + 2) * self.page_size
        # [R] tokens of a tile of each segment
        tokens = np.maximum(1, np.minimum(TILE_ROWS, TILE_SCORES // spans) // self._tile_group)
        tokens = np.minimum(tokens, inputs.counts)
        most = int((tokens * self._tile_group * (spans + self._tile_dims)).max(initial=0))
        num_tiles = -(-inputs.counts // tokens)
        owners = np.repeat(np.arange(len(num_tiles)), num_tiles)
        firsts = tokens[owners] * (np.arange(len(owners)) - (np.cumsum(num_tiles) - num_tiles)[owners])
        sizes = np.minimum(tokens[owners], inputs.counts[owners] - firsts)
        return np.stack([owners, firsts, sizes], axis=1).astype(np.int32), most

    def _reserve(self, floats: int) -> None:
        """Scratch memory for every thread, kept between steps."""
        floats = -(-floats // LANES) * LANES
        if self._memory.ndim < 2 or self._memory.shape[0] < self._num_threads or self._memory.shape[1] < floats:
            self._memory = torch.empty(self._num_threads, max(floats, 1 << 16))
