"""Panels on a phone, and all that is done with the keyboard."""

from typing import Any

import pytest

from tests.e2e.page.browsing import TEXT, Server, Visit, until, wait_for
from tests.router.scripted_shard import Script

pytestmark = pytest.mark.long


def test_panels_are_drawers_on_a_phone(browser: Any, server: Server) -> None:
    with Visit(browser, server.url, viewport={"width": 390, "height": 844}) as visit:
        page = visit.open()
        for opener, inside in (("Open menu", "New conversation"), ("Settings", "Save these settings as a preset")):
            control = page.get_by_role("button", name=inside)
            for key in ("Enter", "Escape"):  # the focus is on Close
                assert control.is_hidden()
                visit.press(opener)
                assert control.is_visible() and control.bounding_box()["y"] < 400
                assert page.evaluate("document.activeElement.ariaLabel") == "Close"
                page.keyboard.press(key)
                assert page.evaluate("document.activeElement.ariaLabel") == opener, "the focus returns"


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
        keys.press("Shift+Enter")
        keys.type("there")
        keys.press("Enter")
        assert visit.finished() == TEXT
        assert serving.backend.decode(list(serving.shard.submits[-1].prompt_ids)) == "Hello\nthere"

        keys.tab_to("Answer. ")
        keys.press("ArrowRight", "ArrowRight")
        assert "token 2" in page.inner_text(".token-detail")
        keys.press("End")
        assert f"token {page.locator('.token').count()}" in page.inner_text(".token-detail")
        keys.press("Escape")
        assert page.inner_text(".token-detail").startswith("Point at a token")

        keys.tab_to("Compare")
        keys.press("Enter")
        keys.tab_to("Side B: Adapter: No adapter. ", "Shift+Tab")
        keys.press("Enter")
        page.wait_for_selector(".picker-row")
        assert keys.focused() == "Search adapters"
        keys.press("ArrowDown", "ArrowDown", "Enter")
        assert keys.focused().startswith("Side B: Adapter: second"), "the focus returns"
        keys.press("Enter")
        page.wait_for_selector(".picker-row")
        keys.press("Escape")
        assert page.locator("dialog[open]").count() == 0
        keys.tab_to("Settings")
        keys.press("Enter")
        keys.tab_to("Temperature")
        keys.press("ArrowRight")
        assert page.get_by_label("Temperature").input_value() == "0.05"
        keys.tab_to("Method")
        keys.press("Home")
        assert page.get_by_label("Method").input_value() == "auto"
        keys.press("Escape")
        assert keys.focused() == "Settings"

        serving.says("abc", hangs=True)
        keys.tab_to("Text to complete")
        keys.press("Enter")
        until(page, "document.querySelectorAll('.answer.running .token').length > 3")
        for _ in range(2):
            keys.tab_to("Stop")
            keys.press("Enter")
        until(page, "!document.querySelector('.answer.running')")
        wait_for(page, lambda: serving.shard.num_running == 0)
        assert {submit.adapter.id for submit in serving.shard.submits[-2:]} == {"", "second"}

        keys.tab_to("Open menu", "Shift+Tab")
        keys.press("Enter")
        assert keys.focused() == "Close"
        keys.tab_to("New conversation")
        keys.press("Enter")
        assert page.locator(".answer").count() == 0 and page.locator(".sidebar.open").count() == 0
        keys.tab_to("Open menu", "Shift+Tab")
        keys.press("Enter")
        keys.tab_to("Live")
        keys.press("Enter")
        until(page, "document.querySelector('.live-state')?.textContent.includes('second')")


def test_a_stopped_side_leaves_the_other(visit: Visit, server: Server) -> None:
    server.serving.shard.answer = lambda submit: Script(server.serving.ids("abc"), hangs=True)
    page = visit.open()
    visit.press("Compare")
    visit.complete()
    until(page, "document.querySelectorAll('.answer.running .token').length > 4")
    visit.press("Stop")
    wait_for(page, lambda: server.serving.shard.num_running == 1)
    assert page.locator(".answer.running").count() == 1
    visit.press("Stop")
    wait_for(page, lambda: server.serving.shard.num_running == 0)
