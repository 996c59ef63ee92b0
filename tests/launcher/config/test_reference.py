"""docs/launcher.md is generated from the flag table."""

from pathlib import Path

from lorikeet.launcher.exits import MEANINGS, Exit
from tests.docs.pages.launcher import document

PAGE = Path(__file__).parents[3] / "docs" / "launcher.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == document(), "run `make docs`"


def test_every_exit_code_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Exit)
