"""docs/migrating.md names a test for each difference: every one of them exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text()


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)(?:::(test_\w+))?`", PAGE)
    assert len(named) > 40
    for file, test in named:
        path = ROOT / "tests" / "router" / "api" / "routes" / file
        assert path.is_file(), file
        assert not test or re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE), f"{file}::{test}"
    for path in re.findall(r"`(tests/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path


def test_every_row_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| LoRAX |")]
    assert len(rows) > 40
    for row in rows:
        assert re.search(r"`tests?[_/][^`]+` \|$", row), row
