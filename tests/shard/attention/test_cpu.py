"""The compiled CPU attention against the written-out reference, and equal bits however a request is cut and packed."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shard.attention import AttentionBackend, AttentionSpec
from shard.attention.cpu import CpuAttention
from shard.attention.reference import ReferenceAttention
from shard.batch import Segment, StepInputs

P = 32
LENGTH = 150
PAGES = [5, 9, 2, 30, 31]
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
}


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
        self.inputs = StepInputs(P, DEVICE)

    def step(self, shares: list[tuple[int, list[int], Rows]]) -> list[torch.Tensor]:
        """shares: start, pages and rows of each segment. Returns [rows, heads, D] of each."""
        segments = [Segment(start, len(rows.query), pages) for start, pages, rows in shares]
        total = sum(segment.num_tokens for segment in segments)
        self.inputs.fill(segments, torch.zeros(total, dtype=torch.long), torch.zeros(1, dtype=torch.long))
        self.backend.prepare(self.inputs)
        query, key, value = (
            torch.cat([getattr(rows, name) for _, _, rows in shares]) for name in ("query", "key", "value")
        )
        output = self.backend.attend(self.spec, self.kv, query, key, value)
        return list(output.split([segment.num_tokens for segment in segments]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    spec = spec_of(name)
    long, short = random_rows(spec, LENGTH, dtype, 0), random_rows(spec, 40, dtype, 1)
    runners = [Runner(backend, spec, dtype) for backend in (CpuAttention(dtype, P), ReferenceAttention(P))]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for shares in (
        [(0, PAGES, long.part(0, 101)), (0, [7, 1], short.part(0, 3))],
        [(101, PAGES, long.part(101, 1)), (3, [7, 1], short.part(3, 30))],
        [(102, PAGES, long.part(102, 48)), (33, [7, 1], short.part(33, 1))],
    ):
        for ours, reference in zip(*(runner.step(shares) for runner in runners), strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_equal_bits_alone_in_chunks_and_in_company(name: str, dtype: torch.dtype) -> None:
    spec = spec_of(name)
    rows, other = random_rows(spec, LENGTH, dtype, 0), random_rows(spec, 70, dtype, 1)
    alone = Runner(CpuAttention(dtype, P), spec, dtype).step([(0, PAGES, rows)])[0]
    for chunk in (1, 7, 33, 64):
        runner = Runner(CpuAttention(dtype, P), spec, dtype)
        parts = [
            runner.step([(0, [40, 41, 42], other), (start, PAGES, rows.part(start, chunk))])[1]
            for start in range(0, LENGTH, chunk)
        ]
        assert torch.equal(torch.cat(parts), alone), f"chunks of {chunk}"


def test_equal_bits_on_one_thread() -> None:
    spec = spec_of("grouped")
    rows = random_rows(spec, LENGTH, torch.bfloat16, 0)
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outputs.append(Runner(CpuAttention(torch.bfloat16, P), spec, torch.bfloat16).step([(0, PAGES, rows)])[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outputs)


def test_a_neighbours_nan_stays_with_it() -> None:
    spec = spec_of("grouped")
    rows, broken = random_rows(spec, 50, torch.float32, 0), random_rows(spec, 50, torch.float32, 1)
    broken.key[20] = float("nan")
    runner = Runner(CpuAttention(torch.float32, P), spec, torch.float32)
    well, ill = runner.step([(0, [0, 1], rows), (0, [2, 3], broken)])
    assert well.isfinite().all()
    assert ill[:20].isfinite().all() and ill[20:].isnan().all()


def test_memory_that_held_nan_does_not_show() -> None:
    spec = spec_of("grouped")
    rows, broken = random_rows(spec, 50, torch.float32, 0), random_rows(spec, 64, torch.float32, 1)
    broken.key[:], broken.value[:] = float("nan"), float("nan")
    runner = Runner(CpuAttention(torch.float32, P), spec, torch.float32)
    clean = runner.step([(0, [0, 1], rows)])[0]
    runner.step([(0, [2, 3], broken)])
    assert torch.equal(runner.step([(0, [2, 3], rows)])[0], clean)


def test_refuses_what_the_kernel_cannot_do() -> None:
    with pytest.raises(ValueError, match="page size"):
        CpuAttention(torch.float32, 16)
    with pytest.raises(ValueError, match="float16"):
        CpuAttention(torch.float16)
