"""Finds models, adapters and heads: a folder, or a hub id whose safetensors are downloaded. Opens no tensors."""

import hashlib
from pathlib import Path
from typing import Any

from huggingface_hub import errors

from lorikeet.adapters import refs
from lorikeet.adapters.errors import HeadsError, first_line
from lorikeet.adapters.sources import hub

_SMALL = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_MODEL = [*_SMALL, "*.safetensors"]
_NOT_THE_MODEL = ["*/*", "consolidated*", "medusa_*", "adapter_*", "optimizer*"]
_ADAPTER = [*_SMALL, "adapter_model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt"]
_HASHED_WHOLE = 64 * 2**20
"""Files up to this many bytes are identified by content, larger ones by size and modification time."""


def model_folder(name: str) -> Path:
    """The folder of a model with configuration and safetensors. Raises HeadsError."""
    folder = _folder(name, "model", _MODEL, _NOT_THE_MODEL)
    if not (folder / "config.json").is_file():
        raise HeadsError(f"{name} is not a model: {folder} has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise HeadsError(f"{name} has no safetensors in {folder}: other formats are not supported")
    return folder


def adapter_folder(name: str) -> Path:
    """The folder of a LoRA adapter. Raises HeadsError."""
    folder = _folder(name, "adapter", _ADAPTER, ["*/*"])
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise HeadsError(f"{name} is not an adapter in safetensors: {folder} has no {file}")
    return folder


def heads_folder(name: str) -> Path:
    """The folder of Medusa heads, which may be an adapter's too. Raises HeadsError."""
    return _folder(name, "heads", [*_ADAPTER, "*.safetensors"], ["*/*"])


def folder_identity(folder: Path) -> str:
    """A hash that changes with every file of the folder that affects the generated text."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.suffix not in (".json", ".safetensors", ".jinja", ".model", ".txt"):
            continue
        state = path.stat()
        if state.st_size <= _HASHED_WHOLE:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = f"{state.st_size} {state.st_mtime_ns}"
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def _folder(name: str, kind: str, wanted: list[str], unwanted: list[str]) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith(("/", "./", "../", "~")):
        raise HeadsError(f"the {kind} {name} does not exist: there is no such folder")
    try:
        ref = refs.parse(name)
    except ValueError as error:
        raise HeadsError(f"the {kind} {name!r} is not a folder here, and {error}") from None
    patterns: dict[str, Any] = {"allow_patterns": wanted, "ignore_patterns": unwanted}
    try:
        found = hub.library().snapshot_download(ref.id, revision=ref.revision, **patterns)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise HeadsError(f"the {kind} {name} is neither a folder nor visible at the hub with this token") from None
    except errors.GatedRepoError:
        raise HeadsError(f"the {kind} {name} is gated at the hub: request access there and set HF_TOKEN") from None
    except Exception as error:  # the library passes on errors of the HTTP client that it is built on
        raise HeadsError(f"the {kind} {name} is not a folder and cannot be downloaded: {first_line(error)}") from None
    return Path(found)
