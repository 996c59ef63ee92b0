"""The arguments of torch's variable-length attention, against the reference. Its kernel runs on CUDA only, so it is
replaced by one that is written after its documentation.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional

from lorikeet.shard.attention import AttentionSpec
from lorikeet.shard.attention.base import AttentionBackend, PagedKV
from lorikeet.shard.attention.flash import has_page_tables
from lorikeet.shard.attention.layerwise import LayerwiseAttention, PlacedKV
from lorikeet.shard.attention.reference import ReferenceAttention
from lorikeet.shard.attention.varlen import CopiedKeysAttention, VarlenAttention, of_this_torch
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.system import gpu
from tests.shard.attention.test_cpu import (
    LENGTH,
    SPECS,
    Runner,
    expected,
    random_rows,
    spec_of,
    three_steps,
    with_moments,
)
from tests.shard.padded import Always

PAGES = [5, 9, 2]
BFLOAT16 = torch.bfloat16


def written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: torch.Tensor,
    block_table: torch.Tensor, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    """`varlen_attn` after its documentation: causal from the bottom right, keys by pages."""
    assert num_splits == 1 and window_size[1] == 0
    # it requires both, although with pages it reads only one
    assert cu_seq_k.shape == cu_seq_q.shape
    assert all(tensor.dtype == torch.int32 for tensor in (cu_seq_q, cu_seq_k, seqused_k, block_table))
    assert enable_gqa or query.shape[1] == key.shape[2]
    output = torch.empty_like(query)
    rows = cu_seq_q.tolist()
    assert max_q == max(end - first for first, end in pairwise(rows))
    assert max_k == max(seqused_k.tolist())
    for index, (first, end) in enumerate(pairwise(rows)):
        length = int(seqused_k[index])
        keys, values = (pool[block_table[index].long()].flatten(0, 1)[:length].float() for pool in (key, value))
        keys, values = (each.repeat_interleave(query.shape[1] // key.shape[2], 1) for each in (keys, values))
        scores = torch.einsum("qhd,lhd->hql", query[first:end].float(), keys) * scale
        positions = torch.arange(length, device=query.device)
        behind = positions[length - (end - first) :, None] - positions
        hidden = behind < 0
        if window_size[0] >= 0:
            hidden |= behind > window_size[0]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output[first:end] = torch.einsum("hql,lhd->qhd", weights, values).to(query.dtype)
    return output


def unsupported_reason(name: str, dtype: torch.dtype = BFLOAT16) -> str:
    with gpu.assumed((9, 0)):
        return VarlenAttention().unsupported_reason(spec_of(name), dtype, torch.device("cuda"))


@pytest.mark.parametrize("name", [name for name in SPECS if not unsupported_reason(name)])
def test_agrees_with_the_reference(name: str) -> None:
    spec = spec_of(name)
    long, short = random_rows(spec, LENGTH, BFLOAT16, 0), random_rows(spec, 40, BFLOAT16, 1)
    ours = Runner(VarlenAttention(kernel=written_out), spec, BFLOAT16)
    assert isinstance(ours.kv, PagedKV)
    reference = Runner(ReferenceAttention(256), replace(spec, value_dim=3 * spec.value_dim), torch.float32)
    for segments in three_steps(long, short):
        wide = [(start, pages, with_moments(rows)) for start, pages, rows in segments]
        for output, moments in zip(ours.step(segments), reference.step(wide), strict=True):
            mean, allowed = expected(moments, BFLOAT16)
            assert ((output.float() - mean).abs() <= allowed).all()


def test_positions_beyond_a_page_are_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("grouped")
    rows = random_rows(spec, 600, BFLOAT16, 0)
    ours = Runner(VarlenAttention(kernel=written_out), spec, BFLOAT16)
    reference = Runner(ReferenceAttention(256), spec, BFLOAT16)
    for start, count in ((0, 255), (255, 2), (257, 300), (557, 43)):
        segments = [(start, PAGES, rows.part(start, count))]
        torch.testing.assert_close(ours.step(segments)[0], reference.step(segments)[0], rtol=2**-7, atol=2**-8)


def by_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, return_aux: object = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:  # fmt: skip
    """`varlen_attn` of torch 2.11 after its documentation: without page tables, causal from the bottom right."""
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and window_size[1] == 0
    assert cu_seq_q.tolist() == [0, len(query)] == [0, max_q] and cu_seq_k.tolist() == [0, len(key)] == [0, max_k]
    positions = torch.arange(max_k, device=query.device)
    behind = positions[max_k - max_q :, None] - positions
    mask = behind >= 0
    if window_size[0] >= 0:
        mask &= behind <= window_size[0]
    rows = (each.float().transpose(0, 1)[None] for each in (query, key, value))
    mean = functional.scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale, enable_gqa=True)
    return mean[0].transpose(0, 1).to(query.dtype)


@pytest.fixture
def old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", by_sdpa)
    assert not has_page_tables()


@pytest.mark.usefixtures("old_torch")
@pytest.mark.parametrize("name", [name for name in SPECS if not unsupported_reason(name)])
def test_copied_keys_agree_with_the_reference(name: str) -> None:
    spec = spec_of(name)
    long, short = random_rows(spec, LENGTH, BFLOAT16, 0), random_rows(spec, 40, BFLOAT16, 1)
    ours = Runner(of_this_torch(256), spec, BFLOAT16)
    assert isinstance(ours.backend, CopiedKeysAttention) and not ours.backend.can_capture
    reference = Runner(ReferenceAttention(256), replace(spec, value_dim=3 * spec.value_dim), torch.float32)
    for segments in three_steps(long, short):
        wide = [(start, pages, with_moments(rows)) for start, pages, rows in segments]
        for output, moments in zip(ours.step(segments), reference.step(wide), strict=True):
            mean, allowed = expected(moments, BFLOAT16)
            assert ((output.float() - mean).abs() <= allowed).all()


@pytest.mark.usefixtures("old_torch")
def test_keys_are_copied_from_pages_in_any_order() -> None:
    spec = spec_of("grouped")
    rows = random_rows(spec, 300, BFLOAT16, 0)
    ours, reference = Runner(of_this_torch(64), spec, BFLOAT16), Runner(ReferenceAttention(64), spec, BFLOAT16)
    for start, count in ((0, 63), (63, 2), (65, 200), (265, 35)):
        segments = [(start, [5, 9, 2, 1, 7], rows.part(start, count))]
        torch.testing.assert_close(ours.step(segments)[0], reference.step(segments)[0], rtol=2**-7, atol=2**-8)


@pytest.mark.usefixtures("old_torch")
def test_no_more_keys_are_copied_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopiedKeysAttention, "most_context", 100)
    spec = spec_of("grouped")
    rows = random_rows(spec, 101, BFLOAT16, 0)
    ours = Runner(of_this_torch(64), spec, BFLOAT16)
    ours.step([(0, [5, 9], rows.part(0, 100))])
    with pytest.raises(RuntimeError, match="sees 101 tokens, only 100 are copied"):
        ours.step([(100, [5, 9], rows.part(100, 1))])


def layerwise(kernel: Any = None) -> LayerwiseAttention:
    return LayerwiseAttention([VarlenAttention(kernel=kernel), ReferenceAttention(256)])


def owner(runner: Runner) -> AttentionBackend:
    assert isinstance(runner.kv, PlacedKV)
    return runner.kv.owner


@pytest.mark.parametrize("name", ["soft cap", "sinks", "alibi", "odd head size", "odd sizes"])
def test_unsupported_layers_run_on_another_backend(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def never(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError

    spec = spec_of(name)
    ours = Runner(layerwise(never), spec, BFLOAT16)
    assert isinstance(owner(ours), ReferenceAttention) and "slow reference" in caplog.text
    assert "does not run" not in caplog.text, "it was called"
    assert not ours.backend.can_capture
    rows = random_rows(spec, 20, BFLOAT16, 0)
    reference = Runner(ReferenceAttention(256), spec, BFLOAT16)
    segments = [(0, PAGES, rows)]
    assert torch.equal(ours.step(segments)[0], reference.step(segments)[0])


def test_float32_is_unsupported() -> None:
    assert "does not support torch.float32" in unsupported_reason("grouped", torch.float32)


def test_unsupported_page_sizes_are_rejected() -> None:
    assert VarlenAttention(512).page_size == 512
    with pytest.raises(ValueError, match="multiple of 256"):
        VarlenAttention(64)


def test_a_wrong_kernel_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def off(*arguments: Any, **named: Any) -> torch.Tensor:
        return written_out(*arguments, **{**named, "window_size": (3, 0)})

    ours = Runner(layerwise(off), spec_of("grouped"), BFLOAT16)
    assert isinstance(owner(ours), ReferenceAttention) and "is off by" in caplog.text


def test_a_correct_kernel_is_used() -> None:
    ours = Runner(layerwise(written_out), spec_of("grouped"), BFLOAT16)
    assert isinstance(owner(ours), VarlenAttention) and ours.backend.can_capture
    rows = random_rows(ours.spec, 5, BFLOAT16, 0)
    assert len(ours.step([(0, [1], rows)])[0]) == 5


def test_an_older_torch_gets_no_num_splits() -> None:
    calls = []

    def older(*arguments: Any, **named: Any) -> torch.Tensor:
        calls.append(named.pop("num_splits", None))
        if calls[-1] is not None:
            raise RuntimeError("num_splits requires FA3. Register FA3 to set num_splits.")
        return written_out(*arguments, **named, num_splits=1)

    ours = Runner(layerwise(older), spec_of("grouped"), BFLOAT16)
    assert isinstance(owner(ours), VarlenAttention)
    assert calls[0] == 1 and set(calls[1:]) == {None}


def test_torch_accepts_the_arguments_and_rejects_the_device(caplog: pytest.LogCaptureFixture) -> None:
    """The call reaches the kernel, which exists on CUDA only; then the reference computes."""
    spec = AttentionSpec(4, 2, 16, 16, 0.25, window=9)
    runner = Runner(LayerwiseAttention([of_this_torch(256), ReferenceAttention(256)]), spec, BFLOAT16)
    assert isinstance(owner(runner), ReferenceAttention)
    assert "does not run" in caplog.text and ("CUDA" in caplog.text or "'CPU' backend" in caplog.text)
    assert len(runner.step([(0, [1], random_rows(spec, 3, BFLOAT16, 0))])[0]) == 3


def test_under_bounds_shapes_and_addresses_stay() -> None:
    """As a captured graph sees it: missing segments have no rows."""
    spec = spec_of("grouped")
    calls: list[object] = []

    def recorded(query: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        tensors = [x for x in (*arguments, *named.values()) if torch.is_tensor(x)]
        rest = [x for x in (*arguments, *named.values()) if not torch.is_tensor(x)]
        calls.append(([(x.data_ptr(), x.shape) for x in tensors], rest))
        exact = (*arguments[:4], *(int(x.max()) for x in (arguments[2].diff(), named["seqused_k"])))
        return written_out(query, *exact, **named)

    backend = VarlenAttention(kernel=recorded)
    ours, reference = Runner(backend, spec, BFLOAT16), Runner(ReferenceAttention(256), spec, BFLOAT16)
    ours.inputs.num_attention_numbers = backend.num_numbers
    ours.inputs.pad(Always(Bounds(num_rows=6, max_kv_len=600)))
    for plan in ([(0, 3, [5]), (0, 3, [7])], [(3, 1, [5]), (3, 1, [7]), (0, 4, [1])], [(0, 1, [p]) for p in range(6)]):
        rows = random_rows(spec, 6, BFLOAT16, 0)
        for runner in (ours, reference):
            runner.fill([Segment(*each) for each in plan])
        found, wanted = (
            runner.backend.attend(spec, runner.kv, rows.query, rows.key, rows.value) for runner in (ours, reference)
        )
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-8)
    assert calls[0] == calls[1] == calls[2]
