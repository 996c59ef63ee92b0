"""A test that fails or is skipped has a reason, and one that passes has none."""

from pathlib import Path

import pytest

from tests.pytest_outcomes import outcomes

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


@pytest.mark.long
def test_failed_and_skipped_tests_have_reasons(tmp_path: Path) -> None:
    path = tmp_path / "test_some_client.py"
    path.write_text(TESTS)
    found = {name.rpartition(".")[2]: why for name, why in outcomes(str(path), SOME_REQUIREMENT="1").items()}
    assert found["test_good"] == ""
    assert "1 == 2" in found["test_bad"]
    assert "absent" in found["test_skipped"]
