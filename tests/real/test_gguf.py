"""`.gguf` files: the log likelihood of a text, next to that of the values that the package `gguf` reads from the same
file, and to llama.cpp's.

What needs llama.cpp's programs runs where LLAMA_CPP names the folder with `llama-quantize`, `llama-imatrix` and
`llama-perplexity`, built from the sources in the package llama-cpp-python, or where they are in PATH.
"""

import json
import math
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.model.gguf.blocks import FORMATS
from lorikeet.shard.model.gguf.file import GgufFile
from tests.real import likelihood, models
from tests.real.results import record
from tests.shard.model.gguf import test_memory as memory
from tests.shard.model.gguf.files import answer_of, gguf_name, write_model

pytestmark = pytest.mark.real
gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "base"
"""A trained model with rows of 256 and 768 weights."""
TOOLS = os.environ.get("LLAMA_CPP") or str(Path(shutil.which("llama-quantize") or "").parent)
needs_tools = pytest.mark.skipif(
    not (Path(TOOLS) / "llama-quantize").exists(), reason="neither LLAMA_CPP nor PATH has llama.cpp's programs"
)
CODE = ("shard/model/layers.py", "shard/model/loader.py", "tests/tiny.py")
"""Texts of the kind that the demo model knows."""
NUM_TOKENS = 1024
MADE_BY = {
    **{kind: kind for kind in ("Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "TQ1_0", "TQ2_0",
                               "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")},
    "Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "IQ2_S": "IQ2_M",
}  # fmt: skip
"""The argument of llama-quantize that makes all matrices of one type."""
BY_TENSOR = ("MXFP4", "NVFP4")
"""Types that llama-quantize writes for named tensors only."""
WITHOUT_EMBEDDING = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S")
"""Types that need statistics of a tensor's inputs, which an embedding does not have."""
CHUNK = 512
"""Tokens of a context of llama-perplexity, of which it counts the second half."""
NUM_CHUNKS = 2


def run(tool: str, *arguments: object) -> str:
    command = [str(Path(TOOLS) / tool), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as llama.cpp's conversion writes it, with statistics of a text."""
    folder = tmp_path_factory.mktemp("code")
    write_model(DEMO, folder / "plain.gguf", "F32")
    (folder / "text.py").write_text("".join((ROOT / path).read_text() for path in CODE))
    run("llama-imatrix", "-m", folder / "plain.gguf", "-f", folder / "text.py", "-o", folder / "statistics", "-t", 1)
    return folder


class Rounded(nn.Module):
    """A linear layer whose inputs are rounded to 8 bits in blocks of 32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Returns [..., out]."""
        blocks = x.unflatten(-1, (-1, 32))
        scales = blocks.abs().amax(-1, keepdim=True) / 127
        return ((blocks / scales).round() * scales).nan_to_num(0.0).flatten(-2) @ self.weight.T


def reference(path: Path) -> Any:
    """transformers' network of the demo model with a file's values, its matrices in blocks Rounded."""
    file, network = GgufFile(path), models.network(DEMO, "float32", attn_implementation="eager")
    by_package = {tensor.name: tensor for tensor in _readable(path)}
    processor = TENSOR_PROCESSORS["llama"](config=network.config.to_dict())
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.Linear) or "weight" in dict(module.named_parameters(recurse=False)):
            stored = gguf_name(f"{name}.weight") if name != "lm_head" else "token_embd.weight"
            tensor = by_package.get(stored)
            values = (
                file.dense(stored).numpy()
                if tensor is None
                else gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            )
            weight = torch.from_numpy(processor.process(values, stored).weights.copy())
            if isinstance(module, nn.Linear) and file.kind(stored) in FORMATS:
                network.set_submodule(name, Rounded(weight))
            else:
                module.weight = nn.Parameter(weight)
    return network


def _readable(path: Path) -> list[Any]:
    """Tensors that the package reads; test_blocks.py compares the others with ggml's C."""
    try:
        tensors = gguf.GGUFReader(path).tensors
    except ValueError:  # it does not know the file's type
        return []
    return [tensor for tensor in tensors if tensor.tensor_type in gguf.quants._type_traits]


def record_file(name: str, served: likelihood.Served, of_values: float | None = None) -> None:
    computed = "the file's blocks, activations in blocks of 32"
    record(f"`.gguf` {name}", computed, served, float(likelihood.reference("smollm2").mean()), of_values)


def loaded(folder: Path, dtype: str) -> Model:
    return load_model(ShardConfig("m", str(folder), "unix:/dev/null", dtype=dtype))


def served(path: Path, folder: Path) -> Path:
    answer = answer_of(path, folder)
    assert "error" not in answer, answer
    return folder


@needs_tools
@pytest.mark.parametrize("kind", [*MADE_BY, *BY_TENSOR])
def test_each_type_of_tensors(kind: str, code: Path, tmp_path: Path) -> None:
    path = tmp_path / "made.gguf"
    if kind in BY_TENSOR:
        lower = kind.lower()
        tensors = ("--tensor-type", f"attn={lower}", "--tensor-type", f"ffn={lower}", "--token-embedding-type", lower)
        run("llama-quantize", *tensors, code / "plain.gguf", path, "Q8_0", 1)
    else:
        embedding = ("--token-embedding-type", "q8_0") if kind in WITHOUT_EMBEDDING else ()
        options = ("--pure", "--imatrix", code / "statistics", *embedding)
        run("llama-quantize", *options, code / "plain.gguf", path, MADE_BY[kind], 1)
    file = GgufFile(path)
    assert [file.kind(f"blk.{layer}.ffn_down.weight") for layer in range(6)] == [kind] * 6
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    ids = torch.tensor(tokenizer((code / "text.py").read_text()).input_ids[:NUM_TOKENS])
    (ours,) = likelihood.of_model(loaded(served(path, tmp_path / "folder"), "float32"), [ids])
    mean, expected = ours.mean(), likelihood.of_network(reference(path), ids).mean()
    assert abs(mean - expected) <= 0.003, (float(mean), float(expected))


@needs_tools
@pytest.mark.parametrize("mixture", ["Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"])
def test_the_likelihood_of_llama_cpp(mixture: str, tmp_path: Path) -> None:
    path = tmp_path / "made.gguf"
    run("llama-quantize", "--allow-requantize", models.gguf_file("smollm2"), path, mixture, 1)
    said = run(
        "llama-perplexity", "-m", path, "-f", likelihood.TEXT, "-c", CHUNK, "-b", CHUNK, "--chunks", NUM_CHUNKS,
        "-t", 1, "-ctk", "f32", "-ctv", "f32", "-fa", "off",
    )  # fmt: skip
    match = re.search(r"PPL = ([\d.]+)", said)
    assert match is not None, said
    folder = served(path, tmp_path / "folder")
    ids, model = likelihood.token_ids(folder), loaded(folder, "float32")
    *chunks, whole = likelihood.of_model(model, [*ids[: NUM_CHUNKS * CHUNK].split(CHUNK), ids])
    ours = torch.cat([chunk[CHUNK // 2 :] for chunk in chunks]).mean()
    assert abs(ours - math.log(float(match[1]))) <= 0.003, (float(ours), match[1])
    record_file(mixture, likelihood.Served(whole, likelihood.bytes_of(model)))


@cache
def folder_of(name: str) -> Path:
    """The folder that the launcher makes for a model's file."""
    path = models.CACHE / name / "served"
    shutil.rmtree(path, ignore_errors=True)
    return served(models.gguf_file(name), path)


@pytest.mark.parametrize("name", models.FILES)
def test_published_files_are_as_good_as_their_values(name: str) -> None:
    """The same weights, with activations that are not rounded."""
    folder = folder_of(name)
    assert torch.equal(likelihood.token_ids(folder), likelihood.ids_of(name))
    ours = likelihood.of_served(name, folder, "float32")
    plain = float(likelihood.reference(name).mean())
    assert ours.mean <= plain + 0.004, (ours.mean, plain)
    if name == "smollm2":
        record_file("Q4_1", ours, plain)


@pytest.mark.parametrize("name", models.FILES)
def test_published_files_are_streamed(name: str, tmp_path: Path) -> None:
    small = memory.made(tmp_path)
    for dtype in ("float32", "bfloat16"):
        memory.assert_streamed(folder_of(name), dtype, small)


def test_what_the_metadata_of_published_files_says() -> None:
    gemma = json.loads((folder_of("gemma3") / "config.json").read_text())
    assert gemma["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    rope = gemma["rope_parameters"]
    assert (rope["sliding_attention"]["rope_theta"], rope["full_attention"]["rope_theta"]) == (10000.0, 1e6)
    assert (gemma["sliding_window"], gemma["query_pre_attn_scalar"], gemma["head_dim"]) == (512, 256, 256)
    assert gemma["tie_word_embeddings"]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder_of("gemma3"))
    assert tokenizer("a  b").input_ids[0] == tokenizer.bos_token_id == 2
    smollm = AutoTokenizer.from_pretrained(folder_of("smollm2"))
    prompt = smollm.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert len(smollm(prompt).input_ids) == len(smollm(prompt.replace("Hi", "")).input_ids) + 1
    ends = json.loads((folder_of("smollm2") / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends) == {2, 0}
