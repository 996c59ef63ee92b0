"""The check before an attention backend is used finds every fault of one parameter or of one small channel."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lorikeet.shard.attention import reference
from lorikeet.shard.attention.base import AttentionSpec
from lorikeet.shard.attention.cpu import CpuAttention
from lorikeet.shard.attention.layerwise import LayerwiseAttention
from lorikeet.shard.attention.reference import FP8, ReferenceAttention, attend_one
from lorikeet.shard.system.native import CompilerMissing

CPU = torch.device("cpu")
PLAIN = AttentionSpec(4, 2, 64, 64, 0.125)
SPECS = {
    "plain": PLAIN,
    "soft cap": replace(PLAIN, softcap=50.0),
    "window": replace(PLAIN, window=200),
    "sinks": replace(PLAIN, sinks=torch.tensor([1.0, 2.0, -1.0, 3.0])),
    "alibi": replace(PLAIN, alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.01])),
    "own scale": replace(PLAIN, scaling=0.02),
}
FAULTS: dict[str, tuple[str, Callable[[AttentionSpec], AttentionSpec]]] = {
    "no soft cap": ("soft cap", lambda spec: replace(spec, softcap=None)),
    "a soft cap of another size": ("soft cap", lambda spec: replace(spec, softcap=30.0)),
    "a window too wide": ("window", lambda spec: replace(spec, window=201)),
    "no sinks": ("sinks", lambda spec: replace(spec, sinks=None)),
    "no slopes": ("alibi", lambda spec: replace(spec, alibi_slopes=None)),
    "the usual scale": ("own scale", lambda spec: replace(spec, scaling=0.125)),
    "a scale off by a fiftieth": ("plain", lambda spec: replace(spec, scaling=1.02 * spec.scaling)),
}


def reason(backend: ReferenceAttention, spec: AttentionSpec, dtype: torch.dtype) -> str:
    layerwise = LayerwiseAttention([backend, ReferenceAttention(16, backend.kv_dtype)])
    return layerwise.verify_backend(backend, spec, dtype, CPU)


class Rounding(ReferenceAttention):
    """Sums in blocks, and rounds probabilities as kernels do."""

    def attend(self, spec, kv, query, key, value):  # type: ignore[no-untyped-def]
        def rounded(spec, query, keys, values, start):  # type: ignore[no-untyped-def]
            ones = torch.ones_like(values[..., :1])
            shares = attend_one(spec, query.float(), keys, torch.cat([values, ones], -1), start)
            return shares[..., :-1].to(query.dtype)

        original, reference.attend_one = reference.attend_one, rounded
        try:
            return super().attend(spec, kv, query, key, value)
        finally:
            reference.attend_one = original


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_another_order_of_roundings_passes(name: str, dtype: torch.dtype) -> None:
    assert reason(Rounding(16), SPECS[name], dtype) == ""
    assert reason(Rounding(16, FP8), SPECS[name], dtype) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_compiled_attention_passes(name: str, dtype: torch.dtype) -> None:
    try:
        backend = CpuAttention(dtype)
    except CompilerMissing:
        pytest.skip("needs a C compiler")
    layerwise = LayerwiseAttention([backend, ReferenceAttention(backend.page_size)])
    assert layerwise.verify_backend(backend, SPECS[name], dtype, CPU) == ""


class OfOneSpec(ReferenceAttention):
    """Computes with another specification."""

    def __init__(self, change: Callable[[AttentionSpec], AttentionSpec]) -> None:
        super().__init__(16)
        self._change = change

    def attend(self, spec, kv, query, key, value):  # type: ignore[no-untyped-def]
        return super().attend(self._change(spec), kv, query, key, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_parameter_is_found(fault: str, dtype: torch.dtype) -> None:
    spec, change = FAULTS[fault]
    assert "off by" in reason(OfOneSpec(change), SPECS[spec], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("channel", [0, 17, 63])
def test_a_fault_of_one_channel_is_found(channel: int, dtype: torch.dtype) -> None:
    class OfOneChannel(ReferenceAttention):
        def attend(self, spec, kv, query, key, value):  # type: ignore[no-untyped-def]
            output = super().attend(spec, kv, query, key, value)
            output[:, 1, channel] *= 1.25
            return output

    assert "off by" in reason(OfOneChannel(16), PLAIN, dtype)
