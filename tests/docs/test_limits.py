"""Every limit of docs/limits.md names a test that fills it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text()
TABLE = PAGE.partition("| buffer |")[2].partition("\n\n")[0].splitlines()[2:]
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)` \|$")


def test_there_is_a_table() -> None:
    assert len(TABLE) > 20


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[2:40].partition(" |")[0])
def test_a_row_names_a_test_that_make_test_runs(row: str) -> None:
    assert len(re.split(r"(?<!\\)\|", row)) == 6, "buffer, limit, at the limit, test"
    found = TEST.search(row)
    assert found is not None, row
    tree = ast.parse((ROOT / "tests" / found[1]).read_text())
    (test,) = [node for node in tree.body if getattr(node, "name", "") == found[2]]
    assert isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef)
    assert not any("mark.long" in ast.unparse(decorator) for decorator in test.decorator_list)
