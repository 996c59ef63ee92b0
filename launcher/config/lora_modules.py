"""`--lora-modules`: adapters by name, as vLLM's command line has them."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorikeet.adapters import refs
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import refuse

_KEYS = {"name", "path", "base_model_name"}


@dataclass(frozen=True)
class LoraModule:
    """One adapter."""

    name: str
    ref: refs.Ref


def read(settings: Settings) -> list[LoraModule]:
    """Raises LauncherError."""
    origin, found = settings.given.get("lora-modules", ""), dict[str, LoraModule]()
    for text in settings["lora-modules"]:
        try:
            name, path = _name_and_path(text, settings)
            if name in found:
                raise ValueError(f"{name!r} is given twice")
            found[name] = LoraModule(name, _ref(path))
        except ValueError as error:
            refuse(f"{origin} {text}: {error}")
    return list(found.values())


def _name_and_path(text: str, settings: Settings) -> tuple[str, str]:
    """Raises ValueError."""
    if text.startswith("{"):
        values: Any = json.loads(text)
        unknown = values.keys() - _KEYS
        name, path, base = (values.get(key, "") for key in ("name", "path", "base_model_name"))
        if unknown or not all(isinstance(value, str) for value in (name, path, base)):
            raise ValueError("its keys are name, path and base_model_name, each with a text")
        names = (settings["model-id"], *settings["served-model-name"])
        if base and base not in names:
            raise ValueError(f"its base_model_name is {base!r}, and --model-id and --served-model-name have {names}")
    else:
        name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError("it must look like name=path")
    refs.check_alias(name)
    if name in (settings["model-id"], *settings["served-model-name"]):
        raise ValueError(f"{name!r} is a name of the base model")
    return name, path


def _ref(path: str) -> refs.Ref:
    """A folder of this machine, a location in S3, or a hub id. Raises ValueError."""
    if Path(path).is_dir():
        return refs.Ref(refs.Source.LOCAL, os.path.abspath(path))
    if path.startswith("s3://"):
        return refs.parse(path, refs.Source.S3)
    try:
        return refs.parse(path, refs.Source.HUB)
    except ValueError:
        raise ValueError(f"{path!r} is neither a folder that exists nor a hub id") from None
