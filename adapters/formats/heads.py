"""Medusa heads in an adapter's files: checked against the base, and cast for serving.

Files have the published format (Cai et al. 2024; LoRAX's `medusa_lm_head.safetensors`). The tensors determine the
number of heads and blocks and the version; a configuration that contradicts them only causes a warning.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lorikeet.adapters.errors import AdapterInvalid, HeadsError, NotServed
from lorikeet.adapters.formats.layout import is_finite, not_finite
from lorikeet.adapters.formats.peft_reading import Tensors
from lorikeet.adapters.medusa import format as files
from lorikeet.adapters.medusa.format import HeadsShape
from lorikeet.adapters.sources.base import HEADS_CONFIG, MAX_CONFIG_BYTES

KIND = "heads"
"""In SERVED_KINDS."""
MAX_HEADS = 32
MAX_BLOCKS = 8


@dataclass(frozen=True)
class ParsedHeads:
    """The heads of one file. Tensors are as the file holds them."""

    shape: HeadsShape
    tensors: Tensors
    warnings: tuple[str, ...]


def read(name: str, tensors: Tensors, config: bytes | None, output_shape: tuple[int, int] | None) -> ParsedHeads:
    """Heads from the file `name`, for a base whose output head is [V, H]. Only names and shapes are read.

    `config` is the content of config.json in the same folder, if any. Raises AdapterInvalid or NotServed.
    """
    warnings: list[str] = []
    try:
        ours = files.of_heads(tensors, name, warnings.append)
        shape = files.shape_of(ours, name)
    except HeadsError as error:
        raise AdapterInvalid(str(error)) from None
    _check(shape, name, output_shape, warnings.append)
    files.compare(_config(config, warnings.append), shape, HEADS_CONFIG, warnings.append)
    return ParsedHeads(shape, ours, tuple(warnings))


def lay_out(heads: ParsedHeads, vocab_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The served layout's tensors, contiguous. Raises AdapterInvalid for numbers that are not finite."""
    shape, laid_out = heads.shape, dict[str, torch.Tensor]()
    for head in range(shape.num_heads):
        for block in range(shape.num_layers):
            middle = f".{block}" if shape.num_layers > 1 else ""
            for part in ("weight", "bias"):
                name = f"{head}.{block}.linear.{part}"
                laid_out[f"heads.{head}{middle}.{part}"] = _cast(name, heads.tensors[name], dtype)
        if shape.vocab_size is not None:
            name = f"{head}.{shape.num_layers}.weight"
            laid_out[f"heads.{head}.output"] = resized(_cast(name, heads.tensors[name], dtype), vocab_size)
    return laid_out


def metadata(shape: HeadsShape) -> dict[str, int]:
    """For the metadata of the served layout."""
    return {"count": shape.num_heads, "version": shape.version, "layers": shape.num_layers}


def resized(matrix: torch.Tensor, num_rows: int) -> torch.Tensor:
    """matrix: [V', H]. Returns [num_rows, H]: missing rows repeat the first, which wins ties."""
    missing = num_rows - matrix.shape[0]
    if missing <= 0:
        return matrix[:num_rows].contiguous()
    return torch.cat([matrix, matrix[:1].expand(missing, -1)])


def _check(shape: HeadsShape, name: str, output_shape: tuple[int, int] | None, warn: Callable[[str], None]) -> None:
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


def _config(content: bytes | None, warn: Callable[[str], None]) -> dict[str, Any]:
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


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype)
    if not is_finite(cast):
        raise AdapterInvalid(not_finite(name, is_finite(tensor), dtype))
    return cast.contiguous()
