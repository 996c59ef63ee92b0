"""Adapters with new weights of norms in a mixed batch: as PEFT computes them, and with the bits of a request alone."""

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from lorikeet.proto.params import Method, Speculation
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.model.fusion.layer import FusedDecoderLayer
from lorikeet.shard.model.kernels import cpu
from lorikeet.shard.requests.request import Request
from tests import tiny
from tests.shard.engine.adapter_exactness import Text, Tried, compare, lay_out, not_of_base, oracle, outputs_of
from tests.shard.engine.exactness import NEW_TOKENS, prompts_of

LINEARS = {"gpt2": ["c_attn"]}
SAVED = {"gpt2": ["ln_1", "ln_f"]}


@pytest.fixture(autouse=True)
def quiet() -> None:
    warnings.simplefilter("ignore")  # PEFT's own, about merging and training


def make_base(name: str, folder: Path, **shape: int) -> Path:
    """A model whose norms do not all have the same weights, as after training."""
    base = tiny.make(name, folder, seed=1, **shape)
    network: Any = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(0)
    with torch.no_grad():
        for module in network.modules():
            if "norm" in type(module).__name__.lower():
                for parameter in module.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
    network.save_pretrained(base)
    return base


def make_adapters(name: str, base: Path, folder: Path) -> dict[str, Path]:
    """New norms, new norms next to a LoRA, and a LoRA alone."""
    linears = LINEARS.get(name, ["q_proj", "v_proj", "down_proj"])
    saved = SAVED.get(name, ["input_layernorm", "norm"])
    configs: dict[str, peft.PeftConfig] = {
        "norms": peft.LNTuningConfig(),
        "saved": peft.LoraConfig(r=4, target_modules=linears, modules_to_save=saved),
        "plain": peft.LoraConfig(r=4, target_modules=linears),
    }
    for seed, (key, config) in enumerate(configs.items()):
        torch.manual_seed(seed)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base).eval(), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.15 * torch.randn_like(parameter))
        model.save_pretrained(folder / key)
    return {key: folder / key for key in configs}


def requests_of(prompts: list[list[int]], names: list[str], digests: dict[str, str]) -> list[Request]:
    requests = []
    for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        request = Request((1, index), list(prompt), len(prompt), NEW_TOKENS, adapter_digest=digests.get(name, ""))
        request.speculation = Speculation(Method.LOOKUP, 4)
        requests.append(request)
    return requests


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_norms_in_a_mixed_batch_give_what_peft_gives(name: str, tmp_path: Path) -> None:
    base = make_base(name, tmp_path / "base")
    adapters = make_adapters(name, base, tmp_path)
    digests = lay_out(base, tmp_path / "store", adapters)
    names = [*adapters, ""] * 2
    prompts = prompts_of(name, tuple(5 + 3 * index for index in range(len(names))))
    expected: list[Text] = oracle(base, adapters, names, prompts)
    changed = not_of_base(base, prompts, [text.token_ids for text in expected])
    assert sum(changed) >= 5, "adapters that change nothing prove nothing"
    config = ShardConfig(
        name, str(base), "unix:/dev/null", dtype="float32", max_total_tokens=128, step_tokens=40,
        adapter_store=str(tmp_path / "store"), max_active_adapters=3,
    )  # fmt: skip
    outputs = outputs_of(config, requests_of(prompts, names, digests))
    tried = Tried(name, 3)
    compare(tried, expected, [output.token_ids for output in outputs], names)
    assert not tried.differences, tried
    assert tried.num_ties <= 1, tried


@pytest.mark.skipif(not cpu.available(), reason="needs a C compiler")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_in_compiled_layers_a_request_has_the_bits_that_it_has_alone(name: str, tmp_path: Path) -> None:
    base = make_base(name, tmp_path / "base", hidden_size=128, head_dim=32)
    adapters = make_adapters(name, base, tmp_path)
    digests = lay_out(base, tmp_path / "store", adapters, dtype="bfloat16")
    names = [*adapters, ""]
    prompts = prompts_of(name, tuple(5 + 3 * index for index in range(len(names))))
    config = ShardConfig(
        name, str(base), "unix:/dev/null", dtype="bfloat16", max_total_tokens=128, step_tokens=40,
        adapter_store=str(tmp_path / "store"), max_active_adapters=3,
    )  # fmt: skip

    layers = [of for of in load_model(config).network.modules() if isinstance(of, FusedDecoderLayer)]
    assert layers and not any(layer.compiled_layer is None or layer.calls_parts for layer in layers)

    def given(which: list[int]) -> list[tuple[list[int], list[float]]]:
        chosen = requests_of([prompts[index] for index in which], [names[index] for index in which], digests)
        return [(output.token_ids, output.logprobs) for output in outputs_of(config, chosen)]

    together = given(list(range(len(names))))
    assert together == [given([index])[0] for index in range(len(names))]
    prompts = [prompts[-1]] * len(names)
    assert len({tuple(ids) for ids, _ in given(list(range(len(names))))}) == len(names), "each adapter changes the text"
