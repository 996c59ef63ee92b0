"""The files that llama.cpp reads hold the model and the adapters that this server reads."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from benchmarks.llama_cpp.files import adapter_file, model_file
from benchmarks.models import adapter_files, random_llama
from tests.shard.model.gguf.files import permuted, write_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama.llama_tiny(tmp_path_factory.mktemp("llama") / "base")


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q4_0"])
def test_a_model_file_is_what_the_server_is_tested_with(base: Path, tmp_path: Path, kind: str) -> None:
    write_model(base, tmp_path / "tested.gguf", kind)
    tested, made = (gguf.GGUFReader(path) for path in (tmp_path / "tested.gguf", model_file(base, kind)))
    expected = {tensor.name: (tensor.tensor_type, tensor.data) for tensor in tested.tensors}
    assert {tensor.name for tensor in made.tensors} == set(expected)
    for tensor in made.tensors:
        kind_of, data = expected[tensor.name]
        assert tensor.tensor_type == kind_of
        assert np.array_equal(tensor.data, data)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "llama.rope.freq_base", "llama.attention.head_count"):
        assert made.fields[key].contents() == tested.fields[key].contents()


def test_an_adapter_file_has_the_products_of_the_adapter(base: Path, tmp_path: Path) -> None:
    (folder,) = adapter_files.make(base, tmp_path, ["adapter"], adapter_files.ALL, rank=4)
    tensors = gguf.GGUFReader(adapter_file(folder, base)).tensors
    made = {tensor.name: tensor.data.astype(np.float32) for tensor in tensors}
    saved = load_file(folder / adapter_files.WEIGHTS)
    assert len(made) == len(saved) == 2 * 2 * len(adapter_files.ALL)
    for module, stored, num_heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2), ("down_proj", "ffn_down", 0)):
        (name,) = [name for name in saved if "layers.1." in name and f"{module}.lora_A" in name]
        a, b = saved[name], saved[name.replace("lora_A", "lora_B")]
        expected = (permuted(b, num_heads) if num_heads else b) @ a
        found = made[f"blk.1.{stored}.weight.lora_b"] @ made[f"blk.1.{stored}.weight.lora_a"]
        assert np.allclose(found, expected.numpy(), atol=2e-3)
