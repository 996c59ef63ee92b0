"""The paged kernels against the reference. test_paged.py runs these cases in a separate process, on CUDA or, with
TRITON_INTERPRET=1, on CPU.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorikeet.shard.attention import AttentionBackend, AttentionSpec, paged
from lorikeet.shard.attention.base import PagedKV
from lorikeet.shard.attention.by_length import ByLengthAttention
from lorikeet.shard.attention.kernel_limits import KernelLimits, Limit
from lorikeet.shard.attention.layerwise import LayerwiseAttention
from lorikeet.shard.attention.paged import PagedAttention
from lorikeet.shard.attention.reference import FP8, ReferenceAttention, dequantize, quantize
from lorikeet.shard.attention.spans import spans_at
from lorikeet.shard.attention.varlen import MOST_COPIED, CopiedKeysAttention, VarlenAttention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.loader import read_config
from lorikeet.shard.model.probe import probe
from tests import tiny
from tests.shard.attention.test_varlen import by_sdpa, written_out
from tests.shard.padded import Always

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
PAGE = 64
SPAN = 64
NUM_PAGES = 16
BFLOAT16, FLOAT32, FLOAT16 = torch.bfloat16, torch.float32, torch.float16
TOLERANCE = {BFLOAT16: 2**-6, FLOAT16: 2**-9, FLOAT32: 1e-5}
SPECS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "grouped": ((4, 2, 16, 16), {}),
    "one head each": ((2, 2, 32, 32), {}),
    "one kv head": ((5, 1, 16, 16), {}),
    "odd sizes": ((2, 1, 24, 40), {}),
    "large head": ((2, 1, 136, 256), {}),
    "window": ((2, 1, 16, 16), {"window": 7}),
    "window beyond a span": ((2, 2, 16, 16), {"window": 100}),
    "soft cap": ((4, 2, 16, 16), {"softcap": 5.0}),
    "sinks": ((4, 2, 16, 16), {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window": 40}),
    "alibi": ((3, 3, 16, 16), {"alibi_slopes": torch.tensor([0.5, 0.25, 0.01])}),
    "large group": ((71, 1, 16, 16), {}),
    "a tile ends in a group": ((13, 1, 16, 16), {}),
    "Llama 3.1 8B": ((32, 8, 128, 128), {}),
    "Llama 3.2 1B": ((32, 8, 64, 64), {}),
    "Qwen2.5 7B": ((28, 4, 128, 128), {}),
    "Gemma 2 9B": ((16, 8, 256, 256), {"softcap": 50.0, "window": 100}),
}

LONG, SHORT, THIRD = [5, 9, 2], [7, 1], [3, 4]
STEPS: dict[str, list[tuple[int, int, list[int]]]] = {
    "tokens": [(170, 1, LONG), (6, 1, SHORT)],
    "drafts": [(171, 4, LONG), (62, 4, SHORT)],
    "prompts": [(0, 11, LONG), (60, 17, SHORT)],
    "all": [(175, 4, LONG), (70, 1, SHORT), (0, 9, THIRD)],
}
"""Start, tokens and pages of each segment; the positions before its start hold random K and V."""


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter copies every argument."""
    monkeypatch.setattr(paged, "PARTIAL_FLOATS", 1 << 17)


def spec_of(name: str) -> AttentionSpec:
    (heads, kv_heads, key_dim, value_dim), options = SPECS[name]
    options = {key: value.to(DEVICE) if torch.is_tensor(value) else value for key, value in options.items()}
    return AttentionSpec(heads, kv_heads, key_dim, value_dim, key_dim**-0.5, **options)


@dataclass
class Rows:
    """Inputs of attention. query: [T, heads, D], key, value: [T, kv_heads, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def part(self, start: int, count: int) -> "Rows":
        return Rows(*(x[start : start + count] for x in (self.query, self.key, self.value)))


def draw(spec: AttentionSpec, length: int, dtype: torch.dtype, seed: int = 0) -> Rows:
    """In the memory order of modules: heads before tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((spec.num_heads, spec.key_dim), (spec.num_kv_heads, spec.key_dim), (spec.num_kv_heads, spec.value_dim))
    return Rows(*(torch.randn(heads, length, dim, generator=generator).to(DEVICE, dtype).transpose(0, 1)
                  for heads, dim in sizes))  # fmt: skip


class Runner:
    """A backend with memory for one layer."""

    def __init__(self, backend: AttentionBackend, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self.backend, self.spec = backend, spec
        self.kv = backend.allocate(spec, NUM_PAGES, dtype, DEVICE)
        self.inputs = StepInputs(backend.page_size, DEVICE)

    def pad(self, bounds: Bounds) -> None:
        self.inputs.num_attention_numbers = self.backend.num_numbers
        self.inputs.pad(Always(bounds))

    def fill(self, segments: list[Segment]) -> None:
        total = sum(segment.num_tokens for segment in segments)
        ids = torch.zeros(total, dtype=torch.long, device=DEVICE)
        self.inputs.fill(segments, ids, ids[:1])
        self.backend.prepare(self.inputs)
        self.inputs.send()

    def step(self, *parts: tuple[int, list[int], Rows]) -> list[torch.Tensor]:
        """Start, pages and rows of each segment. Returns [rows, heads, D] of each."""
        segments = [Segment(start, len(rows.query), pages) for start, pages, rows in parts]
        self.fill(segments)
        rows = Rows(*(torch.cat([getattr(rows, name) for *_, rows in parts]) for name in ("query", "key", "value")))
        output = self.backend.attend(self.spec, self.kv, rows.query, rows.key, rows.value)
        return list(output.split([segment.num_tokens for segment in segments]))

    def remember(self) -> "Runner":
        """Fill every slot with random K and V, the same for every backend and page size."""
        for seed, name in enumerate(("keys", "values")):
            generator = torch.Generator().manual_seed(seed)
            pool, scales = getattr(self.kv, name), getattr(self.kv, f"{name[:-1]}_scales")
            x = torch.randn(pool.shape[-3:] if pool.dim() < 4 else (pool.shape[0] * pool.shape[1], *pool.shape[2:]),
                            generator=generator).to(DEVICE)  # fmt: skip
            if scales is not None:
                x, scale = quantize(x)
                scales.copy_(scale.view(scales.shape))
            pool.copy_(x.view(pool.shape))
        return self


def ours(spec: AttentionSpec, dtype: torch.dtype, programs: int = 3, **options: Any) -> Runner:
    backend = PagedAttention(options.pop("page_size", PAGE), span=SPAN, num_programs=programs, **options)
    return Runner(backend, spec, dtype)


def agree(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, steps: tuple[str, ...] = ("all",)
) -> None:
    spec = spec_of(name)
    both = [ours(spec, dtype, kv_dtype=kv_dtype), Runner(ReferenceAttention(PAGE, kv_dtype), spec, dtype)]
    for step in steps:
        segments = [(start, pages, draw(spec, count, dtype, start)) for start, count, pages in STEPS[step]]
        found, wanted = (torch.cat(runner.remember().step(*segments)).float() for runner in both)
        allowed = TOLERANCE[BFLOAT16 if kv_dtype and dtype == FLOAT16 else dtype]
        torch.testing.assert_close(found, wanted, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("name", SPECS)
def test_agrees_with_the_reference(name: str) -> None:
    """Draft tokens to verify, a single token and the start of a prompt in one step."""
    agree(name, BFLOAT16)


@pytest.mark.parametrize("step", STEPS)
def test_every_step_agrees(step: str) -> None:
    agree("grouped", BFLOAT16, steps=(step,))


@pytest.mark.parametrize("name", ["grouped", "sinks", "soft cap"])
def test_agrees_in_float32(name: str) -> None:
    agree(name, FLOAT32)


def test_agrees_in_float16() -> None:
    agree("grouped", FLOAT16)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
def test_agrees_with_k_and_v_in_eight_bits(dtype: torch.dtype) -> None:
    agree("sinks", dtype, FP8)


def test_equal_bits_however_programs_share_spans() -> None:
    """One program computes all spans of a tile, or each program one and the last merges them: the bits are equal."""
    spec = replace(spec_of("sinks"), window=None)
    rows, other = draw(spec, 5, BFLOAT16), draw(spec, 2, BFLOAT16, 1)
    outputs = []
    for programs, num_folds in ((1, 0), (1000, 1)):
        runner = ours(spec, BFLOAT16, programs).remember()
        outputs.append(torch.cat(runner.step((170, LONG, rows), (0, SHORT, other))))
        assert isinstance(runner.backend, PagedAttention)
        assert runner.backend._tables.num_folds == [num_folds]
    assert torch.equal(*outputs)


def test_short_and_long_spans_agree_however_they_are_shared() -> None:
    """The first positions are in shorter spans than later ones."""
    spec = replace(spec_of("grouped"), window=None)
    span, pages = 128, [5, 9, 2, 11, 0, 8, 13]
    assert list(spans_at(np.array([255, 256, 383, 384]), span)) == [3, 4, 4, 5]
    rows = draw(spec, 2, BFLOAT16)
    segments = [(start, pages, rows.part(at, 1)) for at, start in enumerate((140, 430))]
    reference = Runner(ReferenceAttention(PAGE), spec, BFLOAT16).remember()
    wanted = torch.cat(reference.step(*segments)).float()
    outputs = []
    for programs in (1, 1000):
        runner = Runner(PagedAttention(PAGE, span=span, num_programs=programs), spec, BFLOAT16).remember()
        outputs.append(torch.cat(runner.step(*segments)))
        torch.testing.assert_close(outputs[-1].float(), wanted, rtol=TOLERANCE[BFLOAT16], atol=TOLERANCE[BFLOAT16])
    assert torch.equal(*outputs)


def test_memory_for_spans_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile without memory for its spans is computed by one program."""
    spec = spec_of("grouped")
    monkeypatch.setattr(paged, "PARTIAL_FLOATS", (3 + 1) * spec.group * spec.num_kv_heads * 16)
    rows = draw(spec, 2, BFLOAT16)
    segments = (170, LONG, rows.part(0, 1)), (100, SHORT, rows.part(1, 1))
    [wanted] = {torch.cat(ours(spec, BFLOAT16, 1).remember().step(*segments))}
    runner = ours(spec, BFLOAT16, 1000)
    assert torch.equal(torch.cat(runner.remember().step(*segments)), wanted)
    assert isinstance(runner.backend, PagedAttention) and runner.backend._tables.num_folds == [1]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("grouped", FP8), ("window beyond a span", None), ("a tile ends in a group", None), ("sinks", None)],
)
def test_equal_bits_alone_in_chunks_and_in_any_batch(name: str, kv_dtype: torch.dtype | None) -> None:
    spec = spec_of(name)
    rows, other = draw(spec, 6, BFLOAT16), draw(spec, 5, BFLOAT16, 1)
    alone = ours(spec, BFLOAT16, 1, kv_dtype=kv_dtype).remember().step((125, LONG, rows))[0]
    runner = ours(spec, BFLOAT16, 100, kv_dtype=kv_dtype).remember()
    start, parts = 0, []
    for size in (4, 1, 1):
        parts.append(runner.step((62, [0, 1], other), (125 + start, LONG, rows.part(start, size)))[1])
        start += size
    assert torch.equal(torch.cat(parts), alone)


def test_equal_bits_for_any_page_size() -> None:
    spec = spec_of("grouped")
    outputs = []
    for size, long, short in ((PAGE, [4, 5, 6], [2, 3]), (2 * PAGE, [2, 3], [1])):
        runner = ours(spec, BFLOAT16, page_size=size).remember()
        segments = [(170, long, draw(spec, 1, BFLOAT16)), (70, short, draw(spec, 4, BFLOAT16, 1))]
        outputs.append(torch.cat(runner.step(*segments)))
    assert torch.equal(*outputs)


def test_segments_share_pages() -> None:
    """Two requests with a common prefix, whose page is in memory once."""
    spec = spec_of("grouped")
    rows = draw(spec, 6, BFLOAT16)
    step = (100, [3, 4], rows.part(0, 1)), (64, [3, 8], rows.part(1, 5))
    both = ours(spec, BFLOAT16), Runner(ReferenceAttention(PAGE), spec, BFLOAT16)
    found, wanted = (torch.cat(runner.remember().step(*step)) for runner in both)
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("stale", [float("nan"), float("inf")])
def test_stale_memory_has_no_effect(stale: float) -> None:
    spec = spec_of("grouped")
    rows = draw(spec, 20, BFLOAT16)
    outputs = []
    for memory in (0.0, stale):
        runner = ours(spec, BFLOAT16)
        assert isinstance(runner.kv, PagedKV)
        runner.kv.keys.fill_(memory)
        runner.kv.values.fill_(memory)
        outputs.append(torch.cat([runner.step((0, LONG, rows.part(0, 5)))[0],
                                  runner.step((5, LONG, rows.part(5, 15)))[0]]))  # fmt: skip
    assert outputs[0].isfinite().all() and torch.equal(*outputs)


def test_eight_bits_are_stored_as_by_the_reference() -> None:
    spec = spec_of("odd sizes")
    runner = ours(spec, BFLOAT16, kv_dtype=FP8)
    rows = draw(spec, 6, BFLOAT16)
    rows.key[3] = 0
    runner.step((0, SHORT, rows))
    kv = runner.kv
    assert isinstance(kv, PagedKV) and kv.key_scales is not None and kv.value_scales is not None
    for pool, scales, x in ((kv.keys, kv.key_scales, rows.key), (kv.values, kv.value_scales, rows.value)):
        kept, scale = quantize(x)
        assert torch.equal(pool[SHORT[0], :6].view(torch.uint8), kept.view(torch.uint8))
        assert torch.equal(scales[SHORT[0], :6], scale)
        assert ((dequantize(kept, scale) - x.float()).abs() <= x.float().abs() / 16 + scale[..., None] * 2**-9).all()


def test_eight_bits_take_half_the_memory() -> None:
    spec = AttentionSpec(32, 8, 128, 128, 1.0)
    plain, small = (PagedAttention(PAGE, kv_dtype).page_bytes(spec, BFLOAT16) for kv_dtype in (None, FP8))
    assert plain == PAGE * 8 * 256 * 2 and small == PAGE * 8 * (256 + 8)


def test_under_bounds_shapes_addresses_and_grids_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a captured graph sees it: launches stay the same, and read the latest metadata."""
    spec = spec_of("grouped")
    runner, reference = ours(spec, BFLOAT16, programs=5), Runner(ReferenceAttention(PAGE), spec, BFLOAT16)
    runner.pad(Bounds(num_rows=8, max_kv_len=4 * PAGE))
    for each in (runner, reference):
        each.remember()
    launches: list[list[object]] = []
    launch = paged.attend_paged

    def recorded(*arguments: Any) -> None:
        seen = [(x.shape, x.stride()) if torch.is_tensor(x) else x for x in arguments]
        seen += [x.data_ptr() for x in arguments[1:10] if torch.is_tensor(x)]
        launches.append(seen)
        launch(*arguments)

    monkeypatch.setattr(paged, "attend_paged", recorded)
    plans = (
        [Segment(170, 1, LONG), Segment(3, 1, SHORT), Segment(0, 6, [0])],
        [Segment(171, 4, LONG), Segment(0, 4, [0])],
        [Segment(175, 1, LONG), Segment(4, 1, SHORT), *(Segment(0, 1, [page]) for page in (10, 11, 12, 13, 14, 15))],
    )
    for step, plan in enumerate(plans):
        x = draw(spec, 8, BFLOAT16, 2 + step)
        runner.fill(plan)
        found = runner.backend.attend(spec, runner.kv, x.query, x.key, x.value)
        reference.fill(plan)
        wanted = reference.backend.attend(spec, reference.kv, x.query, x.key, x.value)
        torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)
    assert launches[0] == launches[1] == launches[2]


def test_a_step_beyond_its_bounds_is_an_error() -> None:
    runner = ours(spec_of("grouped"), BFLOAT16)
    runner.pad(Bounds(num_rows=9, max_kv_len=PAGE))
    with pytest.raises(RuntimeError, match="are reserved"):
        runner.fill([Segment(8 * PAGE, 1, range(9)) for _ in range(9)])


def test_unsupported_layers_are_rejected() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        PagedAttention(16)
    with pytest.raises(ValueError, match="does not support heads of 512"):
        PagedAttention().allocate(AttentionSpec(1, 1, 512, 512, 1.0), 1, BFLOAT16, DEVICE)
    with pytest.raises(ValueError, match="float64"):
        PagedAttention().allocate(AttentionSpec(1, 1, 16, 16, 1.0), 1, torch.float64, DEVICE)


def test_a_whole_network_agrees_with_transformers(tmp_path: Path) -> None:
    """Soft caps, windows and groups, packed and in chunks."""
    folder = tiny.make("gemma2", tmp_path)
    config = ShardConfig("tiny", str(folder), "unix:unused", device=str(DEVICE), attention="triton")
    probe(config, read_config(config))


BY_LENGTH: dict[str, list[tuple[int, int, list[int]]]] = {
    "short segments": [(3, 1, [5]), (0, 4, [7])],
    "long segments": [(0, 9, [5]), (6, 5, [7])],
    "both": [(4, 1, [5]), (0, 11, [9]), (11, 3, [7]), (2, 6, [2]), (20, 6, [3]), (20, 7, [4])],
}
LIMITS = KernelLimits((Limit(20, 4), Limit(None, 6)))


def flash(is_copied: bool) -> VarlenAttention:
    return CopiedKeysAttention(256, by_sdpa) if is_copied else VarlenAttention(256, written_out)


def by_length(is_copied: bool = False) -> ByLengthAttention:
    return ByLengthAttention(PagedAttention(256, num_programs=3), flash(is_copied), LIMITS)


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_by_length_each_row_is_computed_by_the_kernel_of_its_segment(name: str, is_copied: bool) -> None:
    spec = AttentionSpec(4, 2, 16, 16, 0.25)
    paged_only, varlen_only = PagedAttention(256, num_programs=3), flash(is_copied)
    both = by_length(is_copied)
    segments = [Segment(start, count, pages) for start, count, pages in BY_LENGTH[name]]
    total = sum(segment.num_tokens for segment in segments)
    rows, outputs = draw(spec, total, BFLOAT16), []
    for backend in (paged_only, varlen_only, both):
        runner = Runner(backend, spec, BFLOAT16)
        assert isinstance(runner.kv, PagedKV)
        before = torch.randn(runner.kv.keys.shape, generator=torch.Generator().manual_seed(3))
        runner.kv.keys.copy_(before)
        runner.kv.values.copy_(before.flip(0))
        runner.fill(segments)
        outputs.append(backend.attend(spec, runner.kv, rows.query, rows.key, rows.value))
    first = 0
    for segment in segments:
        own = slice(first, first + segment.num_tokens)
        of_kernel = outputs[1] if segment.num_tokens > (4 if segment.kv_len <= 20 else 6) else outputs[0]
        assert torch.equal(outputs[2][own], of_kernel[own])
        first = own.stop
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("most_copied", [MOST_COPIED, 12])
@pytest.mark.parametrize("is_copied", [False, True])
def test_by_length_a_prompt_in_chunks_of_both_kernels_agrees(
    is_copied: bool, most_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of which one chunk is long and others are short, next to another request, against the reference."""
    spec = AttentionSpec(4, 2, 16, 16, 0.25)
    monkeypatch.setattr(CopiedKeysAttention, "most_context", most_copied)
    prompt, other = draw(spec, 18, BFLOAT16), draw(spec, 3, BFLOAT16, 1)
    outputs = []
    for backend in (by_length(is_copied), ReferenceAttention(256)):
        runner, start, parts = Runner(backend, spec, BFLOAT16), 0, []
        for step, size in enumerate((9, 4, 5)):
            both = (start, [5], prompt.part(start, size)), (step, [7], other.part(step, 1))
            parts += runner.step(*both)
            start += size
        outputs.append(torch.cat(parts).float())
    torch.testing.assert_close(*outputs, rtol=TOLERANCE[BFLOAT16], atol=TOLERANCE[BFLOAT16])


def test_by_length_padded_steps_are_the_paged_kernel_s() -> None:
    runner = Runner(by_length(), AttentionSpec(4, 2, 16, 16, 0.25), BFLOAT16)
    runner.pad(Bounds(4, 256))
    runner.fill([Segment(0, 4, [1])])
    assert isinstance(runner.backend, ByLengthAttention) and runner.backend._flash_rows is None
    runner.pad(Bounds(8, 256))
    with pytest.raises(RuntimeError, match="padded to 8 rows, but only up to 4 rows"):
        runner.fill([Segment(0, 5, [1])])


@pytest.mark.parametrize("name", ["grouped", "window", "window beyond a span", "alibi", "sinks"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_accepted_drafts_move_segments_on_the_device(name: str, is_padded: bool) -> None:
    """Bits are those of segments whose positions the host knows, whatever number of drafts was accepted."""
    spec = spec_of(name)
    places = [(125, 1, LONG, 5), (61, 4, SHORT, 3), (120, 3, THIRD, 4), (0, 9, [10], 0), (40, 1, [11], 0)]
    total = sum(count for _, count, *_ in places)
    rows = draw(spec, 32 if is_padded else total, FLOAT32)
    for accepted in ((0, 0, 0), (5, 3, 4), (2, 3, 1), (3, 2, 2)):
        known, moved = (ours(spec, FLOAT32).remember() for _ in range(2))
        moved.inputs.adds_on_device = True
        moved.inputs.num_accepted = torch.tensor([9, *accepted], device=DEVICE)
        added = [*accepted, 0, 0]
        segments = [
            [Segment(start + more, count, pages) for (start, count, pages, _), more in zip(places, added, strict=True)],
            [
                Segment(start, count, pages, num_uncertain=most, device_row=1 + index if most else -1)
                for index, (start, count, pages, most) in enumerate(places)
            ],
        ]
        found = []
        for runner, each in zip((known, moved), segments, strict=True):
            if is_padded:
                runner.pad(Bounds(32, 256))
            runner.fill(each)
            found.append(runner.backend.attend(spec, runner.kv, rows.query, rows.key, rows.value)[:total])
        assert torch.equal(known.inputs.position_ids, moved.inputs.position_ids)
        assert torch.equal(known.inputs.kv_slots, moved.inputs.kv_slots)
        assert torch.equal(known.inputs.next_positions, moved.inputs.next_positions)
        assert torch.equal(*found), accepted
        assert isinstance(known.kv, PagedKV) and isinstance(moved.kv, PagedKV)
        assert torch.equal(known.kv.keys, moved.kv.keys)


def test_by_length_each_kernel_is_verified_at_start() -> None:
    """Also one that the table chooses for none of the trial steps."""

    def wrong(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.ones_like(query)

    paged_only = KernelLimits((Limit(None, 10**6),))
    both = ByLengthAttention(PagedAttention(256, num_programs=3), VarlenAttention(256, wrong), paged_only)
    layerwise = LayerwiseAttention([both, ReferenceAttention(256)])
    reason = layerwise.verify_backend(both, AttentionSpec(2, 1, 16, 16, 0.25), BFLOAT16, DEVICE)
    assert "VarlenAttention is off by" in reason
