"""A checkpoint of a random model on disk, in safetensors files of a few gigabytes, never more than one of them held.
Knows transformers' names and files. Does not know who reads it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.cuda.engines import write_config
from benchmarks.cuda.setup import LlamaShape

FILE_BYTES = 4 << 30
SPREAD = 0.02
"""Of random weights, as transformers draws them."""


def write(folder: Path, shape: LlamaShape, dtype: str, device: str, file_bytes: int = FILE_BYTES) -> int:
    """Write configuration and weights, drawn on `device`. Returns their bytes. Nothing stays in the file cache."""
    write_config(shape, folder, dtype)
    files = list(_split(_shapes(shape), getattr(torch, dtype).itemsize, file_bytes))
    places: dict[str, str] = {}
    num_bytes = 0
    for number, names in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {each: _drawn(each, size, dtype, device) for each, size in names.items()}
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    forget(folder)
    return num_bytes


def forget(folder: Path) -> None:
    """Let the file cache drop what it has of a folder's weights, so that they come from disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _shapes(shape: LlamaShape) -> dict[str, torch.Size]:
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(LlamaConfig(**shape.config()))
    return {name: parameter.shape for name, parameter in network.named_parameters()}  # a tied one once


def _split(shapes: dict[str, torch.Size], itemsize: int, file_bytes: int) -> Iterator[dict[str, torch.Size]]:
    """One after the other into files, each of at least one tensor."""
    names: dict[str, torch.Size] = {}
    taken = 0
    for name, size in shapes.items():
        num_bytes = size.numel() * itemsize
        if names and taken + num_bytes > file_bytes:
            yield names
            names, taken = {}, 0
        names[name] = size
        taken += num_bytes
    yield names


def _drawn(name: str, size: torch.Size, dtype: str, device: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=kind)
    return torch.randn(size, dtype=kind, device=device).mul_(SPREAD).cpu()
