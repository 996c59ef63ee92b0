"""Model folders: the built-in demo model, a local one or one of the hub, and what their config.json decides.

Opens no weights.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorikeet.adapters import refs
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import Exit, LauncherError, refuse
from lorikeet.launcher.models import servable
from lorikeet.proto import pooling
from lorikeet.proto.pooling import PooledModel

EMBEDDED_ID = "lorikeet/base"
_LONGEST_DEFAULT = 4096
_STEP_OF_PROMPTS = 2048
"""Tokens of a step of a model that generates no text: short prompts are computed together."""
_FILES = (".gguf", ".safetensors")
"""Endings of a file's name, which no repository has."""


@dataclass(frozen=True)
class ModelFolder:
    """A model on this machine."""

    id: str
    """The name that the operator gave."""
    path: Path
    sha: str | None = None
    """Its commit, for a model of the hub."""


def embedded() -> ModelFolder:
    """The built-in demo model."""
    path = Path(__file__).parents[2] / "demo" / "base"
    if (path / "config.json").is_file():
        return ModelFolder(EMBEDDED_ID, path)
    raise LauncherError(Exit.DOWNLOAD_ERROR, "this installation lacks the built-in demo model: give --model-id")


@dataclass(frozen=True)
class GgufFile:
    """A model in a single file, for which a folder has to be made."""

    id: str
    """The path that the operator gave."""


def named(settings: Settings) -> refs.Ref | ModelFolder | GgufFile:
    """The base model of the settings: a local folder or file, or a reference to the hub."""
    text = settings["model-id"]
    return embedded() if text is None else found("model-id", text, settings["revision"])


def found(flag: str, text: str, revision: str | None) -> refs.Ref | ModelFolder | GgufFile:
    """The model that the flag names; `revision` is the value of the flag for its revision."""
    if Path(text).is_dir():
        return folder(text)
    if Path(text).is_file() and text.endswith(".gguf"):
        return GgufFile(text)
    if Path(text).is_file():
        raise LauncherError(
            Exit.DOWNLOAD_ERROR, f"--{flag} {text} is a file: give a model's folder, a .gguf file, or a hub id"
        )
    if _is_path(text):
        raise LauncherError(Exit.DOWNLOAD_ERROR, f"the folder {text} does not exist (--{flag})")
    try:
        ref = refs.parse(text)
    except ValueError as error:
        raise LauncherError(Exit.ARGUMENT_VALIDATION, f"--{flag}: {error}") from None
    return refs.Ref(ref.source, ref.id, ref.revision or revision)


def _is_path(text: str) -> bool:
    """Whether this can only be meant as a path: a hub id is `name` or `owner/name`."""
    parts = text.partition("@")[0].split("/")  # a revision may have slashes
    return text.startswith((".", "~")) or (len(parts) > 1 and "" in parts) or len(parts) > 2 or text.endswith(_FILES)


def folder(text: str) -> ModelFolder:
    """The model in a local folder."""
    path = Path(text).resolve()
    if not (path / "config.json").is_file() and (path / "adapter_config.json").is_file():
        raise LauncherError(
            Exit.DOWNLOAD_ERROR,
            f"{text} is an adapter, not a model: give its base as --model-id, and it as adapter_id in requests",
        )
    if not (path / "config.json").is_file():
        raise LauncherError(Exit.DOWNLOAD_ERROR, f"{text} has no config.json: it is not a model's folder")
    return ModelFolder(text, path)


def configuration(path: Path) -> dict[str, Any]:
    """The model's config.json."""
    try:
        values = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise LauncherError(Exit.DOWNLOAD_ERROR, f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise LauncherError(Exit.DOWNLOAD_ERROR, f"{path / 'config.json'} is not an object")
    return values


def read_pooling(settings: Settings, folder: ModelFolder, config: dict[str, Any]) -> PooledModel | None:
    """How the base model's prompts become vectors or labels; None if it generates text. Raises LauncherError."""
    try:
        return pooling.read(folder.path, config, settings["pooling"] or "", settings["embedding-dim"])
    except (ValueError, OSError) as reason:
        refuse(f"{folder.id} cannot be served: {reason}")


def with_lengths(settings: Settings, config: dict[str, Any], pooled: PooledModel | None = None) -> Settings:
    """The settings with LoRAX's defaults for lengths that were not given; without output a prompt may have them all."""
    if pooled is not None:
        return _with_prompt_lengths(settings, config, pooled)
    total = settings["max-total-tokens"] or min(servable.num_positions(config) or _LONGEST_DEFAULT, _LONGEST_DEFAULT)
    longest = settings["max-input-length"] or total - 1
    step = settings["max-batch-prefill-tokens"] or longest + 50
    return settings.with_values(max_total_tokens=total, max_input_length=longest, max_batch_prefill_tokens=step)


def _with_prompt_lengths(settings: Settings, config: dict[str, Any], pooled: PooledModel) -> Settings:
    positions = servable.num_positions(config) or _LONGEST_DEFAULT
    default = positions if pooled.is_encoder else min(positions, _LONGEST_DEFAULT)
    total = settings["max-total-tokens"] or min(default, pooled.max_length or default)
    longest = settings["max-input-length"] or total
    step = settings["max-batch-prefill-tokens"] or max(longest, _STEP_OF_PROMPTS)
    return settings.with_values(max_total_tokens=total, max_input_length=longest, max_batch_prefill_tokens=step)


def with_weights_of(override: Path, model: Path, into: Path) -> Path:
    """A folder `into` with links to the weight files of `override` and the other files of `model`."""
    weights = [path for path in sorted(override.iterdir()) if is_weights(path.name)]
    if not weights:
        raise LauncherError(Exit.DOWNLOAD_ERROR, f"--weights-cache-override {override} holds no weight files")
    into.mkdir(mode=0o700)
    small = [path for path in sorted(model.iterdir()) if path.is_file() and not is_weights(path.name)]
    for path in (*small, *weights):
        os.symlink(path.resolve(), into / path.name)
    return into


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights or lists the files that do."""
    return name.removesuffix(".index.json").endswith((".safetensors", ".bin"))
