"""Every view is accessible and fits, light and dark, wide and narrow; and all is done with the keyboard."""

from typing import Any

import pytest

from tests.e2e.page.browsing import TEXT, Server, Visit, until, violations, wait_for
from tests.router.scripted_shard import Script

pytestmark = pytest.mark.long


@pytest.mark.parametrize("width", [380, 1380])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_is_accessible_and_fits(browser: Any, adapting: Server, axe: str, theme: str, width: int) -> None:
    adapting.serving.says(TEXT, ends=True)
    visit = Visit(browser, adapting.url, color_scheme=theme, viewport={"width": width, "height": 800})
    page = visit.open()
    found: dict[str, list[str]] = {}

    def check(view: str) -> None:
        found[view] = violations(page, axe)

    check("start")
    visit.complete()
    visit.finished()
    page.hover(".token:nth-child(5)")
    check("answer")
    visit.press("Markdown")
    check("markdown")
    visit.press("Compare two")
    visit.press("Send")
    visit.finished(2)
    check("comparison")
    visit.press("Copy as code")
    check("code")
    page.keyboard.press("Escape")
    if width < 860:
        visit.press("History")
        assert page.get_by_role("button", name="New conversation").is_visible()
        check("history")
        visit.press("Close")
        assert page.get_by_role("button", name="New conversation").is_hidden()
        visit.press("Settings")
        check("settings")
    page.click(".adapter-button")
    page.wait_for_selector(".picker-row")
    check("picker")
    page.keyboard.press("Escape")
    visit.press("API key")
    check("key")
    page.keyboard.press("Escape")
    page.goto(adapting.url + "/#live")
    until(page, "document.querySelector('.live-state').textContent.includes('second')")
    check("live")
    visit.close()
    assert {view: faults for view, faults in found.items() if faults} == {}


class Keyboard:
    """Moves the focus by Tab alone."""

    def __init__(self, page: Any) -> None:
        self._page = page

    def press(self, *keys: str) -> None:
        for key in keys:
            self._page.keyboard.press(key)

    def type(self, text: str) -> None:
        self._page.keyboard.type(text)

    def tab_to(self, name: str, key: str = "Tab") -> None:
        """Press Tab until an element of that name, or whose name begins so and goes on with a space, has the focus."""
        for _ in range(90):
            self.press(key)
            if self.focused() == name.rstrip() or (name.endswith(" ") and self.focused().startswith(name)):
                return
        raise AssertionError(f"{name} is not reached")

    def focused(self) -> str:
        return str(
            self._page.evaluate(
                """() => {
                const focused = document.activeElement;
                const label = focused.labels?.length ? focused.labels[0].textContent : focused.textContent;
                return (focused.getAttribute('aria-label') || label || '').trim();
                }"""
            )
        )


def test_all_is_done_with_the_keyboard(browser: Any, adapting: Server) -> None:
    """From opening the page on, no element gets the focus by a script or a mouse of the test."""
    serving = adapting.serving
    serving.says(TEXT, ends=True)
    with Visit(browser, adapting.url, viewport={"width": 840, "height": 800}) as visit:
        page = visit.open()
        keys = Keyboard(page)
        keys.tab_to("Completion")
        keys.press("Enter")
        keys.tab_to("Text to complete")
        keys.type("Hello")
        keys.press("Control+Enter")
        assert visit.finished() == TEXT

        keys.tab_to("Answer. ")
        keys.press("ArrowRight", "ArrowRight")
        assert "token 2" in page.inner_text(".token-detail")
        keys.press("End")
        assert f"token {page.locator('.token').count()}" in page.inner_text(".token-detail")
        keys.press("Escape")
        assert page.is_hidden(".token-detail")

        keys.tab_to("Compare two")
        keys.press("Enter")
        keys.tab_to("Settings")
        keys.press("Enter")
        keys.tab_to("Adapter: Base model. ")
        keys.press("Enter")
        page.wait_for_selector(".picker-row")
        assert keys.focused() == "Search adapters"
        keys.press("ArrowDown", "ArrowDown", "Enter")
        assert keys.focused().startswith("Adapter: second"), "the focus returns"
        keys.press("Enter")
        page.wait_for_selector(".picker-row")
        keys.press("Escape")
        assert page.locator("dialog[open]").count() == 0
        keys.tab_to("Method")
        keys.press("ArrowUp")
        keys.tab_to("Temperature")
        keys.press("ArrowRight")
        assert page.get_by_label("Temperature").input_value() == "0.05"

        serving.says("abc", hangs=True)
        keys.tab_to("Text to complete", "Shift+Tab")
        keys.press("Control+Enter")
        until(page, "document.querySelectorAll('.answer.running .token').length > 3")
        for _ in range(2):
            keys.tab_to("Stop")
            keys.press("Enter")
        until(page, "!document.querySelector('.answer.running')")
        wait_for(page, lambda: serving.shard.num_running == 0)
        assert serving.shard.submits[-1].adapter.id == "second"

        keys.tab_to("History")
        keys.press("Enter")
        keys.tab_to("Close", "Shift+Tab")
        keys.tab_to("New conversation")
        keys.press("Enter")
        assert page.locator(".answer").count() == 0 and page.locator(".open-history").count() == 0
        keys.tab_to("Live")
        keys.press("Enter")
        until(page, "document.querySelector('.live-state').textContent.includes('second')")


def test_a_stopped_side_leaves_the_other(visit: Visit, server: Server) -> None:
    server.serving.shard.answer = lambda submit: Script(server.serving.ids("abc"), hangs=True)
    page = visit.open()
    visit.press("Compare two")
    visit.complete()
    until(page, "document.querySelectorAll('.answer.running .token').length > 4")
    visit.press("Stop")
    wait_for(page, lambda: server.serving.shard.num_running == 1)
    assert page.locator(".answer.running").count() == 1
    visit.press("Stop")
    wait_for(page, lambda: server.serving.shard.num_running == 0)
