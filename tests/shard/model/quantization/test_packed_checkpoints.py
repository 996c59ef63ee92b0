"""GPTQ and AWQ checkpoints: what is served is what the formats define, and so is what gptqmodel reads."""

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from lorikeet.proto import quantization
from lorikeet.shard import model as model_package
from lorikeet.shard.model.kernels import integer
from lorikeet.shard.model.kernels.integer import PackedIntegers, plain_product
from lorikeet.shard.model.quantization.integers import IntegerLinear, IntegerMatrix
from lorikeet.shard.model.quantization.layers import matrix_of
from lorikeet.shard.model.quantization.matrices import KernelMatrix
from lorikeet.shard.model.quantization.packed_files import PARTS, read_weight
from tests.shard.engine.exactness import compare, drive, prompts_of
from tests.shard.model.quantization import packed_checkpoints
from tests.shard.model.quantization.quantized_cases import LENGTHS, base, needs, ours, write
from tests.shard.near import worst_share, worst_share_of_product


def of_the_format(packed: Path, dense: Path, method: str) -> None:
    """Tokens and weights of a packed checkpoint are those of the dense one that means the same."""
    prompts = prompts_of("llama", LENGTHS)
    network = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager").eval()
    is_ours = not quantization.reason_against_integers(json.loads((packed / "config.json").read_text()))
    model = ours(packed, None, activations="none" if is_ours else None)
    tried = compare("llama", [write(network, prompt) for prompt in prompts], drive(model, prompts, 64))
    assert tried.exact and tried.num_distinct >= 6, tried
    gate: Any = model.network.get_submodule("model.layers.0.mlp.gate_proj")
    assert torch.equal(gate.matrix.dense(), network.model.layers[0].mlp.gate_proj.weight)
    assert isinstance(gate.matrix, IntegerMatrix) == is_ours and model.info.quantization == method


@pytest.mark.parametrize("is_symmetric", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", ["gptq", pytest.param("awq", marks=pytest.mark.long)])
def test_integers_are_read_without_packages(method: str, is_symmetric: bool, tmp_path: Path) -> None:
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    packed_checkpoints.write(base("llama", tmp_path / "plain"), packed, dense, method, is_symmetric=is_symmetric)
    of_the_format(packed, dense, method)


@pytest.mark.parametrize("is_symmetric", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", ["awq", pytest.param("gptq", marks=pytest.mark.long)])
def test_integers_are_read_into_the_layout_of_devices(
    method: str, is_symmetric: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IntegerLinear, "is_on_device", True)
    monkeypatch.setattr(model_package, "check_batch_invariance", lambda *_: None)  # torch's products
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    packed_checkpoints.write(base("llama", tmp_path / "plain"), packed, dense, method, is_symmetric=is_symmetric)
    of_the_format(packed, dense, method)


@pytest.mark.parametrize("method", needs("gptq"))
def test_tokens_are_those_of_the_weights_that_the_format_defines(method: str, tmp_path: Path) -> None:
    """In an order by activations, which gptqmodel reads."""
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    packed_checkpoints.write(base("llama", tmp_path / "plain"), packed, dense, method, is_shuffled=True)
    of_the_format(packed, dense, method)


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_matrix_means_what_the_format_defines(method: str, is_symmetric: bool, tmp_path: Path) -> None:
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    packed_checkpoints.write(base("llama", tmp_path / "plain"), packed, dense, method, is_symmetric=is_symmetric)
    name = "model.layers.1.mlp.down_proj"
    tensors = load_file(packed / "model.safetensors")
    parts = {part: tensors[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in tensors}
    settings = json.loads((packed / "config.json").read_text())["quantization_config"]
    weight = read_weight(parts, settings)
    assert torch.equal(weight.dense(), load_file(dense / "model.safetensors")[f"{name}.weight"])
    assert (weight.minimums is None) == is_symmetric
    x = torch.randn(5, weight.values.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    if integer.available():
        assert torch.equal(PackedIntegers(weight, None).product(x, with_bias=False), plain_product(x, weight, None))


def test_matrices_in_another_layout_are_rejected(tmp_path: Path) -> None:
    plain = base("llama", tmp_path / "plain")
    packed_checkpoints.write(plain, tmp_path / "shuffled", tmp_path / "dense", "gptq", is_shuffled=True)
    path = tmp_path / "shuffled" / "config.json"
    path.write_text(path.read_text().replace('"desc_act": true', '"desc_act": false'))
    with pytest.raises(ValueError, match=r"quantised by gptq: model.*_proj: its columns are reordered across groups"):
        ours(tmp_path / "shuffled", None)


@pytest.mark.parametrize("method", needs("gptq"))
def test_tokens_are_those_of_transformers_own_model(method: str, tmp_path: Path) -> None:
    """In an order by activations, in which gptqmodel reads it."""
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    packed_checkpoints.write(base("llama", tmp_path / "plain"), packed, dense, method, is_shuffled=True)
    prompts = prompts_of("llama", LENGTHS)
    settings = AutoConfig.from_pretrained(packed)
    settings.quantization_config["backend"] = "gptq_torch"  # what it takes by itself computes in 16 bits
    network = AutoModelForCausalLM.from_pretrained(
        packed, config=settings, dtype=torch.float32, attn_implementation="eager"
    )
    for module in network.eval().modules():
        if hasattr(module, "dequantize_weight"):  # compiled for minutes otherwise
            module.dequantize_weight = types.MethodType(type(module).dequantize_weight, module)
    tried = compare(
        "llama",
        [write(network, prompt) for prompt in prompts],
        drive(ours(packed, None), prompts, 64),
    )
    assert tried.exact, tried


@pytest.mark.parametrize("method", needs("gptq", "awq"))
def test_a_kernel_s_own_layout_is_read_by_its_product(method: str, tmp_path: Path) -> None:
    """Here gptqmodel's choice for CPU, which repacks weights as its choices for CUDA do."""
    packed_checkpoints.write(base("llama", tmp_path / "plain"), tmp_path / "packed", tmp_path / "dense", method)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float16)
    module = network.model.layers[0].mlp.up_proj
    matrix = matrix_of(module, torch.float16)
    assert isinstance(matrix, KernelMatrix)
    weight = dense.model.layers[0].mlp.up_proj.weight
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert worst_share(matrix.dense(), weight) <= 1e-2
        assert torch.equal(matrix(x.half()), module(x.half()))
        assert worst_share_of_product(matrix.project(x.half()), x @ weight.t(), x, weight) <= 1e-2
