"""Adapters on quantised bases against PEFT on transformers' own quantised model, many in one batch."""

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from benchmarks.adapters_exact import Tried, compare, configs_of, lay_out, make_adapters, oracle, through_engine
from benchmarks.exact import prompts_of
from shard.config import ShardConfig
from tests import tiny
from tests.shard.model import test_quantized as quantized

pytestmark = quantized.pytestmark
LENGTHS = (5, 17, 33, 2, 12, 24, 9, 19, 3, 14)


@torch.no_grad()
def warm(folder: Path, method: str) -> Any:
    """transformers' own model; PEFT's DoRA fails on 8-bit weights that have not been used yet, and bitsandbytes loses
    the scales of those that are moved once they have.
    """
    network = quantized.theirs(folder, method)
    network(torch.tensor([[1]]))
    for module in network.modules():
        if type(module).__name__ == "Linear8bitLt":
            module.init_8bit_state = lambda: None
    return network


def ran(name: str, method: str, folder: Path) -> Tried:
    """Every kind of adapter, and the bare base, in one batch."""
    warnings.filterwarnings("ignore", category=peft.utils.warning.PeftWarning)
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set")
    base = tiny.make(name, folder / "base")
    configs = configs_of(name)
    adapters = make_adapters(base, folder / "adapters", configs, seed=1)
    chosen = [*configs, "", "dora"]
    prompts = prompts_of(name, LENGTHS[: len(chosen)])
    wanted = oracle(base, adapters, chosen, prompts, lambda path: warm(path, method))
    bare = oracle(base, {}, [""] * len(chosen), prompts, lambda path: warm(path, method))
    changed = [want.token_ids != own.token_ids for want, own, each in zip(wanted, bare, chosen, strict=True) if each]
    digests = lay_out(base, folder / "store", adapters)
    config = ShardConfig(
        name, str(base), "unix:/dev/null", dtype="float32", quantize=method, max_total_tokens=128, step_tokens=40,
        adapter_store=str(folder / "store"), max_active_adapters=3,
    )  # fmt: skip
    given = through_engine(config, prompts, [digests[each] if each else "" for each in chosen])
    tried = Tried(name, 3, len(chosen), share_changed=sum(changed) / len(changed))
    compare(tried, wanted, given, chosen)
    return tried


@pytest.mark.parametrize("method", quantized.FOUR_BITS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_peft_s_own_tokens_on_4_bits(name: str, method: str, tmp_path: Path) -> None:
    tried = ran(name, method, tmp_path)
    assert not tried.differences and tried.num_ties <= 1, tried
    assert tried.share_changed >= 0.9


def test_peft_s_own_tokens_on_8_bits_up_to_their_rounding(tmp_path: Path) -> None:
    """Whole prompts at once, as PEFT computes them here, are not what each row alone is: most tokens must be equal."""
    tried = ran("llama", "bitsandbytes", tmp_path)
    assert tried.share_changed >= 0.9
    assert tried.num_tokens >= 0.5 * 24 * tried.num_requests, tried
