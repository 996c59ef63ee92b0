"""Checkpoints of random models, in several files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.cuda.check import start as checkpoint
from benchmarks.cuda.setup import TINY


@pytest.mark.parametrize("is_tied", [False, True])
def test_transformers_reads_what_is_written(tmp_path: Path, is_tied: bool) -> None:
    shape = replace(TINY, is_tied=is_tied)
    num_bytes = checkpoint.write(tmp_path, shape, "bfloat16", "cpu", file_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) > num_bytes
    network = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = dict(network.named_parameters())
    assert index["weight_map"].keys() == found.keys()
    assert num_bytes == sum(parameter.nbytes for parameter in found.values())
    drawn = found["model.layers.1.mlp.up_proj.weight"].detach().float()
    assert float(drawn.std()) == pytest.approx(network.config.initializer_range, rel=0.1)
