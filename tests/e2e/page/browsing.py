"""A server for the page's tests, and a visit of the page: Debian's chromium without a window, driven by playwright."""

import json
import shutil
import time
from collections.abc import Callable
from typing import Any, Self

from tests.router.threaded_serving import ThreadedServing

CHROMIUM = shutil.which("chromium") or ""
SECTIONS = json.dumps(["Sampling", "Speculative decoding", "Output", "Tools"])
REMEMBERED = json.dumps(
    [("lorikeet-tokens", "true"), ("lorikeet-settings-open", "true"), ("lorikeet-sections", SECTIONS)]
)
"""What this browser remembers: answers are shown as tokens, and all settings are open."""
TEXT = "The quick brown fox jumps over the lazy dog. " * 3


class Server(ThreadedServing):
    """The server of a page's tests: playwright's interface is synchronous."""

    def prompt(self) -> str:
        """The text of the last prompt that the shard got."""
        return self.serving.backend.decode(list(self.serving.shard.submits[-1].prompt_ids), skip_special_tokens=False)

    def begin(self) -> None:
        self.serving.says(TEXT, ends=True)


class Visit:
    """A page in a fresh browser profile; collects what must not happen."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.context.add_init_script(f"for (const [name, value] of {REMEMBERED}) localStorage[name] ??= value")
        self.page = self.context.new_page()
        self.url = url
        self.problems: list[str] = []
        self.page.on("console", lambda message: message.type in ("error", "warning") and self._note(message.text))
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("request", lambda request: self._check(request.url))

    def _note(self, text: str) -> None:
        self.problems.append(text)

    def _check(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self.problems.append(f"request to {url}")

    def open(self, path: str = "/") -> Any:
        self.page.goto(self.url + path)
        self.page.wait_for_selector("[data-ready]")
        return self.page

    def press(self, name: str) -> None:
        """Press the first button of this name."""
        self.page.get_by_role("button", name=name, exact=True).first.click()

    def complete(self, prompt: str = "Hello", mode: str = "Completion") -> None:
        """Send a text to complete, or a message."""
        self.press(mode)
        self.page.fill("#prompt", prompt)
        self.press("Send")

    def finished(self, number: int = 1) -> str:
        """Wait for all answers, at least `number`; returns the text of the first."""
        until(self.page, f"document.querySelectorAll('.answer').length >= {number}")
        until(self.page, "!document.querySelector('.answer.running')")
        return self.texts()[0]

    def texts(self) -> list[str]:
        """Texts of the answers that are shown."""
        return [text.removesuffix("end") for text in self.page.locator(".tokens").all_text_contents()]

    def close(self) -> None:
        """Fails where something happened that must not."""
        self.context.close()
        assert not self.problems

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.context.close()


def until(page: Any, expression: str, seconds: float = 120.0) -> None:
    """Wait until a JavaScript expression is true. Playwright's own way needs `eval`, which the policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def wait_for(page: Any, condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something outside the page is true; the page's events are handled meanwhile."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never became true"
        page.wait_for_timeout(20)


def violations(page: Any, axe: str) -> list[str]:
    """What axe-core finds, and whether the page is wider than its window."""
    page.evaluate(axe)  # not a script element: the page's policy forbids those
    found = page.evaluate("axe.run().then((result) => result.violations)")
    faults = [
        f"{each['id']}: {node['html'][:120]} {node['failureSummary'][:200]}" for each in found for node in each["nodes"]
    ]
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        faults.append("it is wider than the window")
    return faults
