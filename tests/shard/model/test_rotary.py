"""Rotary tables hold what the model's own code computes, and stand in only where the position is all it reads."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lorikeet.shard.model.rotary import RotaryTable, fix_rotary, rotary_width, tabulate_rotary
from tests import tiny

NUM_POSITIONS = 100


def network_of(kind: str, folder: Path) -> torch.nn.Module:
    tiny.make(kind, folder)
    config = AutoConfig.from_pretrained(folder)
    fix_rotary(config, NUM_POSITIONS)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["llama", "llama3_rope", "phi3_longrope", "stablelm", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_gives_the_bits_of_the_plain_module(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    network, like = network_of(kind, tmp_path), torch.empty(1, dtype=dtype)
    plain = network.model.rotary_emb
    tabulate_rotary(network, NUM_POSITIONS, like)
    table = network.model.rotary_emb
    assert isinstance(table, RotaryTable)
    positions = torch.tensor([[0, 99, 3, 3, 57, 1, 0]])
    for expected, got in zip(plain(like, position_ids=positions), table(like, positions), strict=True):
        assert got.dtype == dtype
        assert torch.equal(expected, got)


def test_one_that_reads_the_layers_kind_stays(tmp_path: Path) -> None:
    network = network_of("gemma3_text", tmp_path)
    tabulate_rotary(network, NUM_POSITIONS, torch.empty(1))
    assert not any(isinstance(module, RotaryTable) for module in network.modules())


@pytest.mark.parametrize(("kind", "width"), [("llama", 16), ("stablelm", 8), ("gpt2", None)])
def test_rotary_width_of_a_head(kind: str, width: int | None, tmp_path: Path) -> None:
    network = network_of(kind, tmp_path)
    assert rotary_width(network) == width
    tabulate_rotary(network, NUM_POSITIONS, torch.empty(1))
    assert rotary_width(network) == width
