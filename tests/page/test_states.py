"""Pictures of the page's states are as they were, and axe-core finds nothing in them at any width or theme.

    LORIKEET_TAKE_PICTURES=1 python -m pytest tests/page -m long

writes the pictures anew, after a change that is meant. Look at them before they are committed.
"""

import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page.browsing import Server, violations
from tests.page.states import DESKTOP, LAPTOP, PHONE, STATES, Stage, State

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent
MOST_DIFFERENT = 0.006
"""Share of pixels that may differ: figures of speed, and letters of fonts that another machine has not."""
MOST_BYTES = 1_500_000
COMPARE = """async ([first, second]) => {
    const pixels = async (text) => {
        const image = await createImageBitmap(await (await fetch(`data:image/png;base64,${text}`)).blob());
        const context = new OffscreenCanvas(image.width, image.height).getContext('2d');
        context.drawImage(image, 0, 0);
        return context.getImageData(0, 0, image.width, image.height);
    };
    const [one, two] = [await pixels(first), await pixels(second)];
    if (one.width !== two.width || one.height !== two.height) return 1;
    let count = 0;
    for (let index = 0; index < one.data.length; index += 4) {
        const differs = [0, 1, 2].some((colour) => Math.abs(one.data[index + colour] - two.data[index + colour]) > 40);
        if (differs) count += 1;
    }
    return count / (one.width * one.height);
}"""
"""The share of different pixels of two PNGs."""


@contextmanager
def staged(browser: Any, server: Server, state: State, size: tuple[int, int], theme: str) -> Iterator[Any]:
    """The page in a state."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=theme, reduced_motion="reduce"
    )
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    try:
        state.act(Stage(page, server))
        page.evaluate("document.fonts.ready")
        page.mouse.move(1, 1)
        yield page
        assert not faults
    finally:
        context.close()


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_the_picture_is_as_it_was(browser: Any, server: Server, state: State, tmp_path: Path) -> None:
    path = FOLDER / f"{state.name}.png"
    with staged(browser, server, state, state.size, state.theme) as page:
        picture = page.screenshot(path=tmp_path / path.name)
    if os.environ.get("LORIKEET_TAKE_PICTURES"):
        path.write_bytes(picture)
    context = browser.new_context()
    blank = context.new_page()
    difference = blank.evaluate(COMPARE, [base64.b64encode(each).decode() for each in (path.read_bytes(), picture)])
    context.close()
    assert difference <= MOST_DIFFERENT, f"{difference:.1%} of the pixels differ: compare {path} with {tmp_path}"


def test_a_changed_picture_is_noticed(browser: Any, server: Server) -> None:
    """A line of text more is enough."""
    context = browser.new_context()
    blank = context.new_page()
    pictures = {
        name: base64.b64encode((FOLDER / f"{name}.png").read_bytes()).decode()
        for name in ("start", "loading", "compare", "answer")
    }
    assert blank.evaluate(COMPARE, [pictures["start"], pictures["start"]]) == 0
    assert blank.evaluate(COMPARE, [pictures["start"], pictures["loading"]]) > MOST_DIFFERENT
    assert blank.evaluate(COMPARE, [pictures["compare"], pictures["answer"]]) > MOST_DIFFERENT
    context.close()


def test_pictures_are_small() -> None:
    files = list(FOLDER.glob("*.png"))
    assert sorted(path.stem for path in files) == sorted(state.name for state in STATES)
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, LAPTOP, DESKTOP], ids=lambda size: str(size[0]))
def test_every_state_is_accessible_and_fits(
    browser: Any, server: Server, axe: str, size: tuple[int, int], theme: str
) -> None:
    faults = {}
    for state in STATES:
        with staged(browser, server, state, size, theme) as page:
            faults[state.name] = violations(page, axe)
    assert {name: found for name, found in faults.items() if found} == {}
