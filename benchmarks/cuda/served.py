"""Random adapters and heads in the served layout, as many as are wanted of few files: a store names files by digests,
and a shard reads each name for itself.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.cuda.setup import Setup
from lorikeet.proto.digest import CHECKSUM_FIELD, CHECKSUM_UNKNOWN, with_checksum
from lorikeet.shard.model import Model
from lorikeet.shard.model.lora.served_file import FORMAT
from lorikeet.shard.model.lora.targets import LoraTarget

SLOT_SHARE = 0.3
"""Share of the device's memory: a batch of rank 16 takes about five GB."""
HOST_BYTES, SMOKE_BYTES = 12 << 30, 1 << 27
"""Of adapters in host memory."""


def settings_of(setup: Setup, folder: Path, num_slots: int) -> dict[str, Any]:
    """Settings of a shard with so many slots."""
    return {
        "adapter_store": str(folder),
        "max_active_adapters": num_slots,
        "adapter_memory_fraction": SLOT_SHARE,
        "adapter_host_memory": HOST_BYTES if setup.is_cuda else SMOKE_BYTES,
    }


class Store:
    """A folder of adapters for one model."""

    def __init__(self, folder: Path, model: Model, seed: int) -> None:
        self.folder = folder
        self._targets = {name: site for name, site in model.lora_targets.items() if isinstance(site, LoraTarget)}
        self._dtype, self._hidden = model.info.dtype, model.heads.hidden_size
        self._device = model.info.device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._num_named = 0

    def loras(self, count: int, ranks: Iterable[int], targets: tuple[str, ...]) -> list[str]:
        """The digests of so many adapters, whose ranks are these in turn; those of one rank have one file."""
        files = [self._lora(rank, targets) for rank in ranks]
        return [self._named(files[number % len(files)]) for number in range(count)]

    def heads(self, count: int) -> str:
        """The digest of so many heads of one block each, which speak through the base's output head."""
        tensors = {}
        for head in range(count):
            tensors[f"heads.{head}.weight"] = self._random(self._hidden, self._hidden)
            tensors[f"heads.{head}.bias"] = self._random(self._hidden, 1)[:, 0].contiguous()
        facts = {"modules": "[]", "heads": json.dumps({"count": count, "version": 2, "layers": 1})}
        return self._named(self._written("heads", tensors, facts))

    def _lora(self, rank: int, targets: tuple[str, ...]) -> Path:
        chosen = {name: target for name, target in self._targets.items() if name.rpartition(".")[2] in targets}
        tensors = {}
        for name, site in chosen.items():
            tensors[f"{name}.A"] = self._random(rank, site.num_in)
            tensors[f"{name}.B"] = self._random(site.num_out, rank) / rank**0.5
        return self._written(f"rank-{rank}-{len(chosen)}", tensors, {"modules": json.dumps(sorted(chosen))})

    def _random(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """[num_rows, num_columns] on the host, of the size that training gives."""
        drawn = torch.randn(num_rows, num_columns, generator=self._generator, device=self._device)
        return (drawn * num_columns**-0.5 / 8).to(self._dtype).cpu()

    def _written(self, name: str, tensors: dict[str, torch.Tensor], facts: dict[str, str]) -> Path:
        path = self.folder / f"{name}.file"
        if not path.exists():
            save_file(tensors, path, {"format": FORMAT, CHECKSUM_FIELD: CHECKSUM_UNKNOWN, **facts})
            content = path.read_bytes()
            begin = 8 + int.from_bytes(content[:8], "little")
            head = with_checksum(content[:begin], [memoryview(content)[begin:]])
            path.write_bytes(head + content[begin:])
        return path

    def _named(self, file: Path) -> str:
        digest = f"{self._num_named:064x}"
        self._num_named += 1
        (self.folder / f"{digest}.safetensors").symlink_to(file)
        return digest
