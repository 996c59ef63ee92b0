"""Parses and writes safetensors headers. The parser trusts nothing in the file and checks every name, type and offset.

Reads no tensor, and imports no torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorikeet.adapters.errors import AdapterInvalid, AdapterTooLarge

PREFIX = 8
"""Bytes at the start of a file that hold the header's length, little endian."""
MAX_HEADER = 32 << 20
_ALIGNMENT = 8
MAX_TENSORS = 200_000
MAX_NAME = 512
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U8": 1}
"""The types of weights, and of the indices that some kinds of adapters have."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type, shape and location of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """From the beginning of the file, in bytes."""
    num_bytes: int


def header_len(prefix: bytes, file_size: int, name: str) -> int:
    """How many bytes the header takes after the first eight. `name` is for messages."""
    if file_size == 0:
        raise AdapterInvalid(f"{name} is empty")
    if len(prefix) < PREFIX:
        raise AdapterInvalid(f"{name} is not a safetensors file: it has {file_size} bytes")
    length = int.from_bytes(prefix[:PREFIX], "little")
    if length > file_size - PREFIX:
        problem = f"its header claims {length} bytes, the file has {file_size}"
        raise AdapterInvalid(f"{name} is truncated or not a safetensors file: {problem}")
    if length > MAX_HEADER:
        raise AdapterTooLarge(f"the header of {name} claims {length} bytes; the limit is {MAX_HEADER}")
    return length


def parse(head: bytes, file_size: int, name: str) -> dict[str, TensorInfo]:
    """Every tensor of the file whose first bytes (prefix and header, at least) are `head`.

    Raises AdapterInvalid unless the tensors fill the file exactly, without gap or overlap.
    """
    length = header_len(head, file_size, name)
    begin = PREFIX + length
    entries = _entries(head[PREFIX:begin], name)
    entries.pop("__metadata__", None)
    if not entries:
        raise AdapterInvalid(f"{name} holds no tensors")
    if len(entries) > MAX_TENSORS:
        raise AdapterTooLarge(f"{name} holds {len(entries)} tensors; the limit is {MAX_TENSORS}")
    tensors = {key: _info(key, entry, begin, name) for key, entry in entries.items()}
    _check_locations(tensors, begin, file_size, name)
    return tensors


def compose(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Prefix and header for tensors of these types and shapes, and the order of their values: larger types first, so
    that each is aligned.
    """
    order = sorted(tensors, key=lambda name: (-ITEM_SIZES[tensors[name][0]], name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name in order:
        dtype, shape = tensors[name]
        end = start + math.prod(shape) * ITEM_SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(PREFIX, "little") + text, order


def _entries(text: bytes, name: str) -> dict[str, Any]:
    try:
        entries = json.loads(text.decode(), object_pairs_hook=lambda pairs: _unique(pairs, name))
    except (ValueError, RecursionError):
        raise AdapterInvalid(f"the header of {name} is not JSON") from None
    if not isinstance(entries, dict):
        raise AdapterInvalid(f"the header of {name} is not an object")
    return entries


def _unique(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise AdapterInvalid(f"the header of {name} contains a name twice")
    return values


def _info(key: str, entry: Any, begin: int, name: str) -> TensorInfo:
    if len(key) > MAX_NAME or not key.isprintable():
        raise AdapterInvalid(f"{name} holds a tensor whose name is too long or not printable: {key[:60]!r}")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise AdapterInvalid(f"the header of {name} does not give type, shape and offsets of {key!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise AdapterInvalid(f"{key!r} of {name} has type {str(dtype)[:20]}; weights come as {', '.join(ITEM_SIZES)}")
    if not _are_counts(shape) or len(shape) > 8 or not _are_counts(offsets) or len(offsets) != 2:
        raise AdapterInvalid(f"the header of {name} gives {key!r} an invalid shape or invalid offsets")
    num_bytes = math.prod(shape) * ITEM_SIZES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        has = offsets[1] - offsets[0]
        raise AdapterInvalid(f"{key!r} of {name} has shape {shape}, so {num_bytes} bytes, but its offsets give {has}")
    return TensorInfo(dtype, tuple(shape), begin + offsets[0], num_bytes)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _check_locations(tensors: dict[str, TensorInfo], begin: int, file_size: int, name: str) -> None:
    reached = begin
    for key, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if info.start != reached:
            raise AdapterInvalid(f"the header of {name} is invalid: {key!r} overlaps another tensor or leaves a gap")
        reached += info.num_bytes
    if reached > file_size:
        raise AdapterInvalid(f"{name} is truncated: its tensors need {reached} bytes, the file has {file_size}")
    if reached < file_size:
        raise AdapterInvalid(f"{name} has {file_size - reached} bytes beyond its last tensor")
