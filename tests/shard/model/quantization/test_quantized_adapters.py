"""Adapters on quantised bases against PEFT on transformers' own quantised model, many in one batch."""

import warnings
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from lorikeet.shard.config import ShardConfig
from tests.shard.engine.adapter_exactness import (
    Tried,
    compare,
    configs_of,
    lay_out,
    load_plain,
    make_adapters,
    oracle,
    through_engine,
)
from tests.shard.engine.exactness import prompts_of
from tests.shard.model.quantization import packed_checkpoints
from tests.shard.model.quantization.quantized_cases import (
    FOUR_BITS,
    HQQ,
    IN_FILES,
    base,
    exact_activations,
    needs,
    of_values,
    theirs,
)

LENGTHS = (5, 17, 33, 2, 12, 24, 9, 19, 3, 14)


def ran(name: str, method: str, folder: Path, dense: Path | None = None) -> Tried:
    """Every kind of adapter, and the bare base, in one batch. `dense`: a plain base of equal weights, for PEFT."""
    warnings.filterwarnings("ignore", category=peft.utils.warning.PeftWarning)
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
    served = folder / "packed" if method in IN_FILES else folder / "plain"
    # PEFT has no biases of B on hqq's layers
    configs = {
        adapter_name: config
        for adapter_name, config in configs_of(name).items()
        if not (config.lora_bias and method in HQQ)
    }
    adapters = make_adapters(folder / "plain", folder / "adapters", configs, seed=1)
    chosen = [*configs, "", "dora"]
    prompts = prompts_of(name, LENGTHS[: len(chosen)])
    load = load_plain if dense else lambda path: theirs(path, method)
    expected = oracle(dense or served, adapters, chosen, prompts, load)
    bare = oracle(dense or served, {}, [""] * len(chosen), prompts, load)
    changed = [want.token_ids != own.token_ids for want, own, name in zip(expected, bare, chosen, strict=True) if name]
    digests = lay_out(served, folder / "store", adapters)
    config = ShardConfig(
        name, str(served), "unix:/dev/null", dtype="float32", quantize=method, max_total_tokens=128, step_tokens=40,
        adapter_store=str(folder / "store"), max_active_adapters=3,
        quantize_activations=exact_activations(method),
    )  # fmt: skip
    outputs = through_engine(config, prompts, [digests[name] if name else "" for name in chosen])
    tried = Tried(name, 3, len(chosen), share_changed=sum(changed) / len(changed))
    compare(tried, expected, outputs, chosen)
    return tried


@pytest.mark.parametrize(
    ("method", "name"),
    [pytest.param(*case.values, name, marks=case.marks) for case in needs(*FOUR_BITS) for name in ("llama", "gpt2")]
    + [pytest.param(*case.values, "llama", marks=case.marks) for case in needs(*HQQ)],
)
def test_peft_s_own_tokens(name: str, method: str, tmp_path: Path) -> None:
    base(name, tmp_path / "plain")
    tried = ran(name, method, tmp_path)
    assert not tried.differences and tried.num_ties <= 1, tried
    assert tried.share_changed >= 0.9


@pytest.mark.parametrize(
    "method", [*needs("bitsandbytes", "fp8"), *(pytest.param(name, marks=pytest.mark.long) for name in IN_FILES)]
)
def test_peft_s_own_tokens_on_a_plain_base_of_equal_weights(method: str, tmp_path: Path) -> None:
    """PEFT has no adapters on these layers, or rounds more than asked for."""
    plain = base("llama", tmp_path / "plain")
    if method in IN_FILES:
        packed_checkpoints.write(plain, tmp_path / "packed", tmp_path / "dense", method)
    else:
        network = AutoModelForCausalLM.from_pretrained(plain)
        for name, module in of_values(plain, method).named_modules():
            if name.endswith("proj"):
                weight = module.weight.dequantize(torch.float32) if method == "fp8" else module.weight
                network.get_submodule(name).weight.data = weight.data
        network.save_pretrained(tmp_path / "dense")
    tried = ran("llama", method, tmp_path, tmp_path / "dense")
    assert not tried.differences and tried.num_ties <= 1, tried
    assert tried.share_changed >= 0.9
