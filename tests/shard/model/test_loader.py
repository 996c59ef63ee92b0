"""Weights that come as pickles: the same model as from safetensors, and nothing in them is ever run."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model, loader
from lorikeet.shard.system import gpu
from tests import tiny
from tests.shard.engine.exactness import drive

ROOT = Path(__file__).parents[3]
PROMPTS = [[1, 2, 3], [5, 4, 3, 2, 1, 0, 7], [11]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("model"))


def with_bin(model: Path, folder: Path, write: Callable[[dict[str, Any], Path], None]) -> Path:
    """The model with its weights written into a `.bin` file."""
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    write(dict(load_file(model / "model.safetensors")), folder / "pytorch_model.bin")
    return folder


def config(folder: Path) -> ShardConfig:
    return ShardConfig("some/model", str(folder), f"unix:{folder}/shard.sock", max_total_tokens=64, threads=1)


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def dump(content: Any, path: Path) -> None:
    """A bare pickle, as torch wrote long ago."""
    with path.open("wb") as file:
        pickle.dump(content, file, protocol=2)


def test_a_bin_checkpoint_is_the_same_model(model: Path, tmp_path: Path) -> None:
    expected, actual = (
        drive(load_model(config(folder)), PROMPTS, step_tokens=5)
        for folder in (model, with_bin(model, tmp_path / "bin", torch.save))
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert torch.equal(ours.logprobs, theirs.logprobs)


def test_the_planted_pickle_would_run(tmp_path: Path) -> None:
    """Without protection, loading the pickle runs its code."""
    dump(Planted(tmp_path / "was-run"), tmp_path / "pickle")
    pickle.loads((tmp_path / "pickle").read_bytes())
    assert (tmp_path / "was-run").exists()


def with_planted(model: Path, folder: Path, save: Callable[[dict[str, Any], Path], None]) -> Path:
    """The model with a `.bin` file whose code makes the folder `was-run` next to it."""
    planted = Planted(folder.parent / "was-run")
    return with_bin(model, folder, lambda weights, path: save({**weights, "planted": planted}, path))


@pytest.mark.parametrize("save", [torch.save, dump], ids=["zip", "bare"])
def test_code_in_a_pickle_is_not_run_while_loading(
    model: Path, tmp_path: Path, save: Callable[[dict[str, Any], Path], None]
) -> None:
    folder = with_planted(model, tmp_path / "bin", save)
    with pytest.raises(ValueError, match="Code in it was not run and never is"):
        load_model(config(folder))
    assert not (tmp_path / "was-run").exists()


@pytest.mark.long
@pytest.mark.parametrize("save", [torch.save, dump], ids=["zip", "bare"])
def test_code_in_a_pickle_is_rejected_and_not_run(
    model: Path, tmp_path: Path, save: Callable[[dict[str, Any], Path], None]
) -> None:
    folder = with_planted(model, tmp_path / "bin", save)
    path = tmp_path / "shard.json"
    settings = config(folder)
    path.write_text(json.dumps({**vars(settings), "json_output": True}))
    done = subprocess.run(
        [sys.executable, "-m", "lorikeet.shard", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert not (tmp_path / "was-run").exists()
    event = json.loads(done.stderr.splitlines()[-1])
    assert event["event"] == "start_failed"
    assert event["reason"] == (
        "cannot load the weights of some/model: a .bin file of it is broken or holds more than tensors. Code in it was "
        "not run and never is: convert it to safetensors"
    )
    assert "Traceback" not in done.stderr


def test_a_broken_bin_file_is_one_sentence(model: Path, tmp_path: Path) -> None:
    folder = with_bin(model, tmp_path / "bin", lambda weights, path: None)
    (folder / "pytorch_model.bin").write_bytes(b"no pickle at all")
    with pytest.raises(ValueError, match="cannot load the weights of some/model: "):
        load_model(config(folder))


def test_a_cut_safetensors_file_is_one_sentence(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(model, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot load the weights of some/model: a broken safetensors file: "):
        load_model(config(folder))


def test_loading_weights_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "PROGRESS_S", 0.0)
    with capture_logs() as events:
        load_model(config(model))
    reported = [event for event in events if event["event"] == "weights_loading"]
    assert reported[0]["loaded"] == 0 and reported[-1]["loaded"] == reported[-1]["total"] - 1 == len(reported) - 1
    assert [event["percent"] for event in reported] == sorted(event["percent"] for event in reported)


@pytest.mark.parametrize(
    ("capability", "stored", "asked", "served"),
    [
        ((7, 5), torch.bfloat16, None, torch.float16),
        ((8, 0), torch.bfloat16, None, torch.bfloat16),
        ((7, 5), torch.float16, None, torch.float16),
        ((7, 5), torch.bfloat16, "float32", torch.float32),
    ],
)
def test_devices_without_bfloat16_serve_float16(
    capability: tuple[int, int], stored: torch.dtype, asked: str | None, served: torch.dtype
) -> None:
    config = ShardConfig("tiny", "unused", "unix:unused", device="cuda:0", dtype=asked)
    with gpu.assumed(capability), capture_logs() as logs:
        assert loader.choose_dtype(config, SimpleNamespace(dtype=stored)) == served
    assert [line["event"] for line in logs] == ["bfloat16_becomes_float16"] * (stored != served and asked is None)


def test_bfloat16_is_refused_where_the_device_lacks_it() -> None:
    config = ShardConfig("tiny", "unused", "unix:unused", device="cuda:0", dtype="bfloat16")
    with gpu.assumed((7, 5)), pytest.raises(ValueError, match=r"cuda:0 has no bfloat16.*--dtype float16"):
        loader.choose_dtype(config, SimpleNamespace(dtype=torch.bfloat16))
