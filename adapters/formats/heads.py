"""Medusa heads: their files, what is served of them, and the reference that computes with them (`MedusaHeads`).

Files have the published format (Cai et al. 2024; LoRAX's `medusa_lm_head.safetensors`). The tensors determine the
number of heads and blocks and the version; a configuration that contradicts them only causes a warning. Version 1 heads
end in their own output matrix, version 2 heads share the base model's.

A hidden row is the input of the base model's output head, after the final norm. The row that gives the token at
position t + 1 gives head h's draft token for position t + 2 + h.
"""

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from lorikeet.adapters.errors import AdapterInvalid, HeadsError, NotServed, first_line
from lorikeet.adapters.formats.weights import check_floating, is_finite, not_finite
from lorikeet.adapters.sources.base import CONFIG, HEADS, HEADS_CONFIG, MAX_CONFIG_BYTES, WEIGHTS

HEADS_FILE, PICKLED_FILE = HEADS
ADAPTER_FILES = (CONFIG, WEIGHTS[0])
ADAPTER_EXTRAS = ("chat_template.jinja", "tokenizer_config.json")
"""Files that a server reads from an adapter's folder in addition to the weights."""

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_MATRIX = re.compile(r"(\d+)\.(\d+)\.weight")


@dataclass(frozen=True)
class MedusaShape:
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

    shape: MedusaShape
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


def shape_of(tensors: dict[str, Tensor], where: str) -> MedusaShape:
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
    shape = MedusaShape(num_heads, num_layers, sample.shape[1], sample.shape[0] if has_matrix else None)
    shapes = expected_shapes(shape)
    for name, size in shapes.items():
        if name not in tensors:
            raise HeadsError(f"{where} has {num_heads} heads of {num_layers} blocks but lacks {name}")
        if tuple(tensors[name].shape) != size:
            raise HeadsError(f"{where}: {name} has shape {list(tensors[name].shape)}, the others need {list(size)}")
    if extra := sorted(set(tensors) - set(shapes)):
        raise HeadsError(f"{where}: {extra[0]} does not belong to heads of {num_layers} blocks")
    return shape


def expected_shapes(shape: MedusaShape) -> dict[str, tuple[int, ...]]:
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


def compare(config: Mapping[str, Any], shape: MedusaShape, where: str, warn: Callable[[str], None]) -> None:
    """Warn about contradictions; the tensors take precedence, because published configurations are often wrong."""
    counted = {"medusa_num_heads": shape.num_heads, "medusa_num_layers": shape.num_layers}
    if "version" in config:
        counted["version"] = shape.version
    for name, value in counted.items():
        setting = config.get(name)
        if setting is not None and str(setting).removesuffix(".0") != str(value):
            warn(f"{where} says {name} is {str(setting)[:40]}, the tensors say {value}; the tensors take precedence")


HEADS_KIND = "heads"
"""In SERVED_KINDS."""
MAX_HEADS = 32
MAX_BLOCKS = 8


@dataclass(frozen=True)
class ParsedHeads:
    """The heads of one file. Tensors are as the file holds them."""

    shape: MedusaShape
    tensors: Mapping[str, torch.Tensor]
    warnings: tuple[str, ...]


def parse_heads(
    name: str, tensors: Mapping[str, torch.Tensor], config: bytes | None, output_shape: tuple[int, int] | None
) -> ParsedHeads:
    """Heads from the file `name`, for a base whose output head is [V, H]. Only names and shapes are read.

    `config` is the content of config.json in the same folder, if any. Raises AdapterInvalid or NotServed.
    """
    warnings: list[str] = []
    check_floating(tensors)
    try:
        ours = of_heads(tensors, name, warnings.append)
        shape = shape_of(ours, name)
    except HeadsError as error:
        raise AdapterInvalid(str(error)) from None
    _check_heads(shape, name, output_shape, warnings.append)
    compare(_heads_config(config, warnings.append), shape, HEADS_CONFIG, warnings.append)
    return ParsedHeads(shape, ours, tuple(warnings))


def served_names(shape: MedusaShape) -> dict[str, str]:
    """The names in the served layout of all tensors of a file of this shape."""
    names: dict[str, str] = {}
    for name in expected_shapes(shape):
        head, block, *part = name.split(".")
        middle = f".{block}" if shape.num_layers > 1 else ""
        names[name] = f"heads.{head}{middle}.{part[1]}" if part[0] == "linear" else f"heads.{head}.output"
    return names


def lay_out_heads(heads: ParsedHeads, vocab_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The served layout's tensors, contiguous. Raises AdapterInvalid for numbers that are not finite."""
    laid_out: dict[str, torch.Tensor] = {}
    for name, served in served_names(heads.shape).items():
        tensor = _cast_heads(name, heads.tensors[name], dtype)
        laid_out[served] = resized(tensor, vocab_size) if served.endswith(".output") else tensor
    return laid_out


def heads_metadata(shape: MedusaShape) -> dict[str, int]:
    """For the metadata of the served layout."""
    return {"count": shape.num_heads, "version": shape.version, "layers": shape.num_layers}


def resized(matrix: torch.Tensor, num_rows: int) -> torch.Tensor:
    """matrix: [V', H]. Returns [num_rows, H]: missing rows repeat the first, which wins ties."""
    missing = num_rows - matrix.shape[0]
    if missing <= 0:
        return matrix[:num_rows].contiguous()
    return torch.cat([matrix, matrix[:1].expand(missing, -1)])


def _check_heads(
    shape: MedusaShape, name: str, output_shape: tuple[int, int] | None, warn: Callable[[str], None]
) -> None:
    if output_shape is None:
        raise NotServed("the base has no output head, which Medusa heads need")
    vocab_size, hidden_size = output_shape
    if shape.hidden_size != hidden_size:
        problem = f"the heads in {name} take hidden rows of {shape.hidden_size}, the base has {hidden_size}"
        raise AdapterInvalid(f"made for another base: {problem}")
    if shape.num_heads > MAX_HEADS or shape.num_layers > MAX_BLOCKS:
        size = f"{shape.num_heads} heads of {shape.num_layers} blocks ({name})"
        raise NotServed(f"{size} are not served, only up to {MAX_HEADS} of {MAX_BLOCKS}")
    if shape.vocab_size == 0:
        raise AdapterInvalid(f"the output matrices in {name} have no rows")
    if shape.vocab_size is not None and 2 * shape.vocab_size < vocab_size:
        # served, each matrix has a row per token of the base
        problem = f"the output matrices in {name} have {shape.vocab_size} rows, the base's vocabulary {vocab_size}"
        raise AdapterInvalid(f"made for another base: {problem}")
    if shape.vocab_size is not None and shape.vocab_size != vocab_size:
        warn(f"the heads in {name} know {shape.vocab_size} tokens, the base has {vocab_size}")


def _heads_config(content: bytes | None, warn: Callable[[str], None]) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        values = json.loads(content) if len(content) <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        warn(f"{HEADS_CONFIG} cannot be read and is ignored")
        return {}
    return values


def _cast_heads(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype)
    if not is_finite(cast):
        raise AdapterInvalid(not_finite(name, is_finite(tensor), dtype))
    return cast.contiguous()


OutputHead = Callable[[Tensor], Tensor]
"""From hidden rows [S, H] to the base model's logits [S, V]."""


class MedusaHeads(nn.Module):
    """All heads of one set. Untrained heads propose the base model's own prediction: their blocks add nothing."""

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.hidden_size
        self.weights = nn.ParameterList(torch.zeros(shape.num_heads, size, size) for _ in range(shape.num_layers))
        """Per block [heads, H out, H in]."""
        self.biases = nn.ParameterList(torch.zeros(shape.num_heads, size) for _ in range(shape.num_layers))
        """Per block [heads, H]."""
        vocab_size = shape.vocab_size
        self.matrices = None if vocab_size is None else nn.Parameter(torch.zeros(shape.num_heads, vocab_size, size))
        """[heads, V, H], version 1 only."""

    @classmethod
    def of(cls, file: HeadsFile) -> "MedusaHeads":
        """The heads of a file, in float32 regardless of the file's dtype."""
        heads = cls(file.shape)
        heads.load(file.tensors)
        return heads

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of a file's tensors, by name."""
        for name, tensor in self._named():
            tensor.copy_(tensors[name])

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a file of these heads, by name."""
        return {name: tensor.detach().to(dtype) for name, tensor in self._named()}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Views of all tensors with their names in a file."""
        for head in range(self.shape.num_heads):
            for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
                yield f"{head}.{layer}.linear.weight", weight[head]
                yield f"{head}.{layer}.linear.bias", bias[head]
            if self.matrices is not None:
                yield f"{head}.{self.shape.num_layers}.weight", self.matrices[head]

    def forward(self, rows: Tensor) -> Tensor:
        """Hidden rows [S, H] → rows [S, heads, H], which an output head turns into logits."""
        assert rows.dim() == 2 and rows.shape[1] == self.shape.hidden_size
        x = rows.expand(self.shape.num_heads, -1, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + silu(torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)))
        return x.transpose(0, 1)

    def logits(self, rows: Tensor, output_head: OutputHead) -> Tensor:
        """Hidden rows [S, H] → every head's logits [S, heads, V]."""
        x = self(rows.to(next(self.parameters()).dtype))
        if self.matrices is None:
            return output_head(x.flatten(0, 1).to(rows.dtype)).unflatten(0, x.shape[:2])
        return torch.stack([linear(x[:, head], matrix) for head, matrix in enumerate(self.matrices)], dim=1)

    def propose(self, rows: Tensor, output_head: OutputHead, vocab_size: int | None = None) -> Tensor:
        """Hidden rows [S, H] → ids [S, heads]: each head's most likely token, among the first `vocab_size` if given."""
        return self.logits(rows, output_head)[..., :vocab_size].argmax(-1)

    def propose_one(self, head: int, rows: Tensor, output_head: OutputHead, vocab_size: int | None = None) -> Tensor:
        """Hidden rows [S, H] → ids [S] of one head, as `propose` gives them."""
        x = rows.to(next(self.parameters()).dtype)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + silu(linear(x, weight[head], bias[head]))
        logits = output_head(x.to(rows.dtype)) if self.matrices is None else linear(x, self.matrices[head])
        return logits[:, :vocab_size].argmax(-1)
