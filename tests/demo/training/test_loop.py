"""A training prints its progress, saves checkpoints and ends at the requested step."""

from pathlib import Path

import pytest

from lorikeet.demo.training import loop
from lorikeet.demo.training.trainer import Progress


class Counting:
    """A training that only counts."""

    def __init__(self) -> None:
        self.step = 0
        self.saved: list[int] = []

    def run_step(self) -> Progress:
        self.step += 1
        return Progress(self.step, loss=1 / self.step, seconds=0.5)

    def save(self, path: Path) -> None:
        self.saved.append(self.step)


def test_the_last_step_is_saved_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Counting()
    loop.run_until(4, training, tmp_path / "checkpoint", save_every=60, name="value", tokens_per_step=100)
    assert (training.step, training.saved) == (4, [4])
    (line,) = capsys.readouterr().out.splitlines()
    mean = (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4
    assert line == f"value: step     4/4  loss {mean:.5f}  200 tokens/s  0.0 min left"


def test_checkpoints_are_saved_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Counting()
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(training.step))
    loop.run_until(7, training, tmp_path / "checkpoint", save_every=2)
    assert training.saved == [3, 6, 7]
