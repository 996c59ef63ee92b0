"""Decoder layers of rounded weights in one call: the bits of their parts, and near transformers' own code."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.fusion.layer import FusedDecoderLayer
from lorikeet.shard.model.kernels import integer
from lorikeet.shard.model.layers import quantized_matrices
from lorikeet.shard.model.quantization import integers
from tests import tiny
from tests.shard.model import test_invariance

pytestmark = pytest.mark.skipif(not integer.available(), reason="needs a C compiler")
IDS = torch.randint(0, tiny.VOCAB, (40,), generator=torch.Generator().manual_seed(0))
SHAPE = {"hidden_size": 128, "intermediate_size": 256}


@pytest.fixture(autouse=True)
def large_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """int4 has groups of 128 in short rows too."""
    monkeypatch.setattr(integers, "LEAST_ROW", 0)


def ours(folder: Path, method: str, fusions: str = "auto", dtype: str = "bfloat16") -> Model:
    return load_model(ShardConfig("m", str(folder), "unix:/dev/null", dtype=dtype, quantize=method, fusions=fusions))


def logits_of(model: Model, count: int = 40) -> torch.Tensor:
    model.allocate_kv(4)
    return test_invariance.logits_of(model, [(0, [0, 1, 2], IDS[:count])])[0]


def layers_of(model: Model) -> list[FusedDecoderLayer]:
    return [module for module in model.network.modules() if isinstance(module, FusedDecoderLayer)]


@pytest.mark.parametrize(
    ("name", "method"), [("llama", "int8"), ("llama", "int4"), ("qwen2", "int4"), ("mistral", "int8")]
)
def test_a_layer_has_the_bits_of_its_parts(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ours(tiny.make(name, tmp_path, **SHAPE), method)
    layers: list[Any] = layers_of(model)
    assert len(layers) == 3 and len(quantized_matrices(model.network)) == 3 * 5 + 1
    whole = [logits_of(model, count) for count in (1, 3, 40)]
    assert model.compiled is not None
    model.compiled = None
    for layer in layers:
        assert layer._compiled is not None
        monkeypatch.setattr(layer, "_compiled", None)
    assert all(torch.equal(one, logits_of(model, len(one))) for one in whole)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_fused_layers_are_near_plain_ones(method: str, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, **SHAPE)
    fused, plain = (logits_of(ours(folder, method, fusions)) for fusions in ("auto", "none"))
    exact = logits_of(ours(folder, method, dtype="float32"))
    error = (plain - exact).square().mean().sqrt()
    assert (fused - exact).square().mean().sqrt() <= 1.3 * error + 1e-6


def test_what_is_not_fused(tmp_path: Path) -> None:
    """Other number formats, activations that are not rounded, and heads of other widths run part by part."""
    folder = tiny.make("llama", tmp_path / "llama", **SHAPE)
    assert not layers_of(ours(folder, "int8", dtype="float32"))
    config = ShardConfig(
        "m", str(folder), "unix:/dev/null", dtype="bfloat16", quantize="int8", quantize_activations="none"
    )
    assert not layers_of(load_model(config))
    assert not layers_of(ours(tiny.make("llama", tmp_path / "narrow"), "int8"))
    assert len(layers_of(ours(tiny.make("gemma2", tmp_path / "gemma2", hidden_size=128), "int8"))) == 0


def test_equal_bits_however_a_request_is_run(tmp_path: Path) -> None:
    test_invariance.check(ours(tiny.make("llama", tmp_path, **SHAPE), "int4"))
