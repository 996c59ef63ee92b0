"""Quantised weights: tokens of transformers' own quantised model, equal bits for a row in any company, few bytes.

bitsandbytes' own product of 4-bit weights rounds to bfloat16 on processors that have it, whatever the number format
asked for; the oracle is kept from that. Its product of 8-bit weights lets a large activation of one token change all
tokens of its batch, so that the oracle computes a token at a time.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache

from benchmarks.exact import Continued, compare, drive, prompts_of
from proto import quantization
from shard.config import ShardConfig
from shard.memory import choose_num_pages
from shard.model import Model, load_model
from shard.model.layers import PackedLinear
from shard.model.quantized import is_quantized, matrix_of
from shard.model.quantized_matrices import QuantizedMatrix
from tests import tiny
from tests.shard.model.test_invariance import LENGTH, logits_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install 'lorikeet[bitsandbytes]'"
)
FOUR_BITS = ("bitsandbytes-nf4", "bitsandbytes-fp4")
ALL = ("bitsandbytes", *FOUR_BITS)
LENGTHS = (5, 17, 33, 2)
NEW_TOKENS = 24


def asked(method: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """What transformers is told for a method, written out here once more."""
    if method == "bitsandbytes":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=method[-3:], bnb_4bit_compute_dtype=dtype)


def theirs(folder: Path, method: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own quantised model."""
    network = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", quantization_config=asked(method, dtype)
    ).eval()
    for module in network.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False
    return network


@torch.no_grad()
def write(network: Any, prompt: list[int]) -> Continued:
    """Greedy text, each token a forward of its own."""
    cache, ids, found = DynamicCache(config=network.config), list(prompt), []
    for index in range(len(prompt) + NEW_TOKENS - 1):
        output = network(torch.tensor([ids[index : index + 1]]), past_key_values=cache, use_cache=True)
        if index + 1 >= len(prompt):
            found.append(output.logits[0, -1].float().log_softmax(-1))
            ids.append(int(found[-1].argmax()))
    return Continued(ids[len(prompt) :], torch.stack(found))


def ours(folder: Path, method: str | None, dtype: str = "float32") -> Model:
    return load_model(ShardConfig("m", str(folder), "unix:/dev/null", dtype=dtype, quantize=method))


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_transformers_own_tokens(name: str, method: str, tmp_path: Path) -> None:
    folder = tiny.make(name, tmp_path)
    prompts = prompts_of(name, LENGTHS)
    network = theirs(folder, method)
    expected = [write(network, prompt) for prompt in prompts]
    tried = compare(name, expected, drive(ours(folder, method), prompts, step_tokens=64))
    assert tried.num_distinct >= 8
    if method in FOUR_BITS:
        assert tried.exact, tried
    else:  # rounding to 8 bits makes steps of 1/127 of differences in the last bit
        assert tried.num_tokens >= 0.9 * NEW_TOKENS * len(prompts), tried
    plain = drive(load_model(ShardConfig("m", str(folder), "unix:/dev/null", dtype="float32")), prompts, 64)
    assert [text.token_ids for text in plain] != [text.token_ids for text in expected], "nothing was quantised"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_8_bits_are_bitsandbytes_own_row_by_row(dtype: torch.dtype, tmp_path: Path) -> None:
    network = theirs(tiny.make("llama", tmp_path), "bitsandbytes", dtype)
    module = network.model.layers[0].mlp.up_proj
    assert is_quantized(module) and not is_quantized(network.lm_head)
    x = (
        torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 1.0, 4.0]).repeat(3)[:, None]
    )
    x = x.to(dtype)
    large = (x.abs() >= 6).any(1)
    assert 0 < int(large.sum()) < 9
    with torch.inference_mode():
        alone = torch.cat([module(row[None]) for row in x])
        given = matrix_of(module, dtype)(x)
        assert torch.equal(given[~large], alone[~large])
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7
        assert (given - alone).abs().max() <= tolerance * alone.abs().max()
        assert not torch.equal(module(x), alone), "their rows depend on each other no more: ours could be theirs"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ALL)
def test_equal_bits_however_a_request_is_run(method: str, dtype: str, tmp_path: Path) -> None:
    model = ours(tiny.make("llama", tmp_path, hidden_size=512), method, dtype)
    model.allocate_kv(16)
    generator = torch.Generator().manual_seed(3)
    ids, other = (torch.randint(0, tiny.VOCAB, (n,), generator=generator) for n in (LENGTH, 57))
    alone = logits_of(model, [(0, [4, 9], ids)])[0]
    in_company = logits_of(model, [(0, [1, 2], other), (0, [5, 3], ids)])[1]
    assert torch.equal(in_company, alone)
    for chunk in (1, 7, 16):
        parts = [logits_of(model, [(s, [6, 7], ids[s : s + chunk])])[0] for s in range(0, LENGTH, chunk)]
        assert torch.equal(torch.cat(parts), alone), f"chunks of {chunk}"


@pytest.mark.parametrize(("method", "most"), [("bitsandbytes", 1.1), ("bitsandbytes-nf4", 0.65)])
def test_weights_stay_quantised_in_memory(method: str, most: float, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path, hidden_size=256, intermediate_size=512)
    model, plain = ours(folder, method), ours(folder, None)
    matrices = [module.matrix for module in model.network.modules() if isinstance(module, PackedLinear)]
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    assert len(quantized) == 3 * 7 and len(matrices) == 3 * 7 + 1
    weights = sum(matrix.in_features * matrix.out_features for matrix in quantized)
    assert sum(matrix.num_bytes for matrix in quantized) <= most * weights
    assert model.info.num_parameters == plain.info.num_parameters
    assert (model.info.quantization, plain.info.quantization) == (method, "")
    left = [parameter.numel() for parameter in model.network.parameters()]
    assert sum(left) + weights <= plain.info.num_parameters, "the weight itself is kept beside"
    config = ShardConfig("m", str(folder), "unix:/dev/null", cpu_memory=2**24)
    assert choose_num_pages(config, model) == choose_num_pages(config, plain)


@pytest.mark.parametrize("method", ALL)
def test_a_checkpoint_that_is_quantised_already(method: str, tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "plain")
    theirs(folder, method).save_pretrained(tmp_path / "quantised")
    told = json.loads((tmp_path / "quantised" / "config.json").read_text())
    assert quantization.of_checkpoint(told) == method
    prompts = prompts_of("llama", LENGTHS[:2])
    expected = drive(ours(folder, method), prompts, 64)
    for wanted in (None, method):
        given = drive(ours(tmp_path / "quantised", wanted), prompts, 64)
        assert [text.token_ids for text in given] == [text.token_ids for text in expected]
    other = next(each for each in ALL if each != method)
    with pytest.raises(ValueError, match=f"quantised by {method} already, and {other} was asked for"):
        ours(tmp_path / "quantised", other)
