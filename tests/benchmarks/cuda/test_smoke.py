"""Every part with tiny shapes on CPU, where times mean nothing: what is measured on a device is reached and written."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.cuda import __main__ as command
from benchmarks.cuda import record
from benchmarks.cuda.plan import group_of, plan
from benchmarks.cuda.setup import SMOKE

WHOLE = plan(SMOKE)
GROUPS = list(dict.fromkeys(group_of(part) for part in WHOLE.parts))


def failures(told: list[dict[str, Any]]) -> list[str]:
    """Why parts failed."""
    return [each["reason"] for each in told if each["verdict"] == "failed"]


def run(folder: Path, *options: str) -> list[dict[str, Any]]:
    command.main(["--smoke", "--out", str(folder), "--commit", "c0ffee", *options])
    return [each for path in sorted(folder.glob("*.json")) for each in record.read(path)]


@pytest.mark.parametrize("name", ["bandwidth", "decode-floor", "swap", "kernels-gaps"])
def test_a_part_is_measured_and_written(name: str, tmp_path: Path) -> None:
    told = run(tmp_path, "--here", "--part", name)
    assert [each["bar"] for each in told] == [bar.name for bar in WHOLE.bars if bar.part == name]
    assert failures(told) == []
    assert all(each["commit"] == "c0ffee" and each["machine"]["copy_gb_per_s"] > 0 for each in told)


def test_a_finished_part_is_skipped_until_it_is_wanted_again(tmp_path: Path) -> None:
    part = ("--here", "--part", "bandwidth")
    count = len(run(tmp_path, *part))
    assert len(run(tmp_path, *part)) == count
    assert len(run(tmp_path, *part, "--again")) == 2 * count


@pytest.mark.device
@pytest.mark.parametrize("group", GROUPS)
def test_every_part_in_a_process_of_its_own(group: str, tmp_path: Path) -> None:
    told = run(tmp_path, "--part", group)
    assert {each["part"] for each in told} == {part.name for part in WHOLE.parts if group_of(part) == group}
    assert failures(told) == []
