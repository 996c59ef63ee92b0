"""Values of the base's own parameters, for adapters that contain new ones: the shard adds the difference.

The checkpoint is opened only when an adapter needs it; transformers' rules rename its keys.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lorikeet.adapters.errors import NotServed
from lorikeet.adapters.formats.skeleton import Skeleton


class BaseValues:
    """The checkpoint that the skeleton was made from."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._locations: Mapping[str, tuple[Path, str]] | None = None

    def __getitem__(self, parameter: str) -> torch.Tensor:
        """A parameter by its name in the network. Raises NotServed if the checkpoint stores it in another form."""
        if self._locations is None:
            self._locations = self._find()
        if (location := self._locations.get(parameter)) is None:
            raise NotServed(f"the base's own {parameter} is needed, but its checkpoint stores it in another form")
        path, key = location
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(key)
        tensors: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return tensors[key]

    def has(self, parameter: str) -> bool | None:
        """Whether the checkpoint has a parameter in its own form; None if the folder has no checkpoint."""
        if self._locations is None:
            self._locations = self._find()
        return parameter in self._locations if self._locations else None

    def _find(self) -> dict[str, tuple[Path, str]]:
        tied: defaultdict[int, list[str]] = defaultdict(list)
        with self._skeleton.borrowed() as network:
            mapping = get_model_conversion_mapping(network)
            parameters = dict(network.state_dict())
            prefix = network.base_model_prefix
            for name, parameter in network.named_parameters(remove_duplicate=False):
                tied[id(parameter)].append(name)
        renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
        converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
        locations: dict[str, tuple[Path, str]] = {}
        for path, key in self._keys():
            name, converted = rename_source_key(key, renamings, converters, prefix, parameters)
            if converted is None and name in parameters:
                locations[name] = (path, key)
        for names in tied.values():
            # a checkpoint stores one of several names of a parameter, such as a tied output head
            stored = next((locations[name] for name in names if name in locations), None)
            if stored is not None:
                locations = dict.fromkeys(names, stored) | locations
        return locations

    def _keys(self) -> list[tuple[Path, str]]:
        folder = self._skeleton.model_path
        for name in ("model.safetensors", "pytorch_model.bin"):
            index = folder / f"{name}.index.json"
            if index.is_file():
                parts: dict[str, Any] = json.loads(index.read_text())["weight_map"]
                return [(folder / part, key) for key, part in parts.items()]
            if (folder / name).is_file():
                return [(folder / name, key) for key in _keys_of(folder / name)]
        return []


def _keys_of(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    return list(torch.load(path, map_location="meta", weights_only=True))
