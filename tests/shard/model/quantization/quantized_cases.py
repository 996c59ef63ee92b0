"""What the tests of quantised bases share: the methods, transformers' own model under each, and its text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, TorchAoConfig

from lorikeet.proto import quantization
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from tests import tiny
from tests.shard.engine.exactness import NEW_TOKENS, Continued

FOUR_BITS = ("bitsandbytes-nf4", "bitsandbytes-fp4")
HQQ = ("hqq-4bit", "hqq-3bit", "hqq-2bit")
AT_LOAD = ("bitsandbytes", *FOUR_BITS, *HQQ, "fp8")
"""Methods that quantise plain weights."""
IN_FILES = ("gptq", "awq")
"""Methods whose checkpoints hold quantised weights."""
LENGTHS = (5, 17, 33, 2)
SHAPE = {"intermediate_size": 128}
"""hqq shares a scale among 64 weights of a row."""


def needs(*methods: str) -> list[Any]:
    """Parameters for those methods, each skipped where its package is missing."""
    reasons = {method: quantization.reason_against(method) for method in methods}
    return [pytest.param(method, marks=pytest.mark.skipif(bool(why), reason=why)) for method, why in reasons.items()]


def base(name: str, folder: Path, **overrides: Any) -> Path:
    """A plain checkpoint that every method can quantise."""
    return tiny.make(name, folder, **({} if name == "gpt2" else SHAPE), **overrides)


def asked(method: str, dtype: torch.dtype) -> Any:
    """The arguments of transformers for a method, written out here independently."""
    if method == "fp8":
        from torchao.quantization import Float8WeightOnlyConfig

        return TorchAoConfig(Float8WeightOnlyConfig())
    if method == "bitsandbytes":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=method[-3:], bnb_4bit_compute_dtype=dtype)


def theirs(folder: Path, method: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own quantised model; hqq's layers put into it by hand, for which it has no loader."""
    settings = {} if method in HQQ else {"quantization_config": asked(method, dtype)}
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **settings).eval()
    for name, module in list(network.named_modules()):
        if type(module).__name__ == "Linear4bit":  # else its product rounds to bfloat16, whatever is asked for
            module.support_avx512bf16_for_cpu = False
        if method in HQQ and isinstance(module, nn.Linear) and name != "lm_head":
            from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

            hqq_config = BaseQuantizeConfig(nbits=int(method[4]), group_size=32 if method == "hqq-2bit" else 64)
            network.set_submodule(name, HQQLinear(module, hqq_config, compute_dtype=dtype, device="cpu"))
    return network


def of_values(folder: Path, method: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same, with plain weights of the same values for 8 bits of bitsandbytes, whose product rounds activations."""
    network = theirs(folder, method, dtype)
    return network.dequantize(dtype) if method == "bitsandbytes" else network


def exact_activations(method: str) -> str | None:
    """The flag by which a method does not round activations, for methods that can."""
    return "none" if method in ("bitsandbytes", *IN_FILES) else None


@torch.no_grad()
def write(network: Any, prompt: list[int]) -> Continued:
    """Greedy text, each token a forward of its own. The cache goes by its place: its name is another from 5.24 on."""
    cache, ids, actual = DynamicCache(config=network.config), list(prompt), []
    for index in range(len(prompt) + NEW_TOKENS - 1):
        output = network(torch.tensor([ids[index : index + 1]]), None, None, cache, use_cache=True)
        if index + 1 >= len(prompt):
            actual.append(output.logits[0, -1].float().log_softmax(-1))
            ids.append(int(actual[-1].argmax()))
    return Continued(ids[len(prompt) :], torch.stack(actual))


def ours(folder: Path, method: str | None, dtype: str = "float32", activations: str | None = None) -> Model:
    config = ShardConfig("m", str(folder), "unix:/dev/null", dtype=dtype, quantize=method)
    return load_model(replace(config, quantize_activations=activations))
