"""A mapped file gives what safetensors reads from it; other files are rejected with a reason."""

import ctypes
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorikeet.shard.model.lora.served_file import FORMAT, ServedFile, map_file

METADATA = {"format": FORMAT, "digest": "abc", "modules": "{}"}


def write(path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_and_metadata_are_those_of_the_file(tmp_path: Path) -> None:
    tensors = {"odd": torch.randn(3).bfloat16(), "wide": torch.randn(5, 7), "half": torch.randn(2, 3, 4).half()}
    save_file(tensors, tmp_path / "file", METADATA)
    file = ServedFile(map_file(tmp_path / "file"))
    (tmp_path / "file").unlink()
    assert file.metadata == METADATA
    places = file.places()
    assert places.keys() == tensors.keys()
    for name, tensor in tensors.items():
        view = file.tensor(places[name])
        assert torch.equal(view, tensor)
        assert view.data_ptr() == file.address + places[name].start
    assert file.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert ctypes.string_at(file.address, file.num_bytes)


def test_writing_to_a_tensor_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "file", METADATA)
    file = ServedFile(map_file(tmp_path / "file"))
    file.tensor(file.places()["a"]).zero_()
    assert torch.equal(load_file(tmp_path / "file")["a"], torch.ones(3))


def test_headers_are_equal_but_for_their_digests(tmp_path: Path) -> None:
    for name, digest, tensor in (("a", "1", torch.ones(3)), ("b", "2", torch.zeros(3)), ("c", "1", torch.ones(4))):
        save_file({"a": tensor}, tmp_path / name, METADATA | {"digest": digest})
    one, two, three = (ServedFile(map_file(tmp_path / name)) for name in "abc")
    assert one.likeness == two.likeness != three.likeness


def entry(dtype: str, shape: list[int], *offsets: int) -> dict[str, object]:
    return {"__metadata__": METADATA, "a": {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ([], b""),
        ({"a": 1}, b""),
        (entry("F32", [2], 0, 8), b"1234567"),
        (entry("F32", [3], 0, 8), b"12345678"),
        (entry("F32", [1], -4, 0), b"12345678"),
        (entry("F32", [0], 4, 4), b"12345678"),
        (entry("I64", [1], 0, 8), b"12345678"),
        ({"__metadata__": METADATA, "a": {"dtype": "F32"}}, b"12345678"),
    ],
    ids=["no object", "no format", "truncated", "forged", "before", "empty", "type", "no place"],
)
def test_a_broken_file_is_rejected(tmp_path: Path, header: object, data: bytes) -> None:
    with pytest.raises(ValueError, match="the adapter's file cannot be read"):
        ServedFile(map_file(write(tmp_path / "file", header, data))).places()


@pytest.mark.parametrize("data", [b"", b"1234", b"\xff" * 16])
def test_other_files_are_rejected(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match="the adapter's file cannot be read"):
        ServedFile(map_file(tmp_path / "file"))


def test_another_layout_and_a_missing_file_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "file", {"format": "another"})
    with pytest.raises(ValueError, match="not in the served layout"):
        ServedFile(map_file(tmp_path / "file"))
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "none")
