"""An adapter's weight files as named tensors: safetensors mapped in place, or a `.bin` read without running its code.

A `.gguf` file is only mapped. `changes` finds the module of each tensor.
"""

import hashlib
import json
import math
import mmap
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lorikeet.adapters.errors import AdapterChanged, AdapterInvalid, AdapterTooLarge, first_line
from lorikeet.adapters.formats import header
from lorikeet.adapters.sources.base import MAX_CONFIG_BYTES, WEIGHTS, FileHead

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "U8": torch.uint8,
}  # fmt: skip
MAX_INDEX = 8 << 20
MAX_PICKLE = 2 << 20
"""The part of a `.bin` that describes tensors: each takes about 250 bytes, and a hundred thousand take seconds."""
_OLD_FORMAT = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
"""The beginning of every file of torch before 1.6."""
_MAP_NORESERVE = 0x4000
"""Linux's flag; Python has no name for it before 3.13."""


@dataclass
class Weights:
    """The contents of an adapter's weight files."""

    tensors: dict[str, torch.Tensor]
    hash: Any
    """SHA-256 over the bytes of the files."""
    num_bytes: int
    share_no_memory: bool
    """No two tensors share memory, so that an address identifies a tensor."""
    has_values: bool = True
    """Unless only the headers of the files were read."""
    memory: mmap.mmap | None = None
    """The bytes of a `.gguf` file, whose tensors `gguf_file` reads."""
    _files: list[tuple[Path, int, tuple[int, ...]]] = field(default_factory=list)

    def check_unchanged(self) -> None:
        """Raises AdapterChanged if a file has changed since it was read."""
        for path, descriptor, version in self._files:
            if _version(os.fstat(descriptor)) != version:
                raise AdapterChanged(f"{path.name} changed while it was read")


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def opened(folder: Path, limit: int, names: Sequence[str] = ()) -> Iterator[Weights]:
    """The weights in `folder`, of at most `limit` bytes: in the files `names`, by default an adapter's. Tensors are
    valid inside only.

    Raises AdapterInvalid or AdapterTooLarge with a sentence that names the file.
    """
    names = names or weight_files(folder)
    weights = Weights({}, hashlib.sha256(), 0, names[0].endswith((".safetensors", ".gguf")))
    try:
        for name in names:
            path = folder / name
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise AdapterInvalid(f"cannot read {name}: {error.strerror}") from None
            weights._files.append((path, descriptor, _version(os.fstat(descriptor))))
            _add(weights, name, descriptor, limit)
        yield weights
    finally:
        weights.tensors.clear()
        weights.memory = None
        for _, descriptor, _ in weights._files:
            os.close(descriptor)


def read_small(path: Path, limit: int = MAX_CONFIG_BYTES + 1) -> bytes:
    """At most the first `limit` bytes of a file. Raises AdapterInvalid."""
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise AdapterInvalid(f"{path.name} cannot be read: {error.strerror}") from None


def header_only(heads: Mapping[str, FileHead]) -> Weights:
    """Tensors of the shapes in these headers, without values: only names, shapes and addresses may be used.

    Raises AdapterInvalid. Files without a header (`.bin`) are skipped.
    """
    weights = Weights({}, hashlib.sha256(), sum(head.size for head in heads.values()), True, has_values=False)
    for name, head in heads.items():
        if not name.endswith(".safetensors"):
            continue
        infos = header.parse(head.content, head.size, name)
        # address space without memory: nothing is read from it
        memory = mmap.mmap(-1, max(1, head.size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        weights.tensors.update({key: _view(memory, info) for key, info in infos.items()})
    return weights


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files: one, or the parts that an index names."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _parts(index, name)
    raise AdapterInvalid(f"there is no {' and no '.join(WEIGHTS)}")


def _parts(index: Path, name: str) -> list[str]:
    stem, dot, ending = name.rpartition(".")
    try:
        if index.stat().st_size > MAX_INDEX:
            raise AdapterTooLarge(f"{index.name} is larger than {MAX_INDEX} bytes")
        parts = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise AdapterInvalid(f"{index.name} is not an index of weight files") from None
    if not parts or not all(isinstance(part, str) and part.endswith(dot + ending) for part in parts):
        raise AdapterInvalid(f"{index.name} names no {ending} files")
    for part in parts:
        if "/" in part or not part.startswith(f"{stem}-") or not (index.parent / part).is_file():
            raise AdapterInvalid(f"{index.name} names {part[:80]!r}, which is not a part of this adapter")
    return parts


def _add(weights: Weights, name: str, descriptor: int, limit: int) -> None:
    size = os.fstat(descriptor).st_size
    weights.num_bytes += size
    if weights.num_bytes > limit:
        raise AdapterTooLarge(f"the weights have more than {limit} bytes")
    if size == 0:
        raise AdapterInvalid(f"{name} is empty")
    try:
        # a private copy-on-write mapping: torch wants memory that it could write to
        memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):
        raise AdapterInvalid(f"{name} is not a file that can be read") from None
    tensors: dict[str, torch.Tensor] = {}
    if name.endswith(".gguf"):
        weights.memory = memory
    elif name.endswith(".safetensors"):
        tensors = _mapped(memory, size, name)
    else:
        tensors = _unpickled(Path(f"/proc/self/fd/{descriptor}"), size, name)
    weights.hash.update(memory)
    if twice := weights.tensors.keys() & tensors.keys():
        raise AdapterInvalid(f"{name} and another part both hold {min(twice)!r}")
    weights.tensors.update(tensors)


def _mapped(memory: mmap.mmap, size: int, name: str) -> dict[str, torch.Tensor]:
    length = header.header_len(memory[: header.PREFIX], size, name)
    infos = header.parse(memory[: header.PREFIX + length], size, name)
    return {key: _view(memory, info) for key, info in infos.items()}


def _view(memory: mmap.mmap, info: header.TensorInfo) -> torch.Tensor:
    dtype, count = DTYPES[info.dtype], math.prod(info.shape)
    if count == 0:
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=info.start).view(info.shape)


def _unpickled(path: Path, size: int, name: str) -> dict[str, torch.Tensor]:
    _check_archive(path, size, name)
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        problem = "is broken or holds more than tensors; its code was not run"
        raise AdapterInvalid(f"{name} {problem}: convert it to safetensors") from None
    except MemoryError:
        raise
    except Exception as error:
        if "can't allocate memory" in str(error):  # torch's
            raise MemoryError from None
        raise AdapterInvalid(f"{name} cannot be read: {first_line(error)[:200]}") from None
    if not isinstance(tensors, dict) or not tensors:
        raise AdapterInvalid(f"{name} holds no dictionary of tensors")
    for key, tensor in tensors.items():
        if not isinstance(key, str) or not isinstance(tensor, torch.Tensor):
            raise AdapterInvalid(f"{name} holds something other than named tensors: {str(key)[:60]!r}")
        if tensor.layout != torch.strided or tensor.dtype not in DTYPES.values() or tensor.device.type != "cpu":
            raise AdapterInvalid(f"{key[:80]!r} of {name} is not a dense CPU tensor of numbers")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise AdapterInvalid(f"{key[:80]!r} of {name} repeats its values, and would take more memory than the file")
    return {key: tensor.detach() for key, tensor in tensors.items()}


def _check_archive(path: Path, size: int, name: str) -> None:
    """Accept only archives without compression, whose content cannot be larger than the file, and files of torch before
    1.6, whose tensors are read from the file once they are allocated.
    """
    if read_small(path, len(_OLD_FORMAT)) == _OLD_FORMAT:
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise AdapterInvalid(f"{name} is broken or not a file of torch: convert it to safetensors") from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise AdapterInvalid(f"{name} is compressed, which torch never does")
    if any(entry.filename.endswith("data.pkl") and entry.file_size > MAX_PICKLE for entry in entries):
        raise AdapterInvalid(f"{name} describes its tensors in more than {MAX_PICKLE} bytes")
    if sum(entry.file_size for entry in entries) > size:
        raise AdapterInvalid(f"{name} claims to hold more bytes than it has")


def check_floating(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises AdapterInvalid for a tensor of whole numbers."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    for key, tensor in tensors.items():
        if not tensor.is_floating_point():
            known = ", ".join(name for name, dtype in DTYPES.items() if dtype.is_floating_point)
            raise AdapterInvalid(f"{key[:200]!r} has type {names[tensor.dtype]}; weights come as {known}")


def not_finite(where: str, was_finite: bool, dtype: torch.dtype) -> str:
    """The message for numbers that are not finite in `dtype`; `was_finite` is whether they were in the file."""
    if was_finite:
        return f"a number of {where} is too large for {str(dtype).removeprefix('torch.')}"
    return f"it holds numbers that are not finite (NaN or infinite), in {where}"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are."""
    if tensor.numel() == 0:
        return True
    lowest, highest = tensor.aminmax()
    return math.isfinite(lowest.item()) and math.isfinite(highest.item())
