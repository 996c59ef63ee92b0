"""Every planted fault turns its test red, by a value; and without a fault the same tests are green in the same copy."""

from pathlib import Path

import pytest

from tests.mutants import sampling, scheduling, speculation
from tests.mutants.mutant import Mutant, copy_tree, is_about_a_value, verdicts

MUTANTS = [*sampling.MUTANTS, *scheduling.MUTANTS, *speculation.MUTANTS]


def test_without_a_fault_all_pass(tmp_path: Path) -> None:
    tests = sorted({mutant.test for mutant in MUTANTS})
    assert not any(verdicts(copy_tree(tmp_path), tests))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    tree = copy_tree(tmp_path)
    mutant.plant(tree)
    reasons = [reason for reason in verdicts(tree, [mutant.test]) if reason is not None]
    assert reasons, f"{mutant.test} passes although {mutant.name}"
    assert all(is_about_a_value(reason) for reason in reasons), reasons
