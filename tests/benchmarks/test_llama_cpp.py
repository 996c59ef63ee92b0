"""The files that llama.cpp reads hold the model and the adapters that this server reads."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.models import adapter_files, random_llama
from benchmarks.models.gguf_files import adapter_file, model_file
from tests.shard.model.gguf.files import answer_of


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama.llama_tiny(tmp_path_factory.mktemp("llama") / "base")


def tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in gguf.GGUFReader(path).tensors}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0"])
def test_a_model_file_can_be_served_and_adds_no_token_to_prompts(base: Path, tmp_path: Path, kind: str) -> None:
    """Otherwise prompts would have 257 tokens."""
    path = model_file(base, kind)
    assert "error" not in answer_of(path, tmp_path / "folder")
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    kinds = {each.tensor_type.name for each in gguf.GGUFReader(path).tensors if len(each.shape) == 2}
    assert kinds == {kind}


def test_an_adapter_file_changes_the_model_file_as_the_adapter_does_the_model(base: Path, tmp_path: Path) -> None:
    """B A, added to the weights of the file, is the weight of transformers' model plus B A, in the file's order."""
    (folder,) = adapter_files.make(base, tmp_path, ["adapter"], adapter_files.ALL, rank=4)
    made, plain = tensors(adapter_file(folder, base)), tensors(model_file(base, "BF16"))
    saved, weights = load_file(folder / adapter_files.WEIGHTS), load_file(base / "model.safetensors")
    assert len(made) == len(saved) == 2 * 2 * len(adapter_files.ALL)
    for name, stored in (("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("mlp.down_proj", "ffn_down")):
        module, key = f"model.layers.1.{name}", f"blk.1.{stored}.weight"
        a, b = (saved[f"base_model.model.{module}.lora_{matrix}.weight"] for matrix in "AB")
        merged, order = weights[f"{module}.weight"] + b @ a, rows_of(plain[key], weights[f"{module}.weight"])
        found = torch.from_numpy(plain[key] + made[f"{key}.lora_b"] @ made[f"{key}.lora_a"])
        assert torch.allclose(found, merged[order], atol=0.01, rtol=0.01)
        assert not torch.allclose(found, torch.from_numpy(plain[key]), atol=0.01, rtol=0.01)


def rows_of(stored: np.ndarray[Any, Any], weight: torch.Tensor) -> list[int]:
    """Which row of the model each row of the file is: the nearest one, as the file is rounded."""
    order: list[int] = torch.cdist(torch.from_numpy(stored), weight).argmin(1).tolist()
    assert sorted(order) == list(range(len(weight)))
    return order
