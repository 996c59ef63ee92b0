"""The files that a model is loaded from, and their digest when they change."""

import json
from pathlib import Path

import pytest

from lorikeet.proto import digest
from lorikeet.shard.startup.model_files import ModelFiles, loaded_names


def folder(path: Path, *names: str) -> Path:
    for name in ("config.json", *names):
        (path / name).write_text(name)
    return path


@pytest.mark.parametrize(
    ("there", "loaded"),
    [
        (["model.safetensors", "pytorch_model.bin", "consolidated.safetensors"], ["model.safetensors"]),
        (["pytorch_model.bin", "tokenizer.json", "modeling.py"], ["pytorch_model.bin"]),
        ([], []),
    ],
)
def test_the_loaded_weights_are_chosen(tmp_path: Path, there: list[str], loaded: list[str]) -> None:
    assert loaded_names(folder(tmp_path, *there), has_code=False) == ["config.json", *loaded]


def test_parts_and_code_are_included(tmp_path: Path) -> None:
    parts = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    index = "model.safetensors.index.json"
    folder(tmp_path, *parts, "modeling.py", "pytorch_model.bin")
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": parts[0], "b": parts[1], "c": parts[0]}}))
    assert loaded_names(tmp_path, has_code=True) == ["config.json", *parts, index, "modeling.py"]
    (tmp_path / index).write_text("broken")
    assert loaded_names(tmp_path, has_code=False) == ["config.json", index]


def test_the_digest_is_of_the_content_and_read_once(tmp_path: Path) -> None:
    files = ModelFiles(folder(tmp_path, "model.safetensors"))
    first = files.digest()
    assert first.result(30) == digest.of_files(tmp_path, ["config.json", "model.safetensors"])
    assert files.digest() is first
    (tmp_path / "model.safetensors").write_text("model.safetensorz")
    assert ModelFiles(tmp_path).digest().result(30) != first.result()


@pytest.mark.parametrize("change", ["written", "replaced", "gone"])
def test_changed_files_have_no_digest(tmp_path: Path, change: str) -> None:
    files = ModelFiles(folder(tmp_path, "model.safetensors"))
    path = tmp_path / "model.safetensors"
    if change == "written":
        path.write_text("more than before")
    elif change == "gone":
        path.unlink()
    else:
        (tmp_path / "new").write_text("model.safetensors")
        (tmp_path / "new").replace(path)
    with pytest.raises((ValueError, OSError)):
        files.digest().result(30)
