"""A model in a `.gguf` file: the folder made for it, and the tokens of the values that its tensors mean."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorikeet.shard import model as model_package
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.gguf.blocks import FORMATS
from lorikeet.shard.model.layers import PackedLinear, quantized_matrices
from lorikeet.shard.model.quantization.integers import IntegerLinear
from lorikeet.shard.startup.model_files import loaded_names
from tests import tiny
from tests.shard.engine.exactness import compare, drive, prompts_of
from tests.shard.model import test_invariance
from tests.shard.model.gguf.files import WRITTEN, answer_of, gguf_name, needs_tokenizers, write_model
from tests.shard.model.gguf.test_blocks import expected_values
from tests.shard.model.quantization.quantized_cases import LENGTHS, write

gguf = pytest.importorskip("gguf")
WIDE = {"hidden_size": 256, "intermediate_size": 256}


def made(tmp_path: Path, kind: str = "Q8_0", is_tied: bool = False, **values: Any) -> tuple[Path, Path]:
    """A plain folder, and the folder made for a file of the same model, without a tokenizer."""
    plain = tiny.make("llama", tmp_path / "plain", tokenizer=True, tie_word_embeddings=is_tied, **WIDE)
    write_model(plain, tmp_path / "tiny.gguf", kind, **values)
    answer = answer_of(tmp_path / "tiny.gguf", tmp_path / "made", needs_tokenizer=False)
    assert answer["path"] == str(tmp_path / "made")
    return plain, tmp_path / "made"


def ours(folder: Path, activations: str | None = "none") -> Model:
    return load_model(
        ShardConfig("tiny", str(folder), "unix:/dev/null", dtype="float32", quantize_activations=activations)
    )


def meant(plain: Path, path: Path, folder: Path) -> Any:
    """transformers' network with the values of the file, by the package's own functions."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    values = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        tensor = tensors[gguf_name(name)]
        values[name] = torch.from_numpy(expected_values(tensor.tensor_type.name, tensor.data).copy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # halves of a head alternate
            heads = values[name].reshape(4 if "q_proj" in name else 2, -1, 2, weight.shape[1])
            values[name] = heads.swapaxes(1, 2).reshape(weight.shape).contiguous()
    folder.mkdir()
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((plain / "config.json").read_text())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "Q8_0" else pytest.mark.long)
        for kind in (*FORMATS, "F16", "BF16", "F32")
        if kind in gguf.GGMLQuantizationType.__members__  # the package writes the file
    ],
)
def test_tokens_are_those_of_the_values_in_the_file(kind: str, tmp_path: Path) -> None:
    compare_tokens(kind, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_K", "Q6_K", "BF16"])
def test_tokens_in_the_layout_of_devices(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IntegerLinear, "is_on_device", True)
    monkeypatch.setattr(model_package, "check_batch_invariance", lambda *_: None)  # torch's products
    compare_tokens(kind, tmp_path)


def compare_tokens(kind: str, tmp_path: Path) -> None:
    types = {} if kind in WRITTEN else {"token_embd_weight": "Q8_0", "output_weight": "Q8_0"}
    plain, folder = made(tmp_path, kind, **types)
    prompts = prompts_of("llama", LENGTHS[:2])
    network = meant(plain, tmp_path / "tiny.gguf", tmp_path / "meant")
    expected = [write(network, prompt) for prompt in prompts]
    tried = compare("llama", expected, drive(ours(folder), prompts, step_tokens=64))
    assert not tried.differences and tried.worst_logprob < 1e-3 and tried.num_distinct >= 6, tried


def test_the_folder_has_what_the_file_says(tmp_path: Path) -> None:
    _, folder = made(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["hidden_size"]) == ("llama", "bfloat16", 256)
    assert loaded_names(folder, has_code=False) == ["config.json", "model.gguf"]
    assert not (folder / "tokenizer.json").exists()


@needs_tokenizers
def test_the_tokenizer_of_the_original_model(tmp_path: Path) -> None:
    plain, _ = made(tmp_path)
    assert "error" not in answer_of(tmp_path / "tiny.gguf", tmp_path / "whole")
    own, theirs = AutoTokenizer.from_pretrained(tmp_path / "whole"), AutoTokenizer.from_pretrained(plain)
    for text in ("the quick brown fox", "def main() -> None:\n    return 7", "naïve 漢字"):
        assert own(text).input_ids == theirs(text).input_ids
    assert own.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


@pytest.mark.long
@pytest.mark.parametrize("is_tied", [False, True])
def test_matrices_stay_integers(is_tied: bool, tmp_path: Path) -> None:
    plain, folder = made(tmp_path, "Q4_0", is_tied)
    model, reference = ours(folder, None), load_model(ShardConfig("m", str(plain), "unix:/dev/null"))
    matrices: list[Any] = quantized_matrices(model.network)
    assert len(matrices) == 3 * 7 + 1
    assert all(matrix.nbytes <= 0.63 * matrix.in_features * matrix.out_features for matrix in matrices)
    assert isinstance(model.network.lm_head, PackedLinear) and model.info.quantization == "gguf"
    assert not [module for module in model.network.modules() if isinstance(module, nn.Linear)]
    assert model.info.num_parameters == reference.info.num_parameters
    test_invariance.check(model)


@pytest.mark.long
def test_what_is_rejected(tmp_path: Path) -> None:
    plain = tiny.make("llama", tmp_path / "plain", tokenizer=True, **WIDE)
    write_model(plain, tmp_path / "far.gguf", metadata={"llama.rope.scaling.type": "yarn"})
    assert (
        "its positions are scaled (rope.scaling.type yarn)"
        in answer_of(tmp_path / "far.gguf", tmp_path / "far")["error"]
    )
    (tmp_path / "no.gguf").write_bytes(b"GGUX" + bytes(100))
    assert "cannot be read as a .gguf file" in answer_of(tmp_path / "no.gguf", tmp_path / "no")["error"]


@pytest.mark.long
def test_what_is_rejected_while_loading(tmp_path: Path) -> None:
    plain = tiny.make("llama", tmp_path / "plain", tokenizer=True, **WIDE)
    _, folder = made(tmp_path / "good")
    with pytest.raises(ValueError, match="quantised by gguf already, and int8 was asked for"):
        load_model(ShardConfig("tiny", str(folder), "unix:/dev/null", quantize="int8"))
    (folder / "model.gguf").unlink()
    write_model(plain, tmp_path / "more.gguf")
    (folder / "model.gguf").symlink_to(tmp_path / "more.gguf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"it has no tensor for model\.layers\.3\."):
        ours(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(
        ValueError, match=r"its tensor blk\.2\.\w+\.weight has no place in transformers' LlamaForCausalLM"
    ):
        ours(folder)
