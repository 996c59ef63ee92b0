"""Files whose bytes do not match their checksum are not used."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lorikeet.proto import digest
from lorikeet.shard.adapters.manager import CheckedFiles
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.adapters.loading import AdapterContent, HostLayout, Opened
from lorikeet.shard.model.lora.memory import Arena
from lorikeet.shard.model.lora.served_file import FORMAT
from lorikeet.shard.model.lora.targets import LoraTarget


def write(path: Path) -> bytes:
    """An adapter of one module with its checksum; the file's bytes."""
    facts = {"format": FORMAT, "digest": "d", "modules": '{"linear":{"kind":"linear","rank":4}}'}
    tensors = {"linear.A": torch.ones(4, 24), "linear.B": torch.ones(16, 4)}
    save_file(tensors, path, {**facts, digest.CHECKSUM_FIELD: digest.CHECKSUM_UNKNOWN})
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    content = digest.with_checksum(content[:begin], [memoryview(content)[begin:]]) + content[begin:]
    path.write_bytes(content)
    return content


def make_files() -> CheckedFiles:
    targets = {"linear": LoraTarget("linear", 24, 16, StepInputs(16, torch.device("cpu")))}
    return CheckedFiles(targets, HostLayout(torch.float32, Arena(1 << 16)))


@pytest.mark.parametrize("piece", [64, digest.PIECE_BYTES])
def test_a_damaged_file_is_not_used(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE_BYTES", piece)
    files = make_files()
    path = tmp_path / "file"
    sound = write(path)
    assert files.read(path).num_bytes > 0
    # values, names of a tensor and of the format, JSON, and the length of the header
    for place in (-1, -100, -600, sound.index(b"linear.A"), sound.index(FORMAT.encode()), 8, 1):
        damaged = bytearray(sound)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        for read in (files.read, files.open):
            with pytest.raises(ValueError, match="damaged"):
                read(path)
    tensors = {"linear.A": torch.ones(4, 24), "linear.B": torch.ones(16, 4)}
    save_file(tensors, path, {"format": FORMAT, "digest": "d", "modules": '{"linear":{}}'})
    with pytest.raises(ValueError, match="damaged"):  # without a checksum
        files.open(path)
    path.write_bytes(sound)
    assert files.read(path).num_bytes > 0


def test_a_sound_file_for_another_base_keeps_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path)
    targets = {"linear": LoraTarget("linear", 24, 32, StepInputs(16, torch.device("cpu")))}
    with pytest.raises(ValueError, match="do not fit"):
        CheckedFiles(targets, HostLayout(torch.float32, Arena(1 << 16))).read(path)


def test_factors_are_copied_while_the_file_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other one to begin."""
    both = threading.Barrier(2, timeout=60)
    of_piece, lay_out = digest.of_piece, CheckedFiles.lay_out

    def compare(piece: bytes | memoryview) -> bytes:
        if isinstance(piece, memoryview):
            both.wait()
        return of_piece(piece)

    def copy(files: CheckedFiles, opened: Opened) -> AdapterContent:
        both.wait()
        return lay_out(files, opened)

    path = tmp_path / "file"
    write(path)
    monkeypatch.setattr(digest, "of_piece", compare)
    monkeypatch.setattr(CheckedFiles, "lay_out", copy)
    assert make_files().read(path).num_bytes > 0
