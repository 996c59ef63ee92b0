"""Tile sizes of the kernels for adapters and heads: a file per GPU in the folder `tuned`, or built-in values.

`python -m benchmarks.kernels.tune` measures and writes such a file. An entry is selected by kernel, module size and
dtype, never by the rows or adapters of a step: tile sizes determine the order of sums, and a row's bits must not depend
on the batch.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch

from lorikeet.shard.system import gpu

log = structlog.get_logger()

FOLDER = Path(__file__).with_name("tuned")

BUILT_IN: dict[str, dict[str, int]] = {
    "shrink": {"DEPTH": 128, "SPLITS": 8, "num_warps": 2, "num_stages": 3},
    "expand": {"WIDTH": 64, "num_warps": 2, "num_stages": 1},
    "head_block": {"WIDTH": 32, "DEPTH": 128, "num_warps": 4, "num_stages": 3},
    "head_logits": {"WIDTH": 64, "DEPTH": 128, "num_warps": 4, "num_stages": 3},
}
"""By kernel, in the order of its launch's arguments. shrink and expand are the two parts of an adapter's product.
The size of an entry is the number of inputs of shrink, head_block and head_logits, and the number of outputs of expand
(the largest of those that share a launch).
"""
WITHOUT_TENSOR_CORES: dict[str, dict[str, int]] = BUILT_IN | {
    "shrink": {"DEPTH": 64, "SPLITS": 8, "num_warps": 4, "num_stages": 1},
    "head_logits": {"WIDTH": 32, "DEPTH": 64, "num_warps": 4, "num_stages": 1},
    "head_block": {"WIDTH": 32, "DEPTH": 64, "num_warps": 4, "num_stages": 1},
}
"""The same where Triton does not multiply by matrix units: below compute capability 8.0."""
DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_BOUNDS = {"DEPTH": (16, 512), "WIDTH": (16, 512), "SPLITS": (1, 64), "num_warps": (1, 16)}
_MOST_STAGES = {"shrink": 8, "head_block": 8, "head_logits": 8, "expand": 1}
"""Maximum pipeline stages. With two of expand, some ptxas mistranslate a rounding in a pipelined loop on Hopper."""


@dataclass(frozen=True)
class Tuned:
    """The configurations of one GPU."""

    entries: Mapping[tuple[str, int, torch.dtype], list[int]] = field(default_factory=dict)
    built_in: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: BUILT_IN)
    is_file: bool = False
    """Whether they come from a file; missing entries are logged then."""
    _missed: set[tuple[str, int, torch.dtype]] = field(default_factory=set)

    def tiles(self, kernel: str, size: int, dtype: torch.dtype) -> list[int]:
        """The values of `kernel` for a module of this size, in the order of BUILT_IN."""
        key = (kernel, size, dtype)
        values = self.entries.get(key)
        if values is not None:
            return values
        if self.is_file and key not in self._missed:
            self._missed.add(key)
            log.info("kernel_config_missing", kernel=kernel, size=size, dtype=str(dtype))
        return list(self.built_in[kernel].values())


DEFAULTS = Tuned()


def defaults(device: torch.device) -> Tuned:
    """The built-in configurations for a device."""
    return DEFAULTS if gpu.capability(device) >= (8, 0) else Tuned(built_in=WITHOUT_TENSOR_CORES)


def read(device: torch.device, folder: Path = FOLDER) -> Tuned:
    """The configurations for this device, the built-in ones where there is no file. Raises ValueError with a reason."""
    if device.type != "cuda":
        return DEFAULTS
    return read_for(torch.cuda.get_device_name(device), folder, defaults(device))


def read_for(name: str, folder: Path = FOLDER, others: Tuned = DEFAULTS) -> Tuned:
    """The tuned file for a GPU of this name; `others` has what its file lacks."""
    path = folder / file_name(name)
    if not path.exists():
        log.info("kernel_configs_built_in", gpu=name, missing=path.name)
        return others
    entries = parse(path.read_text(), name, path.name)
    log.info("kernel_configs_tuned", gpu=name, file=path.name, entries=len(entries))
    return Tuned(entries, others.built_in, is_file=True)


def file_name(name: str) -> str:
    """`NVIDIA_H200.json` for `NVIDIA H200`."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") + ".json"


def parse(text: str, gpu: str, name: str) -> dict[tuple[str, int, torch.dtype], list[int]]:
    """The entries of a file. Raises ValueError naming the invalid part of file `name`."""
    try:
        content = json.loads(text)
    except ValueError as failure:
        raise ValueError(f"{name} is not JSON: {failure}") from None
    if not isinstance(content, dict) or set(content) != {"gpu", "kernels"}:
        raise ValueError(f"{name} must hold exactly the keys gpu and kernels")
    if content["gpu"] != gpu:
        raise ValueError(f"{name} was measured on {content['gpu']!r}, this is {gpu!r}")
    tiles: dict[tuple[str, int, torch.dtype], list[int]] = {}
    for kernel, entries in _table(content["kernels"], f"{name}: kernels").items():
        if kernel not in BUILT_IN:
            raise ValueError(f"{name}: unknown kernel {kernel}; known: {', '.join(BUILT_IN)}")
        for key, values in _table(entries, f"{name}: {kernel}").items():
            what = f"{name}: {kernel} for {key}"
            checked = check(kernel, _table(values, what), what)
            tiles[(kernel, *_read_key(key, what))] = checked
    return tiles


def write(entries: Mapping[tuple[str, int, torch.dtype], list[int]], gpu: str) -> str:
    """The text of a file, as `parse` reads it."""
    kernels: dict[str, dict[str, dict[str, int]]] = {}
    for (kernel, size, dtype), values in sorted(entries.items(), key=lambda item: (*item[0][:2], str(item[0][2]))):
        named = dict(zip(BUILT_IN[kernel], values, strict=True))
        kernels.setdefault(kernel, {})[f"{size} {DTYPES[dtype]}"] = named
    return json.dumps({"gpu": gpu, "kernels": kernels}, indent=2) + "\n"


def check(kernel: str, values: Mapping[str, object], what: str) -> list[int]:
    """The values in order. Raises ValueError naming the invalid one."""
    if set(values) != set(BUILT_IN[kernel]):
        odd = sorted(set(values) ^ set(BUILT_IN[kernel]))
        raise ValueError(f"{what}: {odd[0]} is {'unknown' if odd[0] in values else 'missing'}")
    return [_checked(kernel, key, values[key], what) for key in BUILT_IN[kernel]]


def _checked(kernel: str, key: str, value: object, what: str) -> int:
    least, most = _BOUNDS.get(key, (1, _MOST_STAGES[kernel]))
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{what}: {key} is {value!r}, not a whole number from {least} to {most}")
    if key in _BOUNDS and value & (value - 1):
        raise ValueError(f"{what}: {key} is {value}, not a power of two")
    return value


def _table(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a table")
    return value


def _read_key(key: str, what: str) -> tuple[int, torch.dtype]:
    size, _, dtype = key.partition(" ")
    number_format = next((member for member, name in DTYPES.items() if name == dtype), None)
    if not size.isdecimal() or int(size) < 1 or number_format is None:
        raise ValueError(f"{what}: not a size and a dtype of {', '.join(DTYPES.values())}")
    return int(size), number_format
