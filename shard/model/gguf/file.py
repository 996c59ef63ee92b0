"""A model in a `.gguf` file, or in several (`-00001-of-00003.gguf`): its metadata and its tensors, read row by row."""

import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lorikeet.proto.gguf.header import Header, TensorPlace
from lorikeet.proto.quantization import GGUF_NAME
from lorikeet.shard.model.gguf.blocks import read_blocks
from lorikeet.shard.model.kernels.integer import IntegerWeight

PLAIN = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64, "I8": torch.int8,
    "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""Types of tensors that are numbers without blocks."""
ROPE_SCALING = "rope.scaling.type"
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of what frequencies of positions are divided by, in files of Llama 3.x."""
SPLIT_COUNT, SPLIT_NUMBER, SPLIT_TENSORS = "split.count", "split.no", "split.tensors.count"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufFile:
    """An open file, or the parts of one. Tensors are read when they are asked for."""

    def __init__(self, path: str | Path) -> None:
        """`path`: of the file or of its first part. Raises ValueError with a reason if it cannot be served."""
        first = self._opened(Path(path))
        count = first.value(SPLIT_COUNT) or 1
        self.paths = [Path(path), *_later_parts(Path(path), first, count)]
        self._headers = [first, *map(self._opened, self.paths[1:])]
        self.tensors: dict[str, TensorPlace] = {}
        self._paths: dict[str, Path] = {}
        for number in range(len(self._headers)):
            self._add(number, count)
        if count > 1 and len(self.tensors) != first.value(SPLIT_TENSORS):
            raise ValueError(f"its parts have {len(self.tensors)} tensors, not {first.value(SPLIT_TENSORS)}")
        self.architecture = str(self.value("general.architecture"))
        if (scaling := self.of_architecture(ROPE_SCALING)) not in (None, "none", "linear"):
            raise ValueError(f"its positions are scaled ({ROPE_SCALING} {scaling}): use the original checkpoint")

    def _opened(self, path: Path) -> Header:
        try:
            return Header.of_file(path)
        except (OSError, ValueError) as failure:
            raise ValueError(f"{path} cannot be read as a .gguf file: {failure}") from None

    def _add(self, number: int, count: int) -> None:
        """Add the tensors of a part."""
        path, header = self.paths[number], self._headers[number]
        if count > 1 and (header.value(SPLIT_NUMBER), header.value(SPLIT_COUNT)) != (number, count):
            raise ValueError(f"{path} is not part {number + 1} of {count} of the same model")
        twice = self.tensors.keys() & header.tensors.keys()
        if twice:
            raise ValueError(f"several of its parts have the tensor {min(twice)}")
        self.tensors |= header.tensors
        self._paths |= dict.fromkeys(header.tensors, path)

    def write_metadata(self, path: Path, without: Collection[str] = ()) -> None:
        """Write a file with the metadata and the names of the tensors, all of them empty: transformers reads it without
        knowing types of tensors, or parts. without: keys that are left out.
        """
        header = self._headers[0]
        keys = [key for key in header.keys if key not in without]
        names = [name.encode() for name in self.tensors]
        tensors = [struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 0, 0, 0) for name in names]
        counts = struct.pack("<IQQ", 3, len(tensors), len(keys))
        path.write_bytes(b"GGUF" + counts + header.entries(keys) + b"".join(tensors) + bytes(64))

    def value(self, key: str) -> Any:
        """A value of the metadata, None if there is none."""
        return self._headers[0].value(key)

    def of_architecture(self, key: str) -> Any:
        """A value of the metadata under the architecture's name, None if there is none."""
        return self.value(f"{self.architecture}.{key}")

    def kind(self, name: str) -> str:
        """The type of a tensor."""
        return self.tensors[name].kind.name

    def shape(self, name: str) -> tuple[int, ...]:
        """[..., in], as of a tensor in torch."""
        return self.tensors[name].shape

    def integers(self, name: str, start: int = 0, stop: int | None = None) -> IntegerWeight:
        """Rows `start` to `stop` of a tensor in blocks: [rows, in]."""
        return read_blocks(self.kind(name), self._bytes(name, start, stop))

    def dense(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows `start` to `stop` of the first axis of any tensor, in float32."""
        kind, shape = self.kind(name), self.shape(name)
        stored = self._bytes(name, start, stop)
        values = stored.view(PLAIN[kind]).float() if kind in PLAIN else read_blocks(kind, stored).dense()
        return values.view(-1, *shape[1:]) if len(shape) > 1 else values.flatten()

    def _bytes(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        """[rows, bytes of a row] uint8, of rows of the last axis. `start` and `stop` count along the first axis."""
        place = self.tensors[name]
        num_rows = place.shape[0] if len(place.shape) > 1 else 1
        size = place.num_bytes // num_rows
        num_bytes = (min(num_rows, num_rows if stop is None else stop) - start) * size
        stored = np.fromfile(self._paths[name], np.uint8, num_bytes, offset=place.offset + start * size)
        if len(stored) != num_bytes:
            raise ValueError(f"its tensor {name} is cut off: the file has become shorter")
        width = place.shape[-1] // place.kind.size * place.kind.num_bytes
        return torch.from_numpy(stored).view(-1, width)


def _later_parts(path: Path, first: Header, count: int) -> list[Path]:
    """Paths of the parts after the first of `count`."""
    if count == 1:
        return []
    if (number := first.value(SPLIT_NUMBER)) != 0:
        raise ValueError(f"it is part {number + 1} of {count}: give the first part")
    return part_paths(path, count)[1:]


def part_paths(path: Path, count: int) -> list[Path]:
    """Paths of all `count` parts of which `path` is the first. Raises ValueError for a name without numbers."""
    match = _PART.fullmatch(path.name)
    if path.name == GGUF_NAME:  # in a folder made for the model
        stem = path.stem
    elif match and (int(match["number"]), int(match["count"])) == (1, count):
        stem = match["stem"]
    else:
        raise ValueError(f"it is the first of {count} parts: it must be called NAME-00001-of-{count:05}.gguf")
    return [path, *(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1))]
