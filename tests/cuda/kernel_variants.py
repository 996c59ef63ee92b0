"""The launches whose binaries are held against limits: every Triton kernel with the shapes of real models."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lorikeet.shard.attention import paged_triton as paged
from lorikeet.shard.attention.reference import FP8
from lorikeet.shard.attention.spans import SPAN
from lorikeet.shard.batch import device_tokens_triton
from lorikeet.shard.grammar import triton as grammars
from lorikeet.shard.model.kernels import (
    device_integers,
    eight_bits_triton,
    four_bits_triton,
    integers_triton,
    pairs_triton,
    products_triton,
    tuning,
)
from lorikeet.shard.model.kernels import triton as fused
from lorikeet.shard.model.lora import triton as lora
from lorikeet.shard.model.medusa import triton as medusa
from lorikeet.shard.model.medusa.heads import MOST_HEADS
from lorikeet.shard.sampling import triton as sampling
from lorikeet.shard.speculation.device import lookup_triton
from lorikeet.shard.speculation.device.device_drafts import BLOCK, MOST_DRAFTS, SOURCES, Emitted, Texts
from tests.cuda.launches import Launch, recorded

BF16, FP16, FP32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
META = torch.device("meta")
T, PAGES, PAGE = 48, 8, 64


@dataclass(frozen=True)
class Variant:
    """One launch function with arguments on `meta`."""

    name: str
    call: Callable[[], object]
    least: tuple[int, int] = (7, 5)
    most: tuple[int, int] = (12, 0)
    """The oldest and the newest compute capability for which it is compiled. float16 and bfloat16 are the same
    instructions on devices that have both.
    """

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return self.least <= capability <= self.most


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Layer:
    """An attention layer."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_slopes: bool = False

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """K and V, and their scales."""
        pool = tensor(PAGES, PAGE, self.kv_heads, self.dim, dtype=self.kv_dtype or self.dtype)
        scales = None if self.kv_dtype is None else tensor(PAGES, PAGE, self.kv_heads, dtype=FP32)
        return pool, pool, scales, scales

    def attend(self) -> None:
        query = tensor(T, self.heads, self.dim, dtype=self.dtype)
        sinks, slopes = (tensor(self.heads, dtype=FP32) if has else None for has in (self.has_sinks, self.has_slopes))
        floats = tensor(1 << 20, dtype=FP32)
        paged.attend_paged(
            query, *self.pools, sinks, slopes, tensor(4096, dtype=I32), floats, floats, tensor(280, dtype=I32), query,
            0, self.window, SPAN, 264, self.dim**-0.5, self.softcap,
        )  # fmt: skip

    def store(self) -> None:
        key = tensor(T, self.kv_heads, self.dim, dtype=self.dtype)
        paged.store_kv(key, key, tensor(T, dtype=I64), *self.pools)


LAYERS = (
    Layer("Llama-3.1-8B", 32, 8, 128),
    Layer("Llama-3.1-8B float16", 32, 8, 128, FP16),
    Layer("Llama-3.1-8B float32", 32, 8, 128, FP32),
    Layer("Llama-3.1-8B fp8", 32, 8, 128, kv_dtype=FP8),
    Layer("Gemma-2-9B", 16, 8, 256, window=4096, softcap=50.0),
    Layer("Gemma-2-9B float16", 16, 8, 256, FP16, window=4096, softcap=50.0),
    Layer("Gemma-2-9B float32", 16, 8, 256, FP32, window=7, softcap=50.0),
    Layer("gpt-oss-20b", 64, 8, 64, window=128, has_sinks=True),
    Layer("bloom-7b1 float16", 32, 32, 128, FP16, has_slopes=True),
    Layer("heads of 192", 16, 16, 192),
    Layer("heads of 192 float32", 16, 16, 192, FP32),
)


def adapt(dtype: torch.dtype, num_in: int, num_out: int, num_parts: int, is_embedding: bool = False) -> None:
    tuned = tuning.defaults(META)
    shrinking, expanding = tuned.tiles("shrink", num_in, dtype), tuned.tiles("expand", num_out, dtype)
    tasks, row_ids = tensor(16, 3, dtype=I32), tensor(T, dtype=I32)
    parts, table = tensor(num_parts, 4, dtype=I64), tensor(64, 225, 5, dtype=I64)
    if is_embedding:
        h = tensor(T, dtype=I64)
    else:
        h = lora.shrink_rows(tensor(T, num_in, dtype=dtype), tasks, row_ids, parts, table, 792, shrinking)
    lora.expand_rows(
        h, tensor(T, num_out * num_parts, dtype=dtype), tasks, row_ids, parts, table, [num_out] * num_parts, 792,
        num_out % 16 == 0, shrinking[1], expanding,
    )  # fmt: skip


def add_sums(dtype: torch.dtype, num_in: int, num_out: int, num_parts: int, is_embedding: bool = False) -> None:
    tuned = tuning.defaults(META)
    shrinking, expanding = tuned.tiles("shrink", num_in, dtype), tuned.tiles("expand", num_out, dtype)
    tasks, row_ids, sums = tensor(16, 3, dtype=I32), tensor(T, dtype=I32), tensor(8, int(lora.SUM), dtype=I32)
    parts, table = tensor(num_parts, 4, dtype=I64), tensor(64, 225, 5, dtype=I64)
    h = tensor(T, dtype=I64)
    if not is_embedding:
        x = tensor(T, num_in, dtype=dtype)
        h = lora.shrink_sums_rows(x, tasks, row_ids, parts, table, sums, 792, shrinking)
    lora.expand_sums_rows(
        h, tensor(T, num_out * num_parts, dtype=dtype), tasks, row_ids, parts, table, sums, [num_out] * num_parts, 792,
        shrinking[1], expanding,
    )  # fmt: skip


def heads(dtype: torch.dtype, num_in: int, num_out: int) -> None:
    table, tasks = tensor(64, MOST_HEADS, int(medusa.ENTRY), dtype=I64), tensor(8, 4, dtype=I32)
    places, x = tensor(T, dtype=I32), tensor(3 * T, num_in, dtype=dtype)
    medusa.add_drafts(x, tasks, places, places, table, T, 1, tuning.defaults(META).tiles("head_block", num_in, dtype))
    logits, tiles = tensor(2 * T, num_out, dtype=dtype), tuning.defaults(META).tiles("head_logits", num_in, dtype)
    medusa.put_head_logits(x, logits, tasks, places, table, T, tiles)


def experts(dtype: torch.dtype, num_rows: int, is_transposed: bool) -> None:
    matrices = tensor(8, 4096, 14336, dtype=dtype)
    if is_transposed:
        matrices = tensor(8, 14336, 4096, dtype=dtype).transpose(1, 2)
    products_triton.multiply_tasks(tensor(T, 4096, dtype=dtype), matrices, tensor(16, 3, dtype=I32), num_rows)


def eight_bits(dtype: torch.dtype, kind: torch.dtype) -> None:
    weight, scales = tensor(14336, 4096, dtype=kind), tensor(14336, dtype=FP32)
    eight_bits_triton.multiply(tensor(T, 4096, dtype=dtype), weight, scales, None)


def four_bits(dtype: torch.dtype) -> None:
    weight, scales = tensor(7168, 4096, dtype=torch.uint8), tensor(14336, 4096 // 64, dtype=dtype)
    four_bits_triton.multiply(tensor(T, 4096, dtype=dtype), weight, scales, scales, None)


def integers(dtype: torch.dtype, bits: int, group: int, has_minimums: bool, is_exact: bool) -> None:
    """The narrowest and the widest tiles of a product, and the dequantised weight."""
    size = device_integers.slice_of(bits, group)
    for num_out, num_rows in ((4096, 8), (28672, 64)):
        words = tensor(4096 * bits // 16 // size, num_out, size, dtype=torch.int16)
        scales = tensor(4096 // group if group else 1, num_out, dtype=FP32)
        minimums, counters = scales if has_minimums else None, integers_triton.counters_of(words)
        form = bits, group, is_exact
        x = tensor(num_rows, 4096, dtype=dtype)
        integers_triton.multiply(x, words, scales, minimums, None, counters, *form)
    integers_triton.dequantise(words, scales, minimums, dtype, 0, num_out, 4096, *form)


def norms(dtype: torch.dtype, width: int) -> None:
    x, weight = tensor(T, width, dtype=dtype), tensor(width, dtype=dtype)
    fused.rms_norm(x, weight, 1e-6, 0.0, True)
    fused.add_rms_norm(x, x, weight, 1e-6, 0.0, True)
    adapters = tensor(T + 1, dtype=I32), tensor(64, 256, 5, dtype=I64), 3
    fused.rms_norm(x, weight, 1e-6, 0.0, True, *adapters)
    fused.add_rms_norm(x, x, weight, 1e-6, 0.0, True, *adapters)


def rotary(dtype: torch.dtype, dim: int, width: int, has_norms: bool, stores: bool = True) -> None:
    cos, weight = tensor(T, width, dtype=dtype), tensor(dim, dtype=dtype) if has_norms else None
    pool = tensor(PAGES, PAGE, 8, dim, dtype=dtype)
    place = (tensor(T, dtype=I64), pool, pool) if stores else (None, None, None)
    fused.rotate(tensor(T, 48 * dim, dtype=dtype), cos, cos, [32, 8, dim], weight, weight, *place, 1e-6, 0.0, True)


def sample(dtype: torch.dtype, is_captured: bool) -> None:
    rows, shape = tensor(T, dtype=I64), (T, 128256)
    tables = tensor(256, 8, dtype=I64), tensor(256, 8, dtype=FP32), tensor(1, dtype=I64), tensor(256, dtype=I64)
    outputs = rows, *(tensor(T, dtype=kind) for kind in (torch.uint8, torch.uint8, FP32))
    kept = tensor(*shape, dtype=FP32) if is_captured else None
    sampling.sample_rows(tensor(*shape, dtype=dtype), rows, rows, rows, *tables, *outputs, kept, True, True)


def look_up() -> None:
    texts = Texts(
        tensor(256, BLOCK, dtype=I32), tensor(256, dtype=I64), tensor(len(SOURCES), 256, MOST_DRAFTS, dtype=I64),
        tensor(256, dtype=I64), tensor(256, dtype=I64),
    )  # fmt: skip
    ids, bad, report = tensor(T, dtype=I64), tensor(T, dtype=torch.uint8), tensor(T, MOST_DRAFTS + 1, dtype=I64)
    lookup_triton.propose(texts, Emitted(tensor(6, T, dtype=I64), ids, bad, ids, report), range(1, 9))


def move_numbers(dtype: torch.dtype, chooses: bool) -> None:
    ids = tensor(T, dtype=I64)
    device_tokens_triton.move(tensor(T, dtype=dtype), ids, ids, T, chooses)


INTEGERS = {
    "int8": (8, 0, False, True),
    "int4, groups of 128": (4, 128, False, True),
    "int4, groups of 32, minimums": (4, 32, True, False),
}
"""Bits, inputs of a group, whether there are minimums, and whether scales are numbers of the dtype."""
TURING, AMPERE, ADA, NEWEST = (7, 5), (8, 0), (8, 9), (12, 0)


def _variants() -> Iterator[Variant]:
    for layer in LAYERS:
        span = (
            (TURING, TURING) if layer.dtype == FP16 else (AMPERE, NEWEST) if layer.dtype == BF16 else (TURING, NEWEST)
        )
        if layer.kv_dtype is not None:
            span = ADA, NEWEST
        yield Variant(layer.name, layer.attend, *span)
        yield Variant(layer.name, layer.store, *span)
    for dtype, name, span in ((BF16, "", (AMPERE, NEWEST)), (FP16, " float16", (TURING, TURING))):
        yield Variant(f"adapters{name}", lambda dtype=dtype: adapt(dtype, 4096, 4096, 3), *span)
        yield Variant(f"adapters, odd sizes{name}", lambda dtype=dtype: adapt(dtype, 4095, 4095, 1), *span)
        yield Variant(f"adapters of embeddings{name}", lambda dtype=dtype: adapt(dtype, 1, 4096, 1, True), *span)
        yield Variant(f"sums of adapters{name}", lambda dtype=dtype: add_sums(dtype, 4096, 4096, 3), *span)
        yield Variant(f"sums of adapters, odd sizes{name}", lambda dtype=dtype: add_sums(dtype, 4095, 4095, 1), *span)
        call = lambda dtype=dtype: add_sums(dtype, 1, 4096, 1, True)
        yield Variant(f"sums of adapters of embeddings{name}", call, *span)
        yield Variant(f"Medusa heads{name}", lambda dtype=dtype: heads(dtype, 4096, 128256), *span)
        sizes = {products_triton.FEW_ROWS, products_triton.MANY_ROWS if dtype == BF16 else products_triton.FEW_ROWS}
        for rows in sorted(sizes):
            for way in (False, True):
                call = lambda dtype=dtype, rows=rows, way=way: experts(dtype, rows, way)
                yield Variant(f"experts, tiles of {rows}{', transposed' if way else ''}{name}", call, *span)
        yield Variant(f"norms{name}", lambda dtype=dtype: norms(dtype, 4096), *span)
        yield Variant(f"gate{name}", lambda dtype=dtype: fused.gate(tensor(T, 2 * 14336, dtype=dtype), False), *span)
        yield Variant(f"rotary{name}", lambda dtype=dtype: rotary(dtype, 128, 128, False), *span)
        yield Variant(f"rotary with norms{name}", lambda dtype=dtype: rotary(dtype, 128, 64, True), *span)
    for kind in (FP8, torch.int8):
        name = "fp8" if kind == FP8 else "int8"
        yield Variant(f"weights in {name}", lambda kind=kind: eight_bits(BF16, kind), AMPERE)
        yield Variant(f"weights in {name} float16", lambda kind=kind: eight_bits(FP16, kind), TURING, TURING)
    for dtype, name, span in ((BF16, "", (AMPERE, NEWEST)), (FP16, " float16", (TURING, TURING))):
        yield Variant(f"weights in 4 bits{name}", lambda dtype=dtype: four_bits(dtype), *span)
        for label, form in INTEGERS.items():
            yield Variant(f"{label}{name}", lambda dtype=dtype, form=form: integers(dtype, *form), *span)
    yield Variant("norms float32", lambda: norms(FP32, 4096))
    yield Variant("rotary float32", lambda: rotary(FP32, 128, 128, False))
    yield Variant("rotary, K and V in fp8", lambda: rotary(BF16, 128, 128, False, stores=False), ADA)
    yield Variant(
        "masks of grammars", lambda: grammars.mask_rows(tensor(T, 128256, dtype=FP32), tensor(9, 4009, dtype=I32))
    )
    yield Variant("sampling", lambda: sample(FP32, is_captured=False))
    yield Variant("sampling in graphs", lambda: sample(BF16, is_captured=True), AMPERE)
    yield Variant("sampling in graphs float16", lambda: sample(FP16, is_captured=True), TURING, TURING)
    yield Variant("prompt lookup", look_up)
    ids = lambda: tensor(T, dtype=I64)
    put = lambda: device_tokens_triton.put_device_tokens(ids(), tensor(T, dtype=I32), ids())
    yield Variant("tokens of the device", put)
    for dtype, chooses in ((I64, False), (I32, False), (I64, True)):
        label = "KV slots" if chooses else str(dtype).removeprefix("torch.")
        yield Variant(
            f"numbers that accepted drafts move, {label}",
            lambda dtype=dtype, chooses=chooses: move_numbers(dtype, chooses),
        )
    keys = lambda: tensor(T, dtype=I32)
    yield Variant("experts' tasks", lambda: pairs_triton.split_keys(keys(), 2, 0, 16, 12))
    yield Variant("experts' tasks with adapters", lambda: pairs_triton.split_keys(keys(), 9, 64, 16, 12))


VARIANTS = list(_variants())


def launches(variant: Variant) -> tuple[list[Launch], dict[str, object]]:
    """The launches of a variant, and its kernels by name."""
    with recorded() as found:
        variant.call()
    return found.launches, found.kernels
