"""Files of Medusa heads, both versions: reads them, counting everything from the tensors, and writes LoRAX's layout.

Version 1 heads end in their own output matrix, version 2 heads share the base model's.
"""

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorikeet.adapters.errors import HeadsError, first_line
from lorikeet.adapters.sources.base import CONFIG, HEADS, HEADS_CONFIG, WEIGHTS

HEADS_FILE, PICKLED_FILE = HEADS
ADAPTER_FILES = (CONFIG, WEIGHTS[0])
ADAPTER_EXTRAS = ("chat_template.jinja", "tokenizer_config.json")
"""Files that a server reads from an adapter's folder in addition to the weights."""

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_MATRIX = re.compile(r"(\d+)\.(\d+)\.weight")


@dataclass(frozen=True)
class HeadsShape:
    """The shape that all heads of one file have."""

    num_heads: int
    num_layers: int
    """Residual blocks of each head; some published files have none."""
    hidden_size: int
    vocab_size: int | None = None
    """Rows of each head's own output matrix (version 1); None if the base model's is shared (version 2)."""

    @property
    def version(self) -> int:
        return 2 if self.vocab_size is None else 1


@dataclass(frozen=True)
class HeadsFile:
    """The heads in one file."""

    shape: HeadsShape
    tensors: dict[str, Tensor]
    """`{head}.{block}.linear.weight` [H, H], `{head}.{block}.linear.bias` [H], and in version 1
    `{head}.{blocks}.weight` [V, H]."""
    base_name: str | None = None
    """The base model named in the configuration."""


def read(folder: Path, warn: Callable[[str], None]) -> HeadsFile:
    """The heads in `folder`. `warn` receives contradictions between configuration and tensors, and ignored tensors.

    Raises HeadsError.
    """
    tensors = _read_tensors(folder)
    ours = of_heads(tensors, str(folder), warn)
    shape = shape_of(ours, str(folder))
    config = _read_config(folder)
    compare(config, shape, str(folder / HEADS_CONFIG), warn)
    name = config.get("base_model_name_or_path")
    return HeadsFile(shape, ours, name if isinstance(name, str) else None)


def of_heads(tensors: Mapping[str, Tensor], where: str, warn: Callable[[str], None]) -> dict[str, Tensor]:
    """The tensors whose names are those of heads."""
    ours = {name: tensor for name, tensor in tensors.items() if _BLOCK.fullmatch(name) or _MATRIX.fullmatch(name)}
    if extra := sorted(set(tensors) - set(ours)):
        warn(f"{where}: {len(extra)} tensors belong to no head and are ignored, among them {extra[0][:80]}")
    return ours


def shape_of(tensors: dict[str, Tensor], where: str) -> HeadsShape:
    """Count heads and blocks. Raises HeadsError if a head differs from the others or a tensor is missing."""
    blocks = {match.group(1, 2) for name in tensors if (match := _BLOCK.fullmatch(name))}
    matrices = {match.group(1, 2) for name in tensors if (match := _MATRIX.fullmatch(name))}
    if not blocks and not matrices:
        raise HeadsError(f"{where} holds no Medusa heads: no tensor is named like 0.0.linear.weight or 0.0.weight")
    num_heads = 1 + max(int(head) for head, _ in blocks | matrices)
    num_layers = 1 + max((int(layer) for _, layer in blocks), default=-1)
    if num_heads > len(tensors) or num_layers > len(tensors):
        raise HeadsError(f"{where} names more heads or blocks than it holds tensors: {len(tensors)}")
    has_matrix = f"0.{num_layers}.weight" in tensors
    sample = tensors[f"0.{num_layers}.weight"] if has_matrix else tensors.get("0.0.linear.weight")
    if sample is None or sample.dim() != 2:
        raise HeadsError(f"{where} lacks 0.0.linear.weight as a matrix")
    shape = HeadsShape(num_heads, num_layers, sample.shape[1], sample.shape[0] if has_matrix else None)
    shapes = expected_shapes(shape)
    for name, size in shapes.items():
        if name not in tensors:
            raise HeadsError(f"{where} has {num_heads} heads of {num_layers} blocks but lacks {name}")
        if tuple(tensors[name].shape) != size:
            raise HeadsError(f"{where}: {name} has shape {list(tensors[name].shape)}, the others need {list(size)}")
    if extra := sorted(set(tensors) - set(shapes)):
        raise HeadsError(f"{where}: {extra[0]} does not belong to heads of {num_layers} blocks")
    return shape


def expected_shapes(shape: HeadsShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of heads of this shape."""
    size, shapes = shape.hidden_size, dict[str, tuple[int, ...]]()
    for head in range(shape.num_heads):
        for layer in range(shape.num_layers):
            shapes[f"{head}.{layer}.linear.weight"] = (size, size)
            shapes[f"{head}.{layer}.linear.bias"] = (size,)
        if shape.vocab_size is not None:
            shapes[f"{head}.{shape.num_layers}.weight"] = (shape.vocab_size, size)
    return shapes


def write(folder: Path, heads: HeadsFile) -> None:
    """Write heads and configuration as LoRAX reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": heads.base_name,
        "medusa_num_heads": heads.shape.num_heads,
        "medusa_num_layers": heads.shape.num_layers,
        "version": str(heads.shape.version),
    }
    (folder / HEADS_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(heads.tensors.items())}
    save_file(tensors, folder / HEADS_FILE, metadata={"format": "pt"})


def join(folder: Path, adapter: Path) -> None:
    """Copy the LoRA adapter's files to the heads in `folder`, so that one name stands for both."""
    for name in (*ADAPTER_FILES, *ADAPTER_EXTRAS):
        if (adapter / name).is_file() and adapter.resolve() != folder.resolve():
            shutil.copyfile(adapter / name, folder / name)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if not folder.is_dir():
        raise HeadsError(f"there is no folder {folder}")
    try:
        if (folder / HEADS_FILE).is_file():
            return dict(load_file(folder / HEADS_FILE))
        for path in sorted(folder.glob("*.safetensors")):
            if path.name not in ADAPTER_FILES and _names_heads(path):
                return dict(load_file(path))
    except SafetensorError as error:
        raise HeadsError(f"the heads in {folder} are not a complete safetensors file: {first_line(error)}") from None
    if (folder / PICKLED_FILE).is_file():
        return _read_pickle(folder / PICKLED_FILE)
    raise HeadsError(f"{folder} holds no Medusa heads: there is no {HEADS_FILE}")


def _names_heads(path: Path) -> bool:
    with safe_open(path, framework="pt") as file:
        return any(_BLOCK.fullmatch(name) or _MATRIX.fullmatch(name) for name in file.keys())  # noqa: SIM118


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors only: a pickle with code is rejected."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about what it rejects
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise HeadsError(f"{path} is refused: a pickle may hold only tensors: {first_line(error)}") from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise HeadsError(f"{path} is not a dictionary of tensors")
    return dict(loaded)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / HEADS_CONFIG
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise HeadsError(f"{path} is not JSON: {first_line(error)}") from None
    return config if isinstance(config, dict) else {}


def compare(config: Mapping[str, Any], shape: HeadsShape, where: str, warn: Callable[[str], None]) -> None:
    """Warn about contradictions; the tensors take precedence, because published configurations are often wrong."""
    counted = {"medusa_num_heads": shape.num_heads, "medusa_num_layers": shape.num_layers}
    if "version" in config:
        counted["version"] = shape.version
    for name, value in counted.items():
        setting = config.get(name)
        if setting is not None and str(setting).removesuffix(".0") != str(value):
            warn(f"{where} says {name} is {str(setting)[:40]}, the tensors say {value}; the tensors take precedence")
