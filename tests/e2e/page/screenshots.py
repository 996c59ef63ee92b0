"""Pictures of every view with the demo model, light and dark, wide and narrow, for a look at them.

    python -m tests.e2e.page.screenshots build/screenshots
    python -m tests.e2e.page.screenshots --docs

The second writes the two pictures of the documentation. Needs playwright and chromium, as the tests of the page do.
"""

import argparse
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

from tests.e2e.launched import ROOT, Launched
from tests.e2e.page.browsing import CHROMIUM, Visit, until

SERVER = ("--cpu-memory", "1GiB", "--draft-model-id", str(ROOT / "demo" / "draft"), "--speculative-tokens", "4")
WIDTHS = {"wide": (1280, 800), "narrow": (380, 760)}
RECORD = 'Record:\nname = "Wamiko"\nscore = 93\ncity = "Lund"\n\nAs JSON:\n'
FUNCTION = "Write a function: Return the length of the list."
LOADS: dict[str, str] = {
    "": "def read_lines(path):\n",
    "json": RECORD,
    "sql": "Table parrots: name, age, colour\nList the name of parrots whose age is above 3.\nSQL:\n",
    "record": "def area(width, height):\n",
}
"""Prompts by adapter, which run while the live view is drawn."""


@contextmanager
def load(url: str, num_clients: int = 8) -> Iterator[None]:
    """Clients that ask again and again, and one that makes mistakes."""
    is_over = threading.Event()

    def ask(bodies: Iterator[tuple[str, str]]) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not is_over.is_set():
                adapter, prompt = next(bodies)
                parameters = {"max_new_tokens": 160, "speculative_schedule": "constant", "temperature": 0.9}
                named = {"adapter_id": adapter} if adapter else {}
                client.post("/generate", json={"inputs": prompt, "parameters": {**parameters, **named}})

    def fail() -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not is_over.wait(2):
                client.post("/generate", json={"inputs": ""})

    pairs = list(LOADS.items())
    clients = [
        threading.Thread(target=ask, args=(itertools.cycle(pairs[first % 4 :] + pairs[: first % 4]),))
        for first in range(num_clients)
    ]
    clients.append(threading.Thread(target=fail))
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()


@dataclass
class Camera:
    """Takes pictures of one visit."""

    visit: Visit
    take: Callable[[str], None]

    @property
    def page(self) -> Any:
        return self.visit.page

    def choose(self, adapter: str) -> None:
        self.page.click(".adapter-button")
        self.page.wait_for_selector(".picker-row")
        self.page.fill("dialog[open] input", adapter)
        if adapter == "json":
            self.take("picker")
        self.page.keyboard.press("Enter")

    def compare(self) -> None:
        """One prompt with and without speculative decoding."""
        self.page.get_by_label("Draft length").select_option("constant")
        self.visit.press("Compare")
        self.visit.complete(RECORD)
        self.visit.finished(2)

    @contextmanager
    def settings(self, *, is_narrow: bool) -> Iterator[None]:
        """The settings are open, where they are not always."""
        if is_narrow:
            self.visit.press("Settings")
        yield
        if is_narrow:
            self.visit.press("Settings")

    def playground(self, *, is_narrow: bool) -> None:
        self.visit.open()
        self.take("start")
        with self.settings(is_narrow=is_narrow):
            self.choose("json")
            self.take("settings")
        self.visit.complete(RECORD)
        self.visit.finished()
        self.page.hover(".token:nth-child(6)")
        self.take("answer")
        with self.settings(is_narrow=is_narrow):
            self.compare()
        self.take("comparison")
        self.visit.press("Copy as code")
        self.take("code")
        self.page.keyboard.press("Escape")
        self.visit.press("Compare")
        self.visit.press("New conversation") if not is_narrow else self.new_in_drawer()
        self.page.get_by_role("button", name="Chat", exact=True).click()
        self.page.get_by_role("button", name="Call a function").click()
        until(self.page, "document.getElementById('prompt').value.includes('Oslo')")
        self.page.keyboard.press("Control+Enter")
        self.page.wait_for_selector(".results")
        self.take("tools")
        self.visit.press("API key")
        self.take("key")
        self.page.keyboard.press("Escape")

    def new_in_drawer(self) -> None:
        self.visit.press("History")
        self.take("history")
        self.visit.press("New conversation")

    def live(self) -> None:
        self.visit.open("/#live")
        self.page.wait_for_timeout(20_000)
        self.take("live")


@contextmanager
def camera(browser: Any, url: str, folder: Path, theme: str, size: tuple[int, int], mark: str = "") -> Iterator[Camera]:
    visit = Visit(browser, url, color_scheme=theme, viewport={"width": size[0], "height": size[1]})
    folder.mkdir(parents=True, exist_ok=True)
    yield Camera(visit, lambda name: visit.page.screenshot(path=folder / f"{name}{mark}.png"))
    visit.context.close()


def take_all(browser: Any, url: str, folder: Path) -> None:
    for theme, (name, size) in itertools.product(("light", "dark"), WIDTHS.items()):
        with camera(browser, url, folder, theme, size, f"-{theme}-{name}") as one:
            one.playground(is_narrow=name == "narrow")
    with load(url):
        for theme, (name, size) in itertools.product(("light", "dark"), WIDTHS.items()):
            with camera(browser, url, folder, theme, (size[0], 1500), f"-{theme}-{name}") as one:
                one.live()


def take_for_docs(browser: Any, url: str) -> None:
    folder = ROOT / "docs" / "images"
    with camera(browser, url, folder, "light", (1280, 800)) as one:
        take, one.take = one.take, lambda name: None
        one.visit.open()
        one.choose("json")
        one.compare()
        one.visit.press("Side A")
        take("playground")
    with load(url), camera(browser, url, folder, "dark", (1280, 800)) as one:
        one.live()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "screenshots")
    parser.add_argument("--docs", action="store_true", help="write the pictures of the documentation only")
    options = parser.parse_args()
    with Launched(*SERVER) as launched, sync_playwright() as driver:
        launched.wait_until_ready()
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        if options.docs:
            take_for_docs(browser, launched.url)
        else:
            take_all(browser, launched.url, options.folder)
        browser.close()


if __name__ == "__main__":
    main()
