"""Configurations of `.gguf` files as llama.cpp's conversion writes them: the network of the file's own folder computes
what the original model computes.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.model.gguf.configuration import llama3_parameters
from tests import tiny
from tests.shard.engine.exactness import compare, drive, oracle, prompts_of
from tests.shard.model.gguf.files import answer_of, write_model

pytest.importorskip("gguf")
LENGTHS = (5, 70)
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
MADE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama 3": ("llama3_rope", "llama", {}, {}),
    "llama wide heads": ("llama", "llama", {"head_dim": 32}, {}),
    "llama linear": ("llama", "llama", {"rope_parameters": LINEAR}, {}),
    "mistral": ("mistral", "llama", {"sliding_window": None}, {}),
    "qwen2.5": ("qwen2", "qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}, {}),
    "qwen3": ("qwen3", "qwen3", {}, {}),
    "gemma 2": (
        "gemma2", "gemma2",
        {"query_pre_attn_scalar": 24, "final_logit_softcapping": 20.0, "tie_word_embeddings": True}, {},
    ),
    "gemma 3": (
        "gemma3_text", "gemma3",
        {"query_pre_attn_scalar": 24,
         "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        {"gemma3.attention.sliding_window_pattern": 2},
    ),
}  # fmt: skip
"""The case of tiny.py, the architecture in the file, and what differs from the case and in the metadata."""


def factors(theta: float, dim: int, scaling: dict[str, float]) -> torch.Tensor:
    """The tensor that llama.cpp's conversion writes, by its formula, one number at a time. [dim / 2] float32."""
    actual = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (index / dim)
        rounds = scaling["original_max_position_embeddings"] / wavelength
        if rounds > scaling["high_freq_factor"]:
            actual.append(1.0)
        elif rounds < scaling["low_freq_factor"]:
            actual.append(scaling["factor"])
        else:
            share = (rounds - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
            actual.append(1 / ((1 - share) / scaling["factor"] + share))
    return torch.tensor(actual, dtype=torch.float32)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "gemma 3" else pytest.mark.long) for case in MADE]
)
def test_the_texts_of_the_original_model(case: str, tmp_path: Path) -> None:
    name, architecture, differs, metadata = MADE[case]
    plain = tiny.make(name, tmp_path / "plain", tokenizer=True, **differs)
    config = AutoConfig.from_pretrained(plain)
    tensors = {"rope_freqs.weight": factors(1e4, 16, config.rope_parameters)} if case == "llama 3" else {}
    path = tmp_path / "tiny.gguf"
    write_model(plain, path, "F32", metadata, architecture, tensors)
    assert "error" not in answer_of(path, tmp_path / "made", needs_tokenizer=False)
    prompts = prompts_of(name, LENGTHS)
    model = load_model(ShardConfig("m", str(tmp_path / "made"), "unix:/dev/null", dtype="float32"))
    tried = compare(name, oracle(plain, prompts, 128), drive(model, prompts, step_tokens=64))
    assert tried.exact and tried.num_distinct >= 5, tried


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 8.0, "original_max_position_embeddings": 8192},
        {"factor": 32.0, "original_max_position_embeddings": 8192},
        {"factor": 4.0, "original_max_position_embeddings": 6144},
    ],
)
def test_factors_become_the_parameters_that_they_were_made_from(scaling: dict[str, float]) -> None:
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}
    config = tiny.config_of("llama", hidden_size=256, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert llama3_parameters(config, factors(500000.0, 64, scaling)) == rope


@pytest.mark.parametrize("values", [torch.linspace(1, 8, 8), torch.full((8,), 0.5)], ids=["growing", "small"])
def test_factors_of_another_kind_are_rejected(values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"its tensor rope_freqs\.weight does not match rope_type llama3"):
        llama3_parameters(tiny.config_of("llama"), values)


@pytest.mark.long
def test_gemma_27b_scales_attention_by_its_hidden_size(tmp_path: Path) -> None:
    layers = ["sliding_attention", "full_attention"] * 23
    plain = tiny.make("gemma2", tmp_path / "plain", tokenizer=True, num_hidden_layers=46, layer_types=layers,
                      tie_word_embeddings=True)  # fmt: skip
    write_model(plain, tmp_path / "tiny.gguf", "F32", architecture="gemma2")
    assert "error" not in answer_of(tmp_path / "tiny.gguf", tmp_path / "made")
    assert json.loads((tmp_path / "made" / "config.json").read_text())["query_pre_attn_scalar"] == 64 // 4
