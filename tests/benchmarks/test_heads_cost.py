"""One small round of steps with and without heads."""

from pathlib import Path

from benchmarks.speculation import heads
from tests import tiny


def test_a_small_round_times_every_sort(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path)
    (case,) = heads.measure(size=heads.HeadsSize(1, 2, folder, "float32"))
    assert case.error == ""
    assert len(case.raw) == 4
    assert heads.over_plain("one", case.raw) > 0
    assert heads.over_plain("four", {"four": 2.0, "four with heads": 3.0}) == 1.5
