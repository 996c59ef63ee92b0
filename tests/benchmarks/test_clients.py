"""Each test of a client is a case of its own, and one that did not run has failed."""

from pathlib import Path

from benchmarks.clients import num_failed, outcomes

TESTS = """
import os
import pytest

def test_good():
    assert os.environ["SOME_REQUIREMENT"] == "1"

def test_bad():
    assert 1 == 2

@pytest.mark.skip(reason="absent")
def test_skipped():
    pass
"""


def test_what_fails_or_is_skipped_counts(tmp_path: Path) -> None:
    path = tmp_path / "test_some_client.py"
    path.write_text(TESTS)
    cases = {case.name: case for case in outcomes(str(path), SOME_REQUIREMENT="1")}
    assert {name: num_failed(case.raw) for name, case in cases.items()} == {
        "test_good": 0.0,
        "test_bad": 1.0,
        "test_skipped": 1.0,
    }
    assert [case.name for case in outcomes(str(path), "-k", "test_skipped")] == ["test_skipped"]
    assert "1 == 2" in cases["test_bad"].raw["why"]
    assert "absent" in cases["test_skipped"].raw["why"]
