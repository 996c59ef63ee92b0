"""Files of kernel configurations: read strictly, by the GPU's name, and what they lack is built in."""

import copy
import fnmatch
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from lorikeet import shard
from lorikeet.shard.model.kernels import tuning
from lorikeet.shard.model.kernels.tuning import BUILT_IN, Tuned

ROOT = Path(__file__).parents[4]
GPU = "NVIDIA H200"
CONTENT: dict[str, Any] = {
    "gpu": GPU,
    "kernels": {
        "shrink": {"4096 bfloat16": {"DEPTH": 256, "SPLITS": 16, "num_warps": 2, "num_stages": 5}},
        "expand": {"1024 float16": {"WIDTH": 64, "num_warps": 8, "num_stages": 1}},
    },
}


def test_entries_are_found_by_kernel_size_and_dtype(tmp_path: Path) -> None:
    (tmp_path / tuning.file_name(GPU)).write_text(json.dumps(CONTENT))
    assert [path.name for path in tmp_path.iterdir()] == ["NVIDIA_H200.json"]
    with structlog.testing.capture_logs() as logs:
        tuned = tuning.read_for(GPU, tmp_path)
        assert tuned.tiles("shrink", 4096, torch.bfloat16) == [256, 16, 2, 5]
        assert tuned.tiles("expand", 1024, torch.float16) == [64, 8, 1]
        for _ in range(2):
            assert tuned.tiles("shrink", 4096, torch.float16) == list(BUILT_IN["shrink"].values())
    assert [log["log_level"] for log in logs] == ["info", "info"], "once for the file, once for what it lacks"
    assert logs[0]["file"] == "NVIDIA_H200.json" and logs[1]["kernel"] == "shrink"


def test_without_a_file_all_is_built_in_and_logged(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        tuned = tuning.read_for("A GPU (of 80 GB)", tmp_path)
        for kernel, values in BUILT_IN.items():
            assert tuned.tiles(kernel, 24, torch.float32) == list(values.values())
    assert [log["missing"] for log in logs] == ["A_GPU_of_80_GB.json"]
    assert tuning.read(torch.device("cpu"), tmp_path) is tuning.DEFAULTS


def test_what_is_written_is_read_again() -> None:
    entries = tuning.parse(json.dumps(CONTENT), GPU, "file")
    built_in = {(kernel, 24, torch.float32): list(values.values()) for kernel, values in BUILT_IN.items()}
    text = tuning.write(entries | built_in, GPU)
    assert tuning.parse(text, GPU, "file") == entries | built_in
    assert Tuned(entries).tiles("expand", 1024, torch.float16) == [64, 8, 1]


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("gpu",), "NVIDIA B200", "measured on 'NVIDIA B200', this is 'NVIDIA H200'"),
        (("other",), 1, "exactly the keys gpu and kernels"),
        (("kernels",), [], "kernels is not a table"),
        (("kernels", "widen"), {}, "unknown kernel widen; known: shrink"),
        (("kernels", "shrink", "4096"), {}, "shrink for 4096: DEPTH is missing"),
        (("kernels", "shrink", "4096 int8"), dict(BUILT_IN["shrink"]), "4096 int8: not a size and a dtype"),
        (("kernels", "shrink", "x bfloat16"), dict(BUILT_IN["shrink"]), "x bfloat16: not a size and a dtype"),
        (("kernels", "shrink", "4096 bfloat16", "RANKS"), 16, "RANKS is unknown"),
        (("kernels", "shrink", "4096 bfloat16", "DEPTH"), 96, "DEPTH is 96, not a power of two"),
        (("kernels", "shrink", "4096 bfloat16", "DEPTH"), 8, "DEPTH is 8, not a whole number from 16 to 512"),
        (("kernels", "shrink", "4096 bfloat16", "SPLITS"), "8", "SPLITS is '8', not a whole number"),
        (("kernels", "shrink", "4096 bfloat16", "num_warps"), True, "num_warps is True"),
        (("kernels", "shrink", "4096 bfloat16", "num_stages"), 0, "num_stages is 0"),
        (("kernels", "expand", "1024 float16", "num_stages"), 2, "num_stages is 2, not a whole number from 1 to 1"),
        (("kernels", "expand", "1024 float16", "WIDTH"), 48, "WIDTH is 48, not a power of two"),
    ],
)
def test_invalid_files_are_rejected(path: tuple[str, ...], value: object, sentence: str) -> None:
    content = copy.deepcopy(CONTENT)
    table = content
    for name in path[:-1]:
        table = table[name]
    table[path[-1]] = value
    with pytest.raises(ValueError, match=f"^NVIDIA_H200.json.*{sentence}"):
        tuning.parse(json.dumps(content), GPU, "NVIDIA_H200.json")
    with pytest.raises(ValueError, match="is not JSON"):
        tuning.parse("{", GPU, "NVIDIA_H200.json")


def test_files_are_part_of_the_package_and_right() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "lorikeet.shard"
    ]
    place = (tuning.FOLDER / "NVIDIA_H200.json").relative_to(Path(shard.__file__).parent)
    assert any(fnmatch.fnmatchcase(str(place), pattern) for pattern in patterns)
    for path in tuning.FOLDER.glob("*.json"):
        gpu = json.loads(path.read_text())["gpu"]
        assert path.name == tuning.file_name(gpu) and tuning.parse(path.read_text(), gpu, path.name)
