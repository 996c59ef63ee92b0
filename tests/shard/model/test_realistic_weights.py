"""Every architecture in bfloat16 and float16, with weights like those of trained models: no further from float32 than
transformers in the same format, in every column of logits, with fused modules and without.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.model.fusion import parts
from lorikeet.shard.model.fusion.kernels import CpuKernels
from lorikeet.shard.model.fusion.parts import FusedNorm
from lorikeet.shard.model.kernels import cpu
from lorikeet.shard.system import comparison
from tests import tiny

MOST, MOST_OF_COLUMN = 1.5, 2.5
"""Errors allowed as multiples of transformers' own: on average, and of one column of logits."""
MOST_OF_EXPERTS = 4.0
"""The same of one column where roundings may choose other experts for a token."""
FEW = ("llama", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "gpt_oss", "gpt2")
"""Architectures of `make test`: each form of a norm, sinks, biases."""
CASES = [
    pytest.param(name, dtype, marks=() if name in FEW else pytest.mark.long)
    for name in tiny.VARIANTS
    for dtype in ("bfloat16", "float16")
]
CHUNK = 35
IDS = torch.randint(1, tiny.VOCAB, (2 * CHUNK,), generator=torch.Generator().manual_seed(5))
IDS[0] = 0  # its activations are massive


def make(name: str, folder: Path, dtype: str) -> Path:
    """A model of heads so wide that compiled attention takes them, where its configuration allows."""
    config = tiny.VARIANTS[name][1]
    wider: dict[str, Any] = {"head_dim": 32} if "head_dim" in config else {}
    if "hidden_size" in config and ("rope_parameters" not in config or "head_dim" in config):
        wider["hidden_size"] = 128
    return tiny.make_realistic(name, folder, getattr(torch, dtype), **wider)


@torch.inference_mode()
def logits_of_transformers(name: str, folder: Path, dtype: torch.dtype) -> torch.Tensor:
    # falcon's eager attention adds its alibi twice
    attention = "sdpa" if name.startswith("falcon") else "eager"
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    logits: torch.Tensor = network(IDS[None], use_cache=False).logits[0].float()
    return logits


def ours(folder: Path, dtype: str, fusions: str) -> tuple[torch.Tensor, int]:
    """Logits in two chunks, and the number of fused norms."""
    config = ShardConfig("m", str(folder), "unix:/dev/null", dtype=dtype, fusions=fusions, max_total_tokens=128)
    model = load_model(config)
    model.allocate_kv(8)
    chunks = []
    for start in range(0, len(IDS), CHUNK):
        model.inputs.fill([Segment(start, CHUNK, range(8))], IDS[start : start + CHUNK], torch.arange(CHUNK))
        chunks.append(model.forward().clone())
    return torch.cat(chunks), sum(isinstance(module, FusedNorm) for module in model.network.modules())


def errors(logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """[V] root mean square error of each column as a share of its size."""
    return comparison.channel_sizes(logits - exact) / comparison.channel_sizes(exact)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_errors_are_those_of_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    make(name, tmp_path, dtype)
    exact = logits_of_transformers(name, tmp_path, torch.float32)
    allowed = errors(logits_of_transformers(name, tmp_path, getattr(torch, dtype)), exact)
    assert allowed.isfinite().all() and allowed.mean() < 0.3
    has_experts = "num_experts_per_tok" in tiny.VARIANTS[name][1]
    for fusions in ("auto", "none"):
        shares = errors(ours(tmp_path, dtype, fusions)[0], exact) / allowed
        assert shares.mean() <= MOST
        assert shares.max() <= (MOST_OF_EXPERTS if has_experts else MOST_OF_COLUMN)


@pytest.mark.skipif(not cpu.available(), reason="needs a C compiler")
@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3_text", "olmo2"])
def test_a_norm_of_another_form_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are fused by the kernel of their form. Without it such a model passes no test, and its norms stay plain."""
    make(name, tmp_path, "bfloat16")
    exact = logits_of_transformers(name, tmp_path, torch.float32)
    assert ours(tmp_path, "bfloat16", "auto")[1] > 0
    monkeypatch.setattr(CpuKernels, "forms", CpuKernels.forms[:1])
    assert ours(tmp_path, "bfloat16", "auto")[1] == 0
    monkeypatch.setattr(parts.comparison, "has_same_roundings", lambda shares, dtype: True)
    logits, num_fused = ours(tmp_path, "bfloat16", "auto")
    assert num_fused > 0
    if name != "olmo2":  # whose form rounds differently, and is as good
        allowed = errors(logits_of_transformers(name, tmp_path, torch.bfloat16), exact)
        assert (errors(logits, exact) / allowed).max() > MOST_OF_COLUMN
