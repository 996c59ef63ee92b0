"""Digests of files and of token ids, and what identifies the base model that adapters are stored for.

`of_files` can be reproduced with a shell: `sha256sum config.json model.safetensors | sha256sum`.
"""

import hashlib
import json
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
