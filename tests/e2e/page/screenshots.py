"""The two pictures of docs/playground.md, with the embedded model under load.

    python -m tests.e2e.page.screenshots

Needs playwright and chromium, as the tests of the page do. Pictures of the page's states are in tests/page.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

from tests.e2e.launched import ROOT, Launched
from tests.e2e.page.browsing import CHROMIUM, until

FOLDER = ROOT / "docs" / "images"
SERVER = ("--cpu-memory", "1GiB", "--draft-model-id", str(ROOT / "demo" / "draft"), "--speculative-tokens", "4")
RECORD = 'Record:\nname = "Wamiko"\nscore = 93\ncity = "Lund"\n\nAs JSON:\n'
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


def opened(browser: Any, url: str, theme: str) -> Any:
    page = browser.new_context(color_scheme=theme, viewport={"width": 1280, "height": 800}).new_page()
    page.goto(url)
    page.wait_for_selector("[data-ready]")
    return page


def take(browser: Any, url: str) -> None:
    page = opened(browser, url, "light")
    page.get_by_role("button", name="Completion").click()
    page.get_by_role("button", name="Compare").click()
    until(page, "!document.querySelector('.composer [type=submit]').disabled")
    page.press("#prompt", "Enter")
    until(page, "document.querySelectorAll('.answer:not(.running)').length === 2")
    page.hover(".token:nth-child(8)")
    page.screenshot(path=FOLDER / "playground.png")
    with load(url):
        page = opened(browser, f"{url}/#live", "dark")
        page.wait_for_timeout(45_000)
        page.screenshot(path=FOLDER / "live.png")


def main() -> None:
    with Launched(*SERVER) as launched, sync_playwright() as driver:
        launched.wait_for("is ready at", 600.0)
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        take(browser, launched.url)
        browser.close()


if __name__ == "__main__":
    main()
