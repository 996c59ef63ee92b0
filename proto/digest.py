"""Digests of files and of token ids, what identifies the base model that adapters are stored for, and the checksum of a
file in the served layout.

`of_files` can be reproduced with a shell: `sha256sum config.json model.safetensors | sha256sum`. The checksum stands in
the header of its file: SHA-256 of the SHA-256s of the header, in which it counts as zeros, and of each piece of what
follows. Pieces can be hashed by several threads.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def of_tokens(token_ids: Sequence[int]) -> str:
    """SHA-256 over the ids as little-endian 32-bit integers."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


def of_files(folder: Path, names: Iterable[str]) -> str:
    """SHA-256 over the lines that `sha256sum` prints for these files of `folder`, sorted by name.

    Raises OSError.
    """
    lines = [f"{_of_file(folder / name)}  {name}\n" for name in sorted(names)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


WEIGHT_ENDINGS = (".safetensors", ".bin")


def base_hash(model_path: str | Path) -> str:
    """Identifies the base by its configuration file."""
    return hashlib.sha256((Path(model_path) / "config.json").read_bytes()).hexdigest()


def weights_hash(model_path: str | Path) -> str:
    """Identifies the base's weights by names, sizes and times in the folder's listing."""
    listing = [
        [path.name, path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(Path(model_path).iterdir())
        if path.suffix in WEIGHT_ENDINGS
    ]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def base_key(model_path: str | Path, dtype: object) -> tuple[str, str, str]:
    """Configuration, weights, and the data type that they are served in (a torch.dtype, or its name)."""
    return base_hash(model_path), weights_hash(model_path), str(dtype).removeprefix("torch.")


CHECKSUM_FIELD = "sha256_of_pieces"
"""In the header's metadata."""
CHECKSUM_UNKNOWN = "0" * 64
"""The value until all bytes are known."""
_START = f'"{CHECKSUM_FIELD}":"'.encode()
"""Not part of any string of the header, in which quotes are escaped."""
PIECE_BYTES = 4 << 20
"""Bytes of a piece; the last one has the rest."""


def with_checksum(head: bytes, values: Iterable[bytes | memoryview]) -> bytes:
    """`head`, the prefix and header of a file, with the checksum of itself and of `values`. Its own is unknown."""
    start, end = _place(head)
    return head[:start] + _combined(head, _digests(values)) + head[end:]


def matches_checksum(head: bytes, values: Iterable[bytes | memoryview]) -> bool:
    """Whether a file's bytes, prefix and header first, are those of its checksum; False without one."""
    return matches_pieces(head, _digests(values))


def matches_pieces(head: bytes, digests: Iterable[bytes]) -> bool:
    """`matches_checksum`, with `of_piece` of each piece after the header."""
    try:
        start, end = _place(head)
    except ValueError:
        return False
    return _combined(head[:start] + CHECKSUM_UNKNOWN.encode() + head[end:], digests) == head[start:end]


def of_piece(piece: bytes | memoryview) -> bytes:
    """Releases the interpreter lock."""
    return hashlib.sha256(piece).digest()


def _digests(values: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """`of_piece` of each piece of the joined values."""
    digest, left = hashlib.sha256(), PIECE_BYTES
    for value in values:
        rest = memoryview(value)
        while len(rest):
            part, rest = rest[:left], rest[left:]
            digest.update(part)
            left -= len(part)
            if not left:
                yield digest.digest()
                digest, left = hashlib.sha256(), PIECE_BYTES
    if left < PIECE_BYTES:
        yield digest.digest()


def _combined(head: bytes, digests: Iterable[bytes]) -> bytes:
    return hashlib.sha256(of_piece(head) + b"".join(digests)).hexdigest().encode()


def _place(head: bytes) -> tuple[int, int]:
    """Where the checksum is. Raises ValueError if there is none."""
    start = head.index(_START) + len(_START)
    return start, start + len(CHECKSUM_UNKNOWN)
