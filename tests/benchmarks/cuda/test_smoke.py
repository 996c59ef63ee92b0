"""Every suite with tiny shapes on CPU, where times mean nothing: what is measured on a device runs and is written."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.cuda import __main__ as command
from benchmarks.cuda.setup import SMOKE
from benchmarks.cuda.suites import suites
from benchmarks.evidence import results

WHOLE = suites(SMOKE)
GROUPS = list(dict.fromkeys(suite.group for suite in WHOLE))


def run(folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    command.main(["--smoke", "--out", str(folder), "--commit", "c0ffee", *options])
    return results.latest(folder)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("bandwidth", "decode-floor") else pytest.mark.device)
        for name in ("bandwidth", "decode-floor", "swap", "kernels-gaps")
    ],
)
def test_a_suite_is_measured_and_written(name: str, tmp_path: Path) -> None:
    found = run(tmp_path, "--here", "--suite", name)
    assert found.keys() == {figure.name for suite in WHOLE if suite.name == name for figure in suite.figures}
    assert [each["reason"] for each in found.values() if each["status"] == "failed"] == []
    assert all(each["commit"] == "c0ffee" and each["machine"]["copy_gb_per_s"] > 0 for each in found.values())


@pytest.mark.device
@pytest.mark.parametrize("group", GROUPS)
def test_every_suite_in_a_process_of_its_own(group: str, tmp_path: Path) -> None:
    found = run(tmp_path, "--suite", group)
    assert {each["suite"] for each in found.values()} == {suite.name for suite in WHOLE if suite.group == group}
    assert [each["reason"] for each in found.values() if each["status"] == "failed"] == []
