"""Every planted fault turns its test red, by a value; and without a fault the same tests are green in the same copy.

A fixed sample: `python -m benchmarks.planted` plants all of them.
"""

from pathlib import Path

import pytest

from tests.mutants.faults import FAULTS, OF_DEVICES, OF_RECOVERY
from tests.mutants.mutant import Mutant, copy_tree, is_noticed, results

SAMPLE = [*FAULTS[3:27:8], *OF_RECOVERY[2::6], *OF_DEVICES[6:7]]


@pytest.mark.long
def test_without_a_fault_all_pass(tmp_path: Path) -> None:
    tests = sorted({mutant.test for mutant in SAMPLE})
    assert not any(results(copy_tree(tmp_path), tests))


@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda mutant: mutant.name)
def test_a_fault_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    assert is_noticed(mutant, copy_tree(tmp_path)) == ""


@pytest.mark.parametrize("mutant", [*FAULTS, *OF_RECOVERY, *OF_DEVICES], ids=lambda mutant: mutant.name)
def test_every_fault_can_be_planted(mutant: Mutant, tmp_path: Path) -> None:
    mutant.plant(copy_tree(tmp_path))


def test_every_published_fault_of_speculation_is_there() -> None:
    numbers = {fault.name.split()[0] for fault in FAULTS}
    assert {f"M{number}" for number in range(1, 15)} <= numbers
