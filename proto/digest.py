"""Digests of files and of token ids.

They can be reproduced with a shell: `sha256sum config.json model.safetensors | sha256sum`.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
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
