"""The search for configurations: what is wrong never wins, what is fastest does, and a tiny search runs to its end."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lorikeet.shard.model.kernels import tuning

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from benchmarks.kernels import tune
from benchmarks.kernels.trials import Trial

ROOT = Path(__file__).parents[2]
KEY = ("expand", 20, torch.float32)


class Planted(tune.Search):
    """Two steps whose times follow from the width; widths below 64 give no number in the second."""

    def _trials(self, key: tune.Key, shape: tuple[int, int]) -> Iterator[Trial]:
        for step in (1, 2):

            def launch(step: int = step) -> torch.Tensor:
                return torch.full((3,), float("nan") if step == 2 and self._width < 64 else 1.0)

            yield Trial(key, f"step {step}", launch, torch.ones(3))

    def _time(self, launch: Callable[[], torch.Tensor]) -> float:
        return self._width * self.entries[KEY][1]

    @property
    def _width(self) -> int:
        return self.entries[KEY][0]


def test_the_fastest_of_the_right_ones_wins() -> None:
    search = Planted(torch.device("cpu"), torch.float32, 1, is_smoke=False)
    [result] = search.run(tune.Shapes(((24, 20),), 24, 40), ["expand"])
    assert result.values == search.entries[KEY] == [64, 1, 1]
    assert result.num_tried == 16 and result.num_wrong == 4
    assert result.ratio == pytest.approx(64 / 128)


def test_every_candidate_could_stand_in_a_file() -> None:
    search = tune.Search(torch.device("cpu"), torch.float32, 1, is_smoke=True)
    assert set(tune.SPACE) == set(tuning.BUILT_IN)
    for kernel in tune.SPACE:
        assert list(search._candidates(kernel))
        for name, values in tune.SPACE[kernel].items():
            assert tuning.BUILT_IN[kernel][name] in values


def test_the_shapes_are_those_of_the_model() -> None:
    shapes = tune.shapes_of(tune.llama_8b())
    assert shapes.linears == ((4096, 1024), (4096, 4096), (4096, 14336), (4096, 128256), (14336, 4096))
    assert (shapes.hidden_size, shapes.vocab_size) == (4096, 128256)


@pytest.mark.long
def test_a_tiny_search_writes_a_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "smoke.json"
    path.write_text(tuning.write({("head_block", 7, torch.float32): [16, 16, 1, 1]}, "smoke"))
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels.tune", "--smoke", "--out", str(path)],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])["results"]
    assert [(each["kernel"], each["size"]) for each in found] == [
        ("shrink", 24), ("shrink", 40), ("expand", 20), ("expand", 24), ("head_block", 24), ("head_logits", 24),
    ]  # fmt: skip
    assert all(each["num_tried"] == 1 and each["num_wrong"] == 0 and each["ratio"] == 1 for each in found)
    assert len(tuning.parse(path.read_text(), "smoke", path.name)) == 7
    assert tuning.read_for("smoke", tmp_path).tiles("head_block", 7, torch.float32) == [16, 16, 1, 1]
