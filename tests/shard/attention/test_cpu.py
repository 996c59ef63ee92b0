"""The compiled CPU attention against the reference, and equal bits in any chunks and batches.

Bfloat16 runs twice: as fast as this processor can, and without products of pairs, as on processors without them.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lorikeet.shard.attention import AttentionBackend, AttentionSpec
from lorikeet.shard.attention.cpu import CpuAttention
from lorikeet.shard.attention.reference import ReferenceAttention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.segments import Segment

LENGTH = 150
PAGES = [5, 9, 2, 30, 31]
ROUNDING = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
DEVICE = torch.device("cpu")
SPECS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "grouped": ((16, 4, 64, 64), {}),
    "one head each": ((4, 4, 8, 8), {}),
    "odd sizes": ((6, 2, 24, 40), {}),
    "window": ((4, 1, 80, 80), {"window": 7}),
    "window beyond a page": ((4, 1, 16, 16), {"window": 45}),
    "soft cap": ((8, 2, 128, 128), {"softcap": 5.0}),
    "sinks": ((4, 2, 16, 16), {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window": 40}),
    "alibi": ((4, 4, 16, 16), {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.01])}),
    "large group": ((12, 1, 32, 32), {}),
    "odd head size": ((6, 2, 25, 19), {}),
    "head size of one": ((2, 1, 1, 1), {"window": 33}),
    **{f"group of {group}": ((2 * group, 2, 16, 16), {}) for group in range(1, 9)},
}


@dataclass(frozen=True)
class Kind:
    """A variant of the kernel: its dtype, and whether it may use products of pairs."""

    dtype: torch.dtype
    paired: bool = True

    def backend(self, page_size: int = 32) -> CpuAttention:
        return CpuAttention(self.dtype, page_size, paired=self.paired)


KINDS = {"float32": Kind(torch.float32), "bfloat16": Kind(torch.bfloat16), "unpaired": Kind(torch.bfloat16, False)}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_spec = pytest.mark.parametrize("name", SPECS)
each_page_size = pytest.mark.parametrize("page_size", [32, 64])


@dataclass
class Rows:
    """One request's rows. query: [L, heads, D], key and value: [L, kv_heads, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def part(self, start: int, count: int) -> "Rows":
        rows = slice(start, start + count)
        return Rows(self.query[rows], self.key[rows], self.value[rows])


def spec_of(name: str) -> AttentionSpec:
    (heads, kv_heads, key_dim, value_dim), options = SPECS[name]
    return AttentionSpec(heads, kv_heads, key_dim, value_dim, key_dim**-0.5, **options)


def random_rows(spec: AttentionSpec, length: int, dtype: torch.dtype, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(length, heads, dim, generator=generator).to(dtype)

    return Rows(draw(spec.num_heads, spec.key_dim), draw(spec.num_kv_heads, spec.key_dim),
                draw(spec.num_kv_heads, spec.value_dim))  # fmt: skip


class Runner:
    """A backend with memory for one layer."""

    def __init__(self, backend: AttentionBackend, spec: AttentionSpec, dtype: torch.dtype) -> None:
        self.backend, self.spec = backend, spec
        self.kv = backend.allocate(spec, 64, dtype, DEVICE)
        self.inputs = StepInputs(backend.page_size, DEVICE)

    def fill(self, segments: list[Segment]) -> None:
        total = sum(segment.num_tokens for segment in segments)
        self.inputs.fill(segments, torch.zeros(total, dtype=torch.long), torch.zeros(1, dtype=torch.long))
        self.backend.prepare(self.inputs)
        self.inputs.send()

    def step(self, parts: list[tuple[int, list[int], Rows]]) -> list[torch.Tensor]:
        """parts: start, pages and rows of each segment. Returns [rows, heads, D] of each."""
        segments = [Segment(start, len(rows.query), pages) for start, pages, rows in parts]
        self.fill(segments)
        query, key, value = (
            torch.cat([getattr(rows, name) for _, _, rows in parts]) for name in ("query", "key", "value")
        )
        output = self.backend.attend(self.spec, self.kv, query, key, value)
        return list(output.split([segment.num_tokens for segment in segments]))


def with_moments(rows: Rows) -> Rows:
    """In float32, with the values' squares and a column of ones appended, so that attention yields the means of all."""
    value = rows.value.float()
    return Rows(rows.query.float(), rows.key.float(), torch.cat([value, value**2, torch.ones_like(value)], -1))


def expected(moments: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's output and the largest error allowed. moments: [L, heads, 3 * D] of what `with_moments` made.

    Weights w_i that are rounded by relative errors d_i and then normalised by their own sum move the mean m by
    sum(p_i d_i (v_i - m)) with p_i = w_i / sum(w), so by at most ROUNDING times the mean distance from m, which is at
    most the root of the mean square distance. Rounding the output adds ROUNDING times itself.
    """
    mean, square, one = moments.chunk(3, -1)
    if dtype == torch.float32:
        return mean, torch.full_like(mean, 1e-5)
    # `one` is less than 1 by the weight of the sinks
    distance = ((square - 2 * mean * mean + one * mean**2).clamp(min=0) * one).sqrt()
    return mean, ROUNDING * 1.01 * (distance + mean.abs()) + 1e-5


def three_steps(long: Rows, short: Rows) -> list[list[tuple[int, list[int], Rows]]]:
    """Two prompts, a token with a chunk, and a chunk with a token: start, pages and rows of each."""
    return [
        [(0, PAGES, long.part(0, 101)), (0, [7, 1], short.part(0, 3))],
        [(101, PAGES, long.part(101, 1)), (3, [7, 1], short.part(3, 30))],
        [(102, PAGES, long.part(102, 48)), (33, [7, 1], short.part(33, 1))],
    ]


@each_page_size
@each_kind
@each_spec
def test_agrees_with_the_reference(name: str, kind: Kind, page_size: int) -> None:
    spec = spec_of(name)
    long, short = random_rows(spec, LENGTH, kind.dtype, 0), random_rows(spec, 40, kind.dtype, 1)
    ours = Runner(kind.backend(page_size), spec, kind.dtype)
    reference = Runner(ReferenceAttention(page_size), replace(spec, value_dim=3 * spec.value_dim), torch.float32)
    for segments in three_steps(long, short):
        wide = [(start, pages, with_moments(rows)) for start, pages, rows in segments]
        for output, moments in zip(ours.step(segments), reference.step(wide), strict=True):
            mean, allowed = expected(moments, kind.dtype)
            error = (output.float() - mean).abs()
            assert (error <= allowed).all(), f"{(error / allowed).max():.2f} times the rounding error"


@pytest.mark.parametrize("page_size", [32, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, id=f"{name}-{label}", marks=() if (row + column) % 3 == 0 else pytest.mark.long)
        for row, name in enumerate(SPECS)
        for column, (label, kind) in enumerate(KINDS.items())
    ],
)
def test_equal_bits_alone_in_chunks_and_in_any_batch(name: str, kind: Kind, page_size: int) -> None:
    spec = spec_of(name)
    rows, other = random_rows(spec, LENGTH, kind.dtype, 0), random_rows(spec, 70, kind.dtype, 1)
    alone = Runner(kind.backend(page_size), spec, kind.dtype).step([(0, PAGES, rows)])[0]
    for chunk in (1, 7, 33, 64):
        runner = Runner(kind.backend(page_size), spec, kind.dtype)
        parts = [
            runner.step([(0, [40, 41, 42], other), (start, PAGES, rows.part(start, chunk))])[1]
            for start in range(0, LENGTH, chunk)
        ]
        assert torch.equal(torch.cat(parts), alone), f"chunks of {chunk}"


@pytest.mark.parametrize("name", ["grouped", "large group"])
def test_equal_bits_on_any_number_of_threads(name: str) -> None:
    """The heads are a multiple of the threads or not, and there may be more threads than heads."""
    spec = spec_of(name)
    rows, other = (random_rows(spec, LENGTH, torch.bfloat16, seed) for seed in (0, 1))
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            runner = Runner(CpuAttention(torch.bfloat16), spec, torch.bfloat16)
            outputs.append(torch.cat(runner.step([(0, [10, 11, 12, 13, 14], other), (0, PAGES, rows)])))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@each_kind
def test_a_nan_of_one_request_does_not_reach_another(kind: Kind) -> None:
    spec = spec_of("grouped")
    rows, broken = random_rows(spec, 50, kind.dtype, 0), random_rows(spec, 50, kind.dtype, 1)
    broken.key[20] = float("nan")
    runner = Runner(kind.backend(), spec, kind.dtype)
    finite, broken_output = runner.step([(0, [0, 1], rows), (0, [2, 3], broken)])
    assert finite.isfinite().all()
    assert broken_output[:20].isfinite().all() and broken_output[20:].isnan().all()


@pytest.mark.parametrize("stale", [float("nan"), float("inf")])
@each_page_size
@each_kind
@pytest.mark.parametrize("name", ["grouped", "odd head size", "window beyond a page", "sinks", "group of 1"])
def test_stale_memory_has_no_effect(name: str, kind: Kind, page_size: int, stale: float) -> None:
    """Stale memory may follow the last position of a request, also in the second half of its pair."""
    spec = spec_of(name)
    rows = random_rows(spec, 70, kind.dtype, 0)
    for start, count in ((0, 1), (0, 32), (0, 33), (0, 69), (30, 1), (31, 1), (32, 1), (31, 4), (63, 2), (64, 1)):
        outputs = []
        for memory in (0.0, stale):
            runner = Runner(kind.backend(page_size), spec, kind.dtype)
            runner.kv.keys.fill_(memory)
            runner.kv.values.fill_(memory)
            if start > 0:
                runner.step([(0, PAGES, rows.part(0, start))])
            outputs.append(runner.step([(start, PAGES, rows.part(start, count))])[0])
        assert outputs[0].isfinite().all()
        assert torch.equal(*outputs), f"{count} from {start}"


@each_kind
def test_storing_a_position_keeps_the_other_of_its_pair(kind: Kind) -> None:
    """Positions stored one by one from the last to the first, and all at once."""
    spec = spec_of("odd head size")
    rows = random_rows(spec, 41, kind.dtype, 0)
    whole, single = (Runner(kind.backend(), spec, kind.dtype) for _ in range(2))
    whole.step([(0, PAGES, rows.part(0, 40))])
    for start in reversed(range(40)):
        single.step([(start, PAGES, rows.part(start, 1))])
    last = [(40, PAGES, rows.part(40, 1))]
    assert torch.equal(whole.step(last)[0], single.step(last)[0])


def test_unsupported_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="pages of a multiple of 32"):
        CpuAttention(torch.float32, 16)
    with pytest.raises(ValueError, match="float16"):
        CpuAttention(torch.float16)
