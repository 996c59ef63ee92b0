"""What identifies a base model's files: adapters are stored for one base."""

import hashlib
import json
from pathlib import Path

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
