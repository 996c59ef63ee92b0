"""Quantization methods of checkpoints, and why some are not supported."""

import importlib.util

import pytest

from lorikeet.proto import quantization

NF4 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
FOUND = [
    ({}, None),
    ({"quantization_config": None}, None),
    (NF4, "bitsandbytes-nf4"),
    ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes-fp4"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    (
        {"quantization_config": {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3}}}},
        "hqq-3bit",
    ),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
]


@pytest.mark.parametrize(("config", "method"), FOUND, ids=[str(method) for _, method in FOUND])
def test_methods_of_checkpoints(config: dict[str, object], method: str | None) -> None:
    assert quantization.of_checkpoint(config) == method


def installed(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_there else None)


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, False)
    said = quantization.reason_against("bitsandbytes-nf4")
    assert said == "it needs the package bitsandbytes: pip install 'lorikeet-serve[bitsandbytes]'"
    installed(monkeypatch, True)
    assert quantization.reason_against("bitsandbytes-nf4") == ""


def test_a_small_kv_cache_asks_nothing_of_the_weights() -> None:
    assert quantization.reason_against(quantization.FP8_KV) == ""
    assert quantization.choose(quantization.FP8_KV, {}) is None
    assert quantization.of_weights("bitsandbytes") == "bitsandbytes"


def test_checkpoint_and_flag_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, True)
    assert quantization.choose(None, {}) is None
    assert quantization.choose("bitsandbytes", {}) == "bitsandbytes"
    assert quantization.choose(None, NF4) == quantization.choose("bitsandbytes-nf4", NF4) == "bitsandbytes-nf4"
    with pytest.raises(ValueError, match="by bitsandbytes-nf4 already, and bitsandbytes was asked for"):
        quantization.choose("bitsandbytes", NF4)
    with pytest.raises(ValueError, match="quantised by compressed-tensors: it is an unknown method"):
        quantization.choose(None, FOUND[-1][0])


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"quant_method": "hqq"}, "quantised by hqq-4bit: transformers 5 does not read such checkpoints"),
        ({"quant_method": "fp8"}, "quantised by fp8: .* use the plain model with --quantize fp8"),
        ({"quant_method": "eetq"}, "quantised by eetq: .* bitsandbytes or fp8"),
    ],
)
def test_checkpoints_that_are_not_read_name_what_to_do(
    result: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, True)
    with pytest.raises(ValueError, match=reason):
        quantization.choose(None, {"quantization_config": result})


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_needs_sample_texts_is_not_made_at_a_start(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, True)
    with pytest.raises(ValueError, match=f"quantised by {method}: it is computed from sample texts in advance"):
        quantization.choose(method, {})
    assert quantization.choose(method, {"quantization_config": {"quant_method": method}}) == method
    installed(monkeypatch, False)
    assert "pip install 'lorikeet-serve[gptq]'" in quantization.reason_against(method)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (GPTQ, ""),
        (GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"}, ""),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, ""),
        (GPTQ | {"bits": 3}, "its weights have 3 bits"),
        (GPTQ | {"group_size": 16}, "its group size 16 is not a multiple of 32"),
        (GPTQ | {"desc_act": True}, "its columns are reordered across groups (desc_act)"),
        (GPTQ | {"dynamic": {"lm_head": {}}}, "its layers have different settings (dynamic)"),
        (GPTQ | {"checkpoint_format": "marlin"}, "its layout is marlin"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "its layout is gemv"),
    ],
)
def test_layouts_that_are_multiplied_as_integers(settings: dict[str, object], reason: str) -> None:
    config, method = {"quantization_config": settings}, str(settings["quant_method"])
    assert quantization.reason_against_integers(config) == reason
    assert quantization.multiplies_integers(method, config) == (not reason)


@pytest.mark.parametrize("method", ["int8", "int4", "gguf"])
def test_activations_are_rounded_on_cpu_only(method: str) -> None:
    assert quantization.multiplies_integers(method, {})
    assert quantization.activations_of(True, None, "cpu") == quantization.activations_of(True, "int8", "cpu") == "int8"
    assert (
        quantization.activations_of(True, None, "cuda:0") == quantization.activations_of(True, "none", "cpu") == "none"
    )
    with pytest.raises(ValueError, match="8-bit activations are supported on CPU only, not on cuda:0"):
        quantization.activations_of(True, "int8", "cuda:0")
    assert quantization.activations_of(False, None, "cuda:0") == "none"
    with pytest.raises(
        ValueError, match="only int8, int4, int4-g32, gguf, bitsandbytes, and checkpoints of gptq and awq"
    ):
        quantization.activations_of(False, "none", "cpu")
