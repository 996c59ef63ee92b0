"""Medusa heads of an adapter's files: checked against the base, and cast for serving.

Files come as they were published (Cai et al. 2024; LoRAX's `medusa_lm_head.safetensors`). Heads, blocks and version are
told by the tensors; a configuration that says otherwise is known to be common, and only noted.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats.layout import is_finite, not_finite
from lorikeet.adapters.formats.reading import Tensors
from lorikeet.adapters.medusa import format as files
from lorikeet.adapters.medusa.errors import HeadsError
from lorikeet.adapters.medusa.format import HeadsShape
from lorikeet.adapters.sources.base import HEADS_CONFIG, MAX_CONFIG_BYTES

KIND = "heads"
"""Among the kinds of change that shards compute."""
MOST_HEADS = 32
MOST_BLOCKS = 8


@dataclass(frozen=True)
class FoundHeads:
    """The heads of one file. Tensors are as the file holds them."""

    shape: HeadsShape
    tensors: Tensors
    notes: tuple[str, ...]
    """What is odd about them and no fault, in sentences."""


def read(name: str, tensors: Tensors, config: bytes | None, output_shape: tuple[int, int] | None) -> FoundHeads:
    """Heads out of the file `name`, for a base whose output head is [V, H]. Only names and shapes are looked at.

    `config` is what lies beside as config.json, if anything does. Raises AdapterInvalid or NotServed.
    """
    notes: list[str] = []
    try:
        ours = files.of_heads(tensors, name, notes.append)
        shape = files.shape_of(ours, name)
    except HeadsError as error:
        raise AdapterInvalid(str(error)) from None
    _check(shape, name, output_shape, notes.append)
    files.compare(_config(config, notes.append), shape, HEADS_CONFIG, notes.append)
    return FoundHeads(shape, ours, tuple(notes))


def lay_out(heads: FoundHeads, vocab_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
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
            laid_out[f"heads.{head}.output"] = fitted(_cast(name, heads.tensors[name], dtype), vocab_size)
    return laid_out


def facts(shape: HeadsShape) -> dict[str, int]:
    """What the served layout's metadata say."""
    return {"count": shape.num_heads, "version": shape.version, "layers": shape.num_layers}


def fitted(matrix: torch.Tensor, num_rows: int) -> torch.Tensor:
    """matrix: [V', H]. Returns [num_rows, H]: rows that are missing repeat the first, which wins against its equals."""
    missing = num_rows - matrix.shape[0]
    if missing <= 0:
        return matrix[:num_rows].contiguous()
    return torch.cat([matrix, matrix[:1].expand(missing, -1)])


def _check(shape: HeadsShape, name: str, output_shape: tuple[int, int] | None, note: Callable[[str], None]) -> None:
    if output_shape is None:
        raise NotServed("the base has no output head that Medusa heads could speak through")
    vocab_size, hidden_size = output_shape
    if shape.hidden_size != hidden_size:
        raise AdapterInvalid(
            f"made for another base: the heads in {name} take hidden rows of {shape.hidden_size}, the base has "
            f"{hidden_size}"
        )
    if shape.num_heads > MOST_HEADS or shape.num_layers > MOST_BLOCKS:
        raise NotServed(
            f"{shape.num_heads} heads of {shape.num_layers} blocks ({name}) are not served, only up to {MOST_HEADS} of "
            f"{MOST_BLOCKS}"
        )
    if shape.vocab_size == 0:
        raise AdapterInvalid(f"the output matrices in {name} have no rows")
    if shape.vocab_size is not None and shape.vocab_size != vocab_size:
        note(f"the heads in {name} know {shape.vocab_size} tokens, the base has {vocab_size}")


def _config(content: bytes | None, note: Callable[[str], None]) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        found = json.loads(content) if len(content) <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        note(f"{HEADS_CONFIG} cannot be read, which heads do without")
        return {}
    return found


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = tensor.to(dtype)
    if not is_finite(cast):
        raise AdapterInvalid(not_finite(name, is_finite(tensor), dtype))
    return cast.contiguous()
