"""GPTQ and AWQ checkpoints: what gptqmodel reads is what the formats define, and so is what is served."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lorikeet.shard.model.quantization.layers import matrix_of
from lorikeet.shard.model.quantization.matrices import KernelMatrix
from tests.shard.engine.exactness import compare, drive, prompts_of
from tests.shard.model.quantization import packed_checkpoints
from tests.shard.model.quantization.quantized_cases import LENGTHS, base, needs, ours, write


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("method", needs("gptq", "awq"))
def test_tokens_are_those_of_the_weights_that_the_format_defines(
    method: str, is_shuffled: bool, tmp_path: Path
) -> None:
    if is_shuffled and method == "awq":
        pytest.skip("the format has no such order")
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    packed_checkpoints.write(base("llama", tmp_path / "plain"), packed, dense, method, is_shuffled)
    prompts = prompts_of("llama", LENGTHS)
    network = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager").eval()
    model = ours(packed, None)
    tried = compare("llama", [write(network, prompt) for prompt in prompts], drive(model, prompts, 64))
    assert tried.exact and tried.num_distinct >= 6, tried
    gate: Any = model.network.get_submodule("model.layers.0.mlp.gate_proj")
    assert torch.equal(gate.matrix.dense(), network.model.layers[0].mlp.gate_proj.weight)
    assert model.info.quantization == method


@pytest.mark.parametrize("method", needs("gptq"))
def test_tokens_are_those_of_transformers_own_model(method: str, tmp_path: Path) -> None:
    packed_checkpoints.write(base("llama", tmp_path / "plain"), tmp_path / "packed", tmp_path / "dense", method)
    prompts = prompts_of("llama", LENGTHS)
    settings = AutoConfig.from_pretrained(tmp_path / "packed")
    settings.quantization_config["backend"] = "gptq_torch"  # what it takes by itself computes in 16 bits
    network = AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", config=settings, dtype=torch.float32, attn_implementation="eager"
    )
    for module in network.eval().modules():
        if hasattr(module, "dequantize_weight"):  # compiled for minutes otherwise
            module.dequantize_weight = types.MethodType(type(module).dequantize_weight, module)
    tried = compare(
        "llama", [write(network, prompt) for prompt in prompts], drive(ours(tmp_path / "packed", None), prompts, 64)
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
        assert (matrix.dense().float() - weight).abs().max() <= 1e-2 * weight.abs().max()
        assert torch.equal(matrix(x.half()), module(x.half()))
        assert (matrix.project(x.half()).float() - x @ weight.t()).abs().max() <= 1e-2 * (x @ weight.t()).abs().max()
