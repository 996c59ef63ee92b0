"""Files whose bytes do not match their checksum are not used."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lorikeet.proto import checksum
from lorikeet.shard.adapters.checked_files import CheckedFiles
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.adapters.loading import Destination
from lorikeet.shard.model.lora.memory import Arena
from lorikeet.shard.model.lora.served_file import FORMAT
from lorikeet.shard.model.lora.targets import LoraTarget


def write(path: Path) -> bytes:
    """An adapter of one module with its checksum; the file's bytes."""
    facts = {"format": FORMAT, "digest": "d", "modules": '{"linear":{"kind":"linear","rank":4}}'}
    tensors = {"linear.A": torch.ones(4, 24), "linear.B": torch.ones(16, 4)}
    save_file(tensors, path, {**facts, checksum.FIELD: checksum.UNKNOWN})
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    content = checksum.added(content[:begin], [memoryview(content)[begin:]]) + content[begin:]
    path.write_bytes(content)
    return content


def test_a_damaged_file_is_not_used(tmp_path: Path) -> None:
    targets = {"linear": LoraTarget("linear", 24, 16, StepInputs(16, torch.device("cpu")))}
    files = CheckedFiles(targets, Destination(torch.float32, Arena(1 << 16)))
    path = tmp_path / "file"
    sound = write(path)
    assert files.read(path).num_bytes > 0
    for place in (-1, -100, sound.index(b"linear.A")):  # values, and a name
        damaged = bytearray(sound)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError):
            files.read(path)
    tensors = {"linear.A": torch.ones(4, 24), "linear.B": torch.ones(16, 4)}
    save_file(tensors, path, {"format": FORMAT, "digest": "d", "modules": '{"linear":{}}'})
    with pytest.raises(ValueError, match="damaged"):  # without a checksum
        files.open(path)
    path.write_bytes(sound)
    assert files.read(path).num_bytes > 0
