"""The states of the page that are looked at: pictures of them are kept, and axe-core finds no fault in any."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.page.browsing import Server, until
from tests.router.scripted_shard import Script
from tests.router.serving import EOS

PHONE, LAPTOP, DESKTOP = (390, 844), (1280, 800), (1920, 1080)
MODEL = "SmolLM2-135M-Instruct"
PROMPT = "Write a function that adds two numbers, and say how it works."
ANSWER = """Here is a **small** function:

```python
def add(first: int, second: int) -> int:
    # the sum of both
    return first + second
```

1. It takes *two* numbers.
2. It returns `first + second`.

| call | result |
|---|--:|
| `add(40, 2)` | 42 |
"""
ADAPTERS = [
    ("pirate", "Answers as a pirate, in short sentences", "device", None),
    ("sql", "Turns a question about a table into SQL", "host", None),
    ("titles", "Writes a title for a text", "disk", None),
    ("json", "Turns a sentence into JSON", None, None),
    ("broken", None, None, "its lora_A has 8 columns, but must have 64"),
]


@dataclass(frozen=True)
class Stage:
    """A page that is about to be opened, and the server behind it."""

    page: Any
    server: Server

    def open(self, path: str = "/") -> None:
        self.page.goto(self.server.url + path)
        self.page.wait_for_selector("[data-ready]")

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).first.click()

    def ask(self, prompt: str = PROMPT) -> None:
        self.page.fill("#prompt", prompt)
        self.page.focus("#prompt")
        self.page.keyboard.press("Enter")

    def answered(self, number: int = 1) -> None:
        """Wait for answers."""
        until(self.page, f"document.querySelectorAll('.answer:not(.running)').length === {number}")

    def has(self, **fields: Any) -> None:
        """Capabilities of the server."""

        content = {**httpx.get(f"{self.server.url}/v1/capabilities").json(), **fields}
        self.page.route("**/v1/capabilities", lambda route: route.fulfill(json=content))

    def fails(self, status: int, message: str, **headers: str) -> None:
        """The answer to every chat."""
        body = json.dumps({"error": {"message": message}})
        headers = {"content-type": "application/json", **headers}
        self.page.route("**/chat/completions", lambda route: route.fulfill(status=status, body=body, headers=headers))

    def lists(self) -> None:
        """Adapters of the server."""
        data: list[dict[str, Any]] = [
            {"id": name, "parent": "m", "root": f"{name}-7", "adapter_source": "local", "description": description}
            | {"tier": tier, "problem": problem}
            for name, description, tier, problem in ADAPTERS
        ]
        self.page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": data}))


def _start(stage: Stage) -> None:
    stage.open()


def _loading(stage: Stage) -> None:
    stage.has(ready=False, version=None, uptime_s=12.0)
    stage.open()
    stage.page.wait_for_selector("text=The model is loading")


def _gone(stage: Stage) -> None:
    _start(stage)
    stage.page.route("**/v1/capabilities", lambda route: route.abort())
    stage.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    stage.page.wait_for_selector("text=The server has not answered")


def _answer(stage: Stage) -> None:
    _start(stage)
    stage.server.serving.says(ANSWER, ends=True)
    stage.ask()
    stage.answered()
    stage.page.wait_for_selector(".hljs-keyword")


def _tokens(stage: Stage) -> None:
    stage.page.add_init_script("localStorage['lorikeet-tokens'] = 'true'")
    _start(stage)
    stage.server.serving.says("The quick brown fox jumps over the lazy dog.", ends=True, per_step=3)
    stage.ask("Say a sentence with all letters.")
    stage.answered()
    stage.page.locator(".tokens").press("Home")


def _compare(stage: Stage) -> None:
    _start(stage)
    stage.press("Compare")
    until(stage.page, "document.getElementById('prompt').value.includes('lorikeet')")


def _compared(stage: Stage) -> None:
    _compare(stage)
    serving = stage.server.serving
    ids = [*serving.ids("The rainbow lorikeet lives along the coast."), EOS]
    serving.shard.answer = lambda submit: Script(ids, per_step=1 if submit.speculation.method == "off" else 3)
    stage.page.focus("#prompt")
    stage.page.keyboard.press("Enter")
    stage.answered(2)


def _settings(stage: Stage) -> None:
    _start(stage)
    stage.press("Settings")
    stage.page.wait_for_selector(".settings-panel.open")


def _picker(stage: Stage) -> None:
    stage.lists()
    stage.open()
    stage.page.locator(".adapter-button").click()
    stage.page.wait_for_selector(".picker-row >> nth=3")


def _wrong_key(stage: Stage) -> None:
    stage.page.add_init_script("sessionStorage['lorikeet-key'] ??= 'wrong'")
    stage.page.route("**/v1/capabilities", lambda route: route.fulfill(status=401, body="{}"))
    stage.page.goto(stage.server.url)
    stage.page.wait_for_selector("text=does not accept this key")


def _no_adapter(stage: Stage) -> None:
    stage.lists()
    stage.fails(404, "there is no adapter 'piratee': did you mean 'pirate'?")
    stage.open()
    stage.page.locator(".adapter-button").click()
    stage.page.fill("dialog[open] input", "piratee")
    stage.page.keyboard.press("Enter")
    stage.ask("Ahoy")
    stage.page.wait_for_selector(".answer-note.bad")


def _full(stage: Stage) -> None:
    stage.fails(429, "Model is overloaded", **{"retry-after": "5"})
    _start(stage)
    stage.ask("Hello")
    stage.page.wait_for_selector(".answer-note.bad")


def _menu(stage: Stage) -> None:
    _answer(stage)
    if stage.page.get_by_role("button", name="Open menu").is_visible():
        stage.press("Open menu")


def _shortcuts(stage: Stage) -> None:
    _start(stage)
    stage.page.locator("#main").focus()
    stage.page.keyboard.press("?")
    stage.page.wait_for_selector("dialog[open] kbd")


def _code(stage: Stage) -> None:
    _answer(stage)
    stage.press("Copy as code")
    stage.page.wait_for_selector("dialog[open] pre")


def _live(stage: Stage) -> None:
    body = "".join(f"data: {json.dumps(snapshot(number))}\n\n" for number in range(121))
    stage.page.route(
        "**/v1/live", lambda route: route.fulfill(body=body, headers={"content-type": "text/event-stream"})
    )
    stage.open("/#live")
    stage.page.wait_for_selector(".step-row")


def _login(stage: Stage) -> None:
    stage.has(may_watch=False, has_keys=True)
    stage.open("/#live")
    stage.page.wait_for_selector(".live-login")


def snapshot(number: int) -> dict[str, Any]:
    """What a busy server says in half a second."""
    tokens = sum(180 + 60 * math.sin(each / 7) for each in range(number))
    bounds = [0.001 * 1.5**power for power in range(24)]
    slow = 10 + 4 * math.sin(number / 11)

    def counts(typical: float) -> list[list[float]]:
        return [[bound, 100 * number / (1 + (typical / bound) ** 3)] for bound in bounds]

    return {
        "time": 1000 + number / 2,
        "generated_tokens": tokens,
        "prompt_tokens": 400 * number,
        "requests": {"running": 6, "waiting": 2, "preempted": 0},
        "adapters": [
            {"name": name, "running": running, "waiting": waiting, "preempted": 0}
            for name, running, waiting in (("sql", 3, 2), (None, 2, 0), ("pirate", 1, 0))
        ],
        "tiers": {"device": 2, "host": 1, "disk": 4, "into_slot": 0, "from_source": ["titles"]},
        "drafts": {"lookup": {"drafted": 40 * number, "accepted": 26 * number}},
        "latency": {"first_token": counts(0.02 * slow), "between_tokens": counts(0.001 * slow)},
        "shards": [
            {"index": 0, "connected": True, "ready": True, "device": "cuda:0", "running": 6, "resident_adapters": 2}
            | {"adapter_slots": 64, "pages": 4096, "used_pages": 900, "cached_pages": 1200, "waiting": 0}
            | {"step_ms": 14, "step_tokens": 45}
            | {
                "step": [
                    _part(1, None, 32, 0),
                    *(_part(each, "sql", 1, 3) for each in (2, 3, 4)),
                    _part(5, "pirate", 1, 0),
                ]
            }
        ],
        "failures": [{"kind": "validation", "status": 422, "last_minute": 1, "count": 3, "last_at": 1000}],
        "draining": False,
    }


def _part(request: int, adapter: str | None, tokens: int, drafts: int) -> dict[str, Any]:
    return {"request": request, "adapter": adapter, "tokens": tokens, "drafts": drafts, "prefill": tokens > 1}


@dataclass(frozen=True)
class State:
    """How the page gets there, and how its picture is taken."""

    name: str
    act: Callable[[Stage], None]
    size: tuple[int, int] = LAPTOP
    theme: str = "light"


STATES = [
    State("start", _start),
    State("start-phone", _start, PHONE, "dark"),
    State("loading", _loading),
    State("server-gone", _gone, LAPTOP, "dark"),
    State("wrong-key", _wrong_key),
    State("no-adapter", _no_adapter),
    State("queue-full", _full, PHONE),
    State("answer", _answer),
    State("answer-phone", _answer, PHONE, "dark"),
    State("tokens", _tokens, LAPTOP, "dark"),
    State("compare", _compare),
    State("compared", _compared, DESKTOP),
    State("settings", _settings, LAPTOP, "dark"),
    State("settings-phone", _settings, PHONE),
    State("picker", _picker),
    State("menu-phone", _menu, PHONE),
    State("shortcuts", _shortcuts, LAPTOP, "dark"),
    State("code", _code),
    State("live", _live, DESKTOP, "dark"),
    State("live-phone", _live, PHONE),
    State("live-login", _login),
]
