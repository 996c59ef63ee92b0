"""Which attention backend is chosen, and the format of K and V."""

import logging
from collections.abc import Iterator

import pytest
import torch
from structlog.testing import capture_logs

from lorikeet.shard import attention
from lorikeet.shard.attention import AttentionSpec
from lorikeet.shard.attention.base import PagedKV
from lorikeet.shard.attention.layerwise import LayerwiseAttention
from lorikeet.shard.attention.reference import FP8, ReferenceAttention
from lorikeet.shard.attention.varlen import VarlenAttention
from lorikeet.shard.system import gpu
from tests.shard.attention.test_cpu import Runner, random_rows
from tests.shard.attention.test_varlen import by_sdpa, written_out

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BFLOAT16 = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    with gpu.assumed((9, 0)):
        yield


@pytest.fixture
def page_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention of a torch that has them, whatever version is installed."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", written_out)


def names(backend: attention.AttentionBackend) -> list[str]:
    assert isinstance(backend, LayerwiseAttention)
    return [type(each).__name__ for each in backend._backends]


@pytest.mark.usefixtures("page_tables")
def test_the_order_of_backends_on_cuda() -> None:
    pytest.importorskip("triton")
    found, either = attention.create("auto", CUDA, BFLOAT16, None), ["VarlenAttention", "PagedAttention"]
    assert names(found) == ["ByLengthAttention", *either, "ReferenceAttention"] and found.page_size == 256
    assert names(attention.create("varlen", CUDA, BFLOAT16, None)) == [*either, "ReferenceAttention"]
    assert names(attention.create("triton", CUDA, BFLOAT16, None)) == ["PagedAttention", "ReferenceAttention"]
    for dtype, page_size, kept in ((torch.float32, None, "auto"), (BFLOAT16, 64, "auto"), (BFLOAT16, None, "fp8")):
        with gpu.assumed((8, 9)):
            found = attention.create("auto", CUDA, dtype, page_size, kept)
        assert names(found) == ["PagedAttention", "ReferenceAttention"] and found.page_size == 64
        assert found.can_capture


def test_without_page_tables_keys_are_copied_for_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", by_sdpa)
    with capture_logs() as logs:
        found = attention.create("auto", CUDA, BFLOAT16, None)
    assert names(found) == ["ByLengthAttention", "PagedAttention", "ReferenceAttention"] and found.page_size == 64
    assert isinstance(found, LayerwiseAttention)
    assert [type(part).__name__ for part in found._backends[0].parts] == ["PagedAttention", "CopiedKeysAttention"]
    [event] = [log for log in logs if log["event"] == "flash_attention"]
    assert event["implementation"] == "FA2" and event["keys"] == "copied from their pages"
    with pytest.raises(ValueError, match=r"lacks: install torch 2\.13 or newer, or use --attention auto"):
        attention.create("varlen", CUDA, BFLOAT16, None)
    monkeypatch.setattr(attention, "has_triton", lambda: False)
    assert isinstance(attention.create("auto", CUDA, BFLOAT16, None), ReferenceAttention)


def test_devices_without_flash_attention_have_small_pages() -> None:
    pytest.importorskip("triton")
    with gpu.assumed((7, 5)):
        found = attention.create("auto", CUDA, torch.float16, None)
        assert names(found) == ["PagedAttention", "ReferenceAttention"] and found.page_size == 64
        reason = VarlenAttention().unsupported_reason(AttentionSpec(4, 2, 64, 64, 0.1), torch.float16, CUDA)
    assert "8.0 or newer" in reason


def test_eight_bits_are_refused_where_the_device_cannot_convert_them() -> None:
    with gpu.assumed((8, 6)), pytest.raises(ValueError, match="fp8 needs a CUDA device of compute capability"):
        attention.create("auto", CUDA, BFLOAT16, None, "fp8")


@pytest.mark.usefixtures("page_tables")
def test_without_triton_there_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(attention, "has_triton", lambda: False)
    assert names(attention.create("auto", CUDA, BFLOAT16, None)) == ["VarlenAttention", "ReferenceAttention"]
    with caplog.at_level(logging.WARNING):
        found = attention.create("auto", CUDA, torch.float32, None)
    assert isinstance(found, ReferenceAttention) and not found.can_capture and "triton is not installed" in caplog.text
    with pytest.raises(ValueError, match="needs the package triton"):
        attention.create("triton", CUDA, BFLOAT16, None)


@pytest.mark.parametrize("name", ["cpu", "varlen"])
def test_backends_without_fp8_reject_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"the {name} attention backend does not support --kv-cache-dtype fp8"):
        attention.create(name, CPU, BFLOAT16, None, "fp8")
    with pytest.raises(ValueError, match="known: auto, fp8"):
        attention.create(name, CPU, BFLOAT16, None, "int8")


def test_the_reference_quantizes_each_token_alone() -> None:
    """Tokens of one step and of several are stored alike."""
    spec = AttentionSpec(4, 2, 16, 24, 0.25)
    rows = random_rows(spec, 20, torch.float32, 0)
    plain = Runner(attention.create("reference", CPU, torch.float32, 16), spec, torch.float32)
    small, other = (
        Runner(attention.create("reference", CPU, torch.float32, 16, "fp8"), spec, torch.float32) for _ in range(2)
    )
    assert small.backend.page_bytes(spec, torch.float32) == 16 * 2 * (16 + 24 + 8)
    kv = small.kv
    assert isinstance(kv, PagedKV) and kv.keys.dtype == FP8 and kv.key_scales is not None
    exact, [found] = plain.step([(0, [1, 2], rows)])[0], small.step([(0, [1, 2], rows)])
    assert 0 < (found - exact).abs().max() < 0.1
    other.step([(0, [1, 2], rows.part(0, 13))])
    torch.testing.assert_close(other.step([(13, [1, 2], rows.part(13, 7))])[0], found[13:], rtol=1e-5, atol=1e-6)
