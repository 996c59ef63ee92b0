"""docs/tests.md lists every file with tests that `make test` leaves out."""

import re
from pathlib import Path

from tests.conftest import SLOWEST

ROOT = Path(__file__).parents[1]
TABLE = dict(re.findall(r"^\| `(tests/\S+)` \| (\w+) \| \S", (ROOT / "docs" / "tests.md").read_text(), re.MULTILINE))


def marks(path: Path) -> set[str]:
    text = path.read_text()
    inherited = {"device"} if "(KernelsApart):" in text else set[str]()
    return set(re.findall(r"pytest\.mark\.(long|device)\b", text)) | inherited


def test_every_file_with_a_mark_is_listed() -> None:
    others = (path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    marked = {str(path.relative_to(ROOT)) for path in others if marks(path)}
    assert marked == TABLE.keys()


def test_every_listed_mark_is_there() -> None:
    assert [name for name, mark in TABLE.items() if mark not in marks(ROOT / name)] == []


def test_every_file_that_is_started_first_is_there() -> None:
    assert [name for name in SLOWEST if not (ROOT / name).is_file()] == []
