"""The page in a browser: Debian's chromium without a window, driven by playwright; axe-core checks accessibility."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from lorikeet.adapters.keys import sha256
from tests.e2e.launched import Launched
from tests.router.api.routes.test_tools import TEMPLATE as TOOL_TEMPLATE
from tests.router.scripted_shard import Script
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.long

CHROMIUM = shutil.which("chromium") or ""
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright from PyPI")
if not CHROMIUM:
    pytest.skip("needs chromium (Debian: apt-get install chromium)", allow_module_level=True)
AXE = "axe-core@4.14.1"
TEXT = "The quick brown fox jumps over the lazy dog. " * 3
NUM_ADAPTERS = 2000


class Server:
    """A router with a scripted shard in a thread of its own, because playwright's interface is synchronous."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self._folder, self._fields = folder, fields
        self._ready, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.serving: Serving

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def url(self) -> str:
        return self.serving.url

    def prompt(self) -> str:
        """The text of the last prompt that the shard got."""
        return self.serving.backend.decode(list(self.serving.shard.submits[-1].prompt_ids), skip_special_tokens=False)

    async def _serve(self) -> None:
        async with serving(self._folder, **self._fields) as self.serving:
            self.serving.says(TEXT, ends=True)
            self._ready.set()
            await asyncio.to_thread(self._ended.wait)


class Visit:
    """A page in a fresh browser profile; collects what must not happen."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
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

    def complete(self, prompt: str = "Hello", mode: str = "Completion") -> None:
        """Send a text to complete, or a message."""
        self.page.get_by_role("button", name=mode, exact=True).click()
        self.page.fill("#prompt", prompt)
        self.page.get_by_role("button", name="Send", exact=True).click()

    def finished(self) -> str:
        """Wait for all answers; returns the text of the first."""
        self.page.wait_for_selector(".answer")
        until(self.page, "!document.querySelector('.answer.running')")
        return str(self.page.evaluate("document.querySelector('.tokens').textContent")).removesuffix("end")


def until(page: Any, expression: str, seconds: float = 120.0) -> None:
    """Wait until a JavaScript expression is true. Playwright's own way needs `eval`, which the policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("page")) as started:
        yield started


@pytest.fixture
def visit(browser: Any, server: Server) -> Iterator[Visit]:
    server.serving.says(TEXT, ends=True)
    started = Visit(browser, server.url)
    yield started
    started.context.close()
    assert not started.problems


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from npm."""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    subprocess.run(["npm", "pack", AXE], cwd=folder, check=True, capture_output=True)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        source = archive.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()


def violations(page: Any, axe: str) -> list[str]:
    page.evaluate(axe)  # not a script element: the page's policy forbids those
    found = page.evaluate("axe.run().then((result) => result.violations)")
    return [
        f"{each['id']}: {node['html'][:120]} {node['failureSummary'][:200]}" for each in found for node in each["nodes"]
    ]


@pytest.mark.parametrize("width", [380, 1380])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_is_accessible_and_fits(browser: Any, server: Server, axe: str, theme: str, width: int) -> None:
    server.serving.says(TEXT, ends=True)
    visit = Visit(browser, server.url, color_scheme=theme, viewport={"width": width, "height": 800})
    page = visit.open()
    found: dict[str, list[str]] = {}

    def check(view: str) -> None:
        found[view] = violations(page, axe)
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            found[view].append("it is wider than the window")

    check("start")
    visit.complete()
    visit.finished()
    page.hover(".token:nth-child(5)")
    check("answer")
    page.get_by_role("button", name="Markdown").first.click()
    check("markdown")
    page.get_by_role("button", name="Compare two").click()
    page.get_by_role("button", name="Send", exact=True).click()
    visit.finished()
    check("comparison")
    page.get_by_role("button", name="Copy as code").first.click()
    check("code")
    page.keyboard.press("Escape")
    if width < 860:
        page.get_by_role("button", name="Settings", exact=True).click()
        check("settings")
    page.get_by_role("button", name="API key").click()
    check("key")
    page.keyboard.press("Escape")
    page.goto(server.url + "/#live")
    until(page, "document.querySelector('.live-state').textContent.includes('second')")
    check("live")
    visit.context.close()
    assert {view: faults for view, faults in found.items() if faults} == {}
    assert not visit.problems


def test_all_is_done_with_the_keyboard(visit: Visit) -> None:
    page = visit.open()
    keyboard = page.keyboard

    def tab_to(name: str) -> None:
        for _ in range(60):
            keyboard.press("Tab")
            focus = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
            if str(page.evaluate(focus)).strip().startswith(name):
                return
        raise AssertionError(f"{name} is not reached")

    tab_to("Completion")
    keyboard.press("Enter")
    page.focus("body")
    page.evaluate("document.getElementById('prompt').focus()")
    keyboard.type("Hello")
    keyboard.press("Control+Enter")
    assert visit.finished() == TEXT
    page.evaluate("document.getElementById('tab-playground').focus()")
    tab_to("Answer")
    keyboard.press("ArrowRight")
    keyboard.press("ArrowRight")
    assert "token 2" in page.inner_text(".token-detail")
    keyboard.press("Escape")
    assert page.is_hidden(".token-detail")


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "fahrenheit"}}\n</tool_call>'
FINAL = "It is 71 degrees and sunny in Oslo."


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with a tool format."""
    with Server(tmp_path_factory.mktemp("calling"), chat_template=TOOL_TEMPLATE, adapters=True) as started:
        yield started


@pytest.mark.parametrize(("theme", "width"), [("light", 380), ("dark", 1380)])
def test_a_function_is_called_and_gets_its_result(
    browser: Any, calling: Server, axe: str, theme: str, width: int
) -> None:
    calling.serving.says(CALL, FINAL, ends=True, per_step=3)
    visit = Visit(browser, calling.url, color_scheme=theme, viewport={"width": width, "height": 800})
    page = visit.open()
    page.get_by_role("button", name="Call a function").press("Enter")
    until(page, "document.getElementById('prompt').value.includes('Oslo')")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".results")
    assert "[tools]get_weather add_reminder convert" in calling.prompt()
    assert page.inner_text(".call-head code") == "get_weather"
    assert page.locator(".arguments dd").all_inner_texts() == ['"Oslo"', '"fahrenheit"']
    assert page.locator(".token.lookup").count() > 5
    assert not violations(page, axe)
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
    page.get_by_label('Result of get_weather(city: "Oslo", unit: "fahrenheit")').press("Control+Enter")
    until(page, "document.querySelectorAll('.answer:not(.running)').length === 2")
    assert '[tool]{"temperature": 71, "sky": "sunny"}(get_weather)' in calling.prompt()
    assert page.locator(".tokens").last.text_content() == FINAL + "end"
    assert not violations(page, axe)
    page.get_by_role("button", name="Copy as code").last.click()
    code = page.inner_text("dialog[open]")
    assert '"tool_choice": "auto"' in code and '"role": "tool"' in code and "choice.delta.tool_calls" in code
    page.keyboard.press("Escape")
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert page.locator(".answer").count() == 2 and page.locator(".results").count() == 0
    page.get_by_role("button", name="Edit").last.click()
    assert page.locator(".results textarea").input_value() == '{"temperature": 71, "sky": "sunny"}'
    visit.context.close()
    assert not visit.problems


def test_tools_that_are_not_valid_are_not_sent(browser: Any, calling: Server) -> None:
    visit = Visit(browser, calling.url)
    page = visit.open()
    tools = page.get_by_label("Tools")
    for text, fault in (("[{", "This is not valid JSON"), ('[{"name": "a b"}]', "Function 1 needs a name")):
        tools.fill(text)
        page.fill("#prompt", "Hello")
        page.get_by_role("button", name="Send", exact=True).click()
        assert page.locator(".answer").count() == 0
        assert fault in str(tools.evaluate("(field) => field.validationMessage"))
    tools.fill('{"name": "one"}')
    assert page.get_by_text("one", exact=True).is_visible()
    visit.context.close()


def test_messages_of_two_sides_with_different_calls(visit: Visit) -> None:
    """B makes no call, so A alone gets a result; a side that is added later has A's turns."""
    page = visit.open()
    messages = page.evaluate(
        """async () => {
        const { messagesOf, sidesWithCalls } = await import('./ui/assets/conversation.js');
        const answer = (side, text, calls = []) => ({ side, text, calls, settings: { system: '' } });
        const call = { id: 'x', name: 'f', arguments: '{}' };
        const called = { prompt: 'q', sides: 2, answers: [answer(0, '', [call]), answer(1, 'no')] };
        const results = { results: [{ text: 'r', calls: [[0, 'x']] }], sides: 2, answers: [answer(0, 'final')] };
        const next = { prompt: 'n', sides: 3, answers: [answer(0, ''), answer(1, ''), answer(2, '')] };
        const conversation = { turns: [called, results, next] };
        return [sidesWithCalls(called, 3), ...[0, 1, 2].map((side) => messagesOf(conversation, next, side))];
        }"""
    )
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    final = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "r"},
        {"role": "assistant", "content": "final"},
        {"role": "user", "content": "n"},
    ]
    plain = [final[0], {"role": "assistant", "content": "no"}, final[-1]]
    assert messages == [[0, 2], final, plain, final]


def test_a_script_in_an_answer_is_text(visit: Visit, server: Server) -> None:
    server.serving.says("**bold** <img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3))")
    page = visit.open()
    visit.complete()
    visit.finished()
    page.get_by_role("button", name="Markdown").click()
    assert page.inner_html(".prose strong") == "bold"
    assert page.locator(".prose img, .prose script, .prose [href^=javascript]").count() == 0


@pytest.mark.parametrize("mode", ["Chat", "Completion"])
def test_a_stream_survives_a_reload(visit: Visit, server: Server, mode: str) -> None:
    server.serving.says(TEXT, step_seconds=0.03, ends=True)
    page = visit.open()
    visit.complete(mode=mode)
    until(page, "document.querySelectorAll('.token').length > 5")
    page.reload()
    page.wait_for_selector(".answer.running")
    assert visit.finished() == TEXT
    assert len(server.serving.shard.submits) >= 1
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert visit.finished() == TEXT, "it is kept in the history"


def test_a_stopped_answer_is_cancelled_in_the_shard(visit: Visit, server: Server) -> None:
    server.serving.says("abc", hangs=True)
    page = visit.open()
    visit.complete()
    until(page, "document.querySelectorAll('.token').length > 1")
    page.get_by_role("button", name="Stop").click()
    visit.finished()
    page.wait_for_timeout(500)
    assert server.serving.shard.num_running == 0


def test_five_hundred_tokens_per_second_are_drawn_as_they_come(visit: Visit, server: Server) -> None:
    server.serving.shard.answer = lambda submit: Script(server.serving.ids("abcdefgh " * 150), step_seconds=0.002)
    page = visit.open()
    page.evaluate(
        """() => {
        window.drawn = 0;
        const count = () => { window.drawn += 1; };
        new MutationObserver(count).observe(document.querySelector('.turns'), {childList: true, subtree: true});
        }"""
    )
    page.locator("input[type=number]").first.fill("1500")
    visit.complete()
    assert visit.finished() == "abcdefgh " * 150
    assert page.evaluate("window.drawn") > 20


def test_one_of_two_thousand_adapters_is_found(browser: Any, tmp_path: Path) -> None:
    lines = [f"adapter-{number:04}: {{source: local, id: known}}\n" for number in range(NUM_ADAPTERS)]
    catalogue = tmp_path / "catalogue.yaml"
    catalogue.write_text("".join(lines))
    (tmp_path / "roots" / "known").mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "roots" / "known" / name).write_text("{}")
    with Server(tmp_path, adapters=True, catalogue_path=str(catalogue)) as server:
        visit = Visit(browser, server.url)
        page = visit.open()
        page.click(".adapter-button")
        page.wait_for_selector(".picker-row")
        assert "2,000 of 2,000" in page.inner_text(".picker-count")
        page.keyboard.press("PageDown")
        assert page.locator(".picker-row").count() < 60
        page.keyboard.type("1234")
        assert "1 of 2,000" in page.inner_text(".picker-count")
        page.keyboard.press("Enter")
        assert page.inner_text(".adapter-button .picker-name") == "adapter-1234"
        visit.complete()
        assert visit.finished() == TEXT
        assert server.serving.shard.submits[-1].adapter.id == "known"
        visit.context.close()
        assert not visit.problems


def test_a_key_stays_in_the_tab(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: one, sha256: {sha256('secret one')}}}\n")
    with Server(tmp_path, keys_path=str(keys), admin_key_sha256=sha256("root")) as server:
        visit = Visit(browser, server.url)
        page = visit.page
        page.goto(server.url)
        page.fill("dialog input[type=password]", "secret one")
        page.get_by_role("button", name="Use it").click()
        page.wait_for_selector("[data-ready]")
        visit.complete()
        assert visit.finished() == TEXT
        page.get_by_role("button", name="Copy as code").click()
        assert "secret one" not in page.content() and "LORIKEET_API_KEY" in page.inner_text("dialog[open]")
        assert "secret" not in json.dumps(page.evaluate("[location.href, {...localStorage}]"))
        page.keyboard.press("Escape")
        page.click("#tab-live")
        assert "needs the admin key" in page.inner_text(".live-state")
        visit.context.close()


def test_it_works_behind_a_path_prefix(browser: Any, tmp_path: Path) -> None:
    with Server(tmp_path, root_path="/team/llm") as server:
        visit = Visit(browser, server.url)
        for path in ("/team/llm/", "/team/llm/ui", "/team/llm/ui/"):
            visit.open(path)
        visit.complete()
        assert visit.finished() == TEXT
        visit.context.close()
        assert not visit.problems


def test_a_stream_survives_its_shard_and_a_reload(browser: Any) -> None:
    """Real processes: the shard is killed and the page reloaded in mid-stream; the text is that of a plain request."""
    prompt = "def add(a, b):\n"
    parameters = {"max_new_tokens": 300, "do_sample": True, "temperature": 1.0, "seed": 7}
    with Launched("--cpu-memory", "256MiB", "--threads", "1", "--dtype", "float32") as launched:
        launched.wait_until_ready()
        body = {"inputs": prompt, "parameters": parameters}
        expected = httpx.post(f"{launched.url}/generate", json=body, timeout=120).json()["generated_text"]
        visit = Visit(browser, launched.url)
        page = visit.open()
        page.get_by_label("Most tokens").fill("300")
        page.get_by_label("Temperature").fill("1")
        page.get_by_label("Seed").fill("7")
        visit.complete(prompt)
        until(page, "document.querySelectorAll('.token').length > 20")
        os.kill(launched.shard(0), signal.SIGKILL)
        page.reload()
        assert visit.finished() == expected
        visit.context.close()
        assert not visit.problems
