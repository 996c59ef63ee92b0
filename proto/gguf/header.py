"""The header of a `.gguf` file: its metadata, and where its tensors lie.

A file may come from anybody. Every count, length and place is compared with the size of the file before it is used.
"""

import mmap
import os
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, Self

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
MAX_DIMENSIONS = 4
LEAST_ENTRY, LEAST_TENSOR = 13, 32
"""Bytes of the shortest entry of the metadata, and of the shortest description of a tensor."""
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Formats of struct by the number of a value's type."""
UINT32, STRING, ARRAY = 4, 8, 9


class TensorType(NamedTuple):
    """A type of tensors: a row is a sequence of blocks."""

    name: str
    size: int
    """Values of a block."""
    num_bytes: int


TYPES = {
    0: TensorType("F32", 1, 4), 1: TensorType("F16", 1, 2), 30: TensorType("BF16", 1, 2), 28: TensorType("F64", 1, 8),
    24: TensorType("I8", 1, 1), 25: TensorType("I16", 1, 2), 26: TensorType("I32", 1, 4), 27: TensorType("I64", 1, 8),
    2: TensorType("Q4_0", 32, 18), 3: TensorType("Q4_1", 32, 20), 6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24), 8: TensorType("Q8_0", 32, 34), 10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110), 12: TensorType("Q4_K", 256, 144), 13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210), 15: TensorType("Q8_K", 256, 292), 16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74), 18: TensorType("IQ3_XXS", 256, 98), 19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18), 21: TensorType("IQ3_S", 256, 110), 22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136), 29: TensorType("IQ1_M", 256, 56), 34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66), 39: TensorType("MXFP4", 32, 17), 40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18), 42: TensorType("Q2_0", 64, 18),
}  # fmt: skip
"""By ggml's numbers."""
NOT_IN_FILES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Numbers of types that ggml has removed, or writes to no file."""


class TensorPlace(NamedTuple):
    """A tensor of a file."""

    kind: TensorType
    shape: tuple[int, ...]
    """As of a tensor in torch: rows lie in the last axis."""
    offset: int
    """In bytes, from the start of the file."""
    num_bytes: int


class Header:
    """The header of one file. Values of the metadata are decoded when they are read."""

    def __init__(self, content: bytes | mmap.mmap, num_bytes: int) -> None:
        """`content`: the file or its beginning. `num_bytes`: of the file. Raises ValueError for a header that is broken
        or not supported, or longer than `content`.
        """
        self.num_bytes, self._data, self._at = num_bytes, content, 0
        num_tensors, num_entries = self._counts()
        self.entries_at = self._at
        self._values: dict[str, tuple[int, int]] = {}
        """Type and place of each value."""
        for _ in range(num_entries):
            self._entry()
        self.entries_end = self._at
        alignment = self._alignment()
        places = [self._tensor() for _ in range(num_tensors)]
        start = self._at + -self._at % alignment
        self.tensors = self._placed(places, start, alignment)

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Raises ValueError, and OSError for a file that cannot be opened."""
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if not num_bytes:
                raise ValueError("it is empty")
            return cls(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ), num_bytes)

    @property
    def keys(self) -> list[str]:
        """Keys of the metadata, in their order."""
        return list(self._values)

    def entries(self, keys: Collection[str]) -> bytes:
        """Entries of the metadata as stored."""
        # before a value are its key, after 8 bytes of length, and 4 bytes of type
        starts = [at - 4 - len(key.encode()) - 8 for key, (_, at) in self._values.items()]
        places = zip(self._values, starts, [*starts[1:], self.entries_end], strict=True)
        return b"".join(self._data[start:end] for key, start, end in places if key in keys)

    def value(self, key: str) -> Any:
        """A value of the metadata, None if there is none. Raises ValueError for text that is no UTF-8."""
        if key not in self._values:
            return None
        kind, self._at = self._values[key]
        return self._read(kind, key)

    def _counts(self) -> tuple[int, int]:
        """Numbers of tensors and of entries of the metadata."""
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS and int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS:
            raise ValueError("it is big-endian: use the little-endian file, or convert the model again")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, and only {VERSIONS[0]} and {VERSIONS[1]} are supported")
        num_tensors, num_entries = self._number("<Q"), self._number("<Q")
        self._check_count(num_tensors, LEAST_TENSOR, "tensors")
        self._check_count(num_entries, LEAST_ENTRY, "entries of metadata")
        return num_tensors, num_entries

    def _entry(self) -> None:
        key = self._text("a key of its metadata")
        if key in self._values:
            raise ValueError(f"its metadata has {key} twice")
        kind = self._number("<I")
        self._values[key] = kind, self._at
        self._skip(kind, key)

    def _skip(self, kind: int, key: str) -> None:
        """Go behind a value."""
        if kind in NUMBERS:
            self._take(struct.calcsize(NUMBERS[kind]))
        elif kind == STRING:
            self._take(self._number("<Q"))
        elif kind == ARRAY:
            of_items, count = self._array(key)
            if of_items in NUMBERS:
                self._take(count * struct.calcsize(NUMBERS[of_items]))
            else:
                for _ in range(count):
                    self._take(self._number("<Q"))
        else:
            raise ValueError(f"its metadata {key} has the unknown type {kind}")

    def _read(self, kind: int, key: str) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._text(f"its metadata {key}")
        of_items, count = self._array(key)
        if of_items == STRING:
            return [self._text(f"its metadata {key}") for _ in range(count)]
        form = NUMBERS[of_items]
        return list(struct.unpack(f"<{count}{form[1:]}", self._take(count * struct.calcsize(form))))

    def _array(self, key: str) -> tuple[int, int]:
        """Type and number of the items of an array."""
        of_items, count = self._number("<I"), self._number("<Q")
        if of_items != STRING and of_items not in NUMBERS:
            raise ValueError(f"its metadata {key} has items of the type {of_items}, which is not supported")
        self._check_count(count, 8 if of_items == STRING else struct.calcsize(NUMBERS[of_items]), f"items of {key}")
        return of_items, count

    def _alignment(self) -> int:
        if ALIGNMENT not in self._values:
            return DEFAULT_ALIGNMENT
        kind, value = self._values[ALIGNMENT][0], self._value_and_back(ALIGNMENT)
        if kind != UINT32 or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
            raise ValueError(f"its {ALIGNMENT} is {value}, which must be a power of two up to {MAX_ALIGNMENT}")
        return int(value)

    def _value_and_back(self, key: str) -> Any:
        place = self._at
        value = self.value(key)
        self._at = place
        return value

    def _tensor(self) -> tuple[str, TensorPlace]:
        """A tensor, whose offset is still that in the data."""
        name = self._text("the name of a tensor")
        num_dimensions = self._number("<I")
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"its tensor {name} has {num_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        number = self._number("<I")
        if number in NOT_IN_FILES:
            reason = "which ggml writes to no file today: convert the model again"
            raise ValueError(f"its tensor {name} has the type {NOT_IN_FILES[number]}, {reason}")
        if number not in TYPES:
            raise ValueError(f"its tensor {name} has the unknown type {number}")
        kind, num_values = TYPES[number], 1
        for size in shape:
            num_values *= size
        if not num_values:
            raise ValueError(f"its tensor {name} is empty")
        if shape[-1] % kind.size:
            raise ValueError(f"its tensor {name} has rows of {shape[-1]} values, not a multiple of {kind.size}")
        return name, TensorPlace(kind, shape, self._number("<Q"), num_values // kind.size * kind.num_bytes)

    def _placed(self, places: list[tuple[str, TensorPlace]], start: int, alignment: int) -> dict[str, TensorPlace]:
        """Tensors by name, with offsets in the file, whose data starts at `start`."""
        tensors: dict[str, TensorPlace] = {}
        for name, place in places:
            end = start + place.offset + place.num_bytes
            if name in tensors:
                raise ValueError(f"it has the tensor {name} twice")
            if place.offset % alignment:
                raise ValueError(f"its tensor {name} does not lie at a multiple of {alignment} bytes")
            if end > self.num_bytes:
                raise ValueError(f"its tensor {name} ends at byte {end}, and the file has {self.num_bytes}")
            tensors[name] = place._replace(offset=start + place.offset)
        before, end = "", 0
        for name, place in sorted(tensors.items(), key=lambda item: item[1].offset):
            if place.offset < end:
                raise ValueError(f"its tensors {before} and {name} overlap")
            before, end = name, place.offset + place.num_bytes
        return tensors

    def _check_count(self, count: int, num_bytes: int, what: str) -> None:
        """`num_bytes`: that each takes at least."""
        if count * num_bytes > self.num_bytes - self._at:
            raise ValueError(f"it should have {count} {what}, and the file is too short for them")

    def _text(self, what: str) -> str:
        try:
            return self._take(self._number("<Q")).decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} is no text in UTF-8") from None

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self.num_bytes - self._at:
            raise ValueError("its header is longer than the file")
        if self._at + num_bytes > len(self._data):
            raise ValueError(f"its header is longer than {len(self._data)} bytes")
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]
