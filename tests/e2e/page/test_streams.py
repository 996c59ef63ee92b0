"""Answers as they come: reloads, stops, crashed shards, other conversations meanwhile, and a fast stream."""

import os
import signal
import threading
import time
from typing import Any

import httpx
import pytest

from tests.e2e.launched import Launched
from tests.e2e.page.browsing import TEXT, Server, Visit, until, wait_for
from tests.router.scripted_shard import Script

pytestmark = pytest.mark.long

SLOW = 0.03
"""Seconds per token, of answers that run while something else happens."""
LONGEST_S = 1.0
"""No frame and no token may be later than that: on an idle machine it is a few hundredths."""


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


def test_the_kept_part_is_shown_until_the_rest_comes(visit: Visit, server: Server) -> None:
    server.serving.says(TEXT, step_seconds=SLOW, ends=True)
    page = visit.open()
    visit.complete()
    until(page, "document.querySelectorAll('.token').length > 20")
    page.wait_for_timeout(600)  # it is saved every 0.4 s
    held: list[Any] = []
    page.route("**/v1/streams/**", lambda route: held.append(route))  # noqa: PLW0108 - playwright marks functions
    page.reload()
    wait_for(page, lambda: bool(held))
    assert page.locator(".answer.running .token").count() > 20
    held[0].continue_()
    assert visit.finished() == TEXT


def test_the_kept_part_stays_where_the_server_has_no_more(browser: Any, server: Server) -> None:
    server.serving.says(TEXT, hangs=True)
    visit = Visit(browser, server.url)
    page = visit.open()
    with page.expect_request("**/generate_stream") as sent:
        visit.complete()
    until(page, f"document.querySelector('.tokens').textContent.length === {len(TEXT)}")
    page.wait_for_timeout(600)
    page.goto(server.url + "/ui/assets/icon.svg")
    assert httpx.delete(f"{server.url}/v1/streams/{sent.value.headers['x-request-id']}").status_code == 204
    visit.open()
    assert visit.finished() == TEXT
    assert "does not keep the rest of this answer" in page.inner_text(".answer-note")
    visit.context.close()


def test_an_answer_goes_on_while_another_conversation_is_open(visit: Visit, server: Server) -> None:
    server.serving.says(TEXT, "no", step_seconds=SLOW, ends=True)
    page = visit.open()
    with page.expect_request("**/generate_stream") as sent:
        visit.complete("First")
    until(page, "document.querySelectorAll('.token').length > 5")
    visit.press("New conversation")
    assert page.locator(".answer").count() == 0
    wait_for(page, lambda: server.serving.shard.num_running == 0)
    page.wait_for_timeout(600)
    httpx.delete(f"{server.url}/v1/streams/{sent.value.headers['x-request-id']}")  # what is not here now is lost
    visit.press("First")
    assert visit.finished() == TEXT
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert visit.finished() == TEXT


def test_a_running_conversation_is_found_as_it_is(visit: Visit, server: Server) -> None:
    """One stream is read once, and what is written elsewhere is not mixed up with it."""
    server.serving.says(TEXT, "other", step_seconds=SLOW, ends=True)
    page = visit.open()
    resumed: list[str] = []
    page.on("request", lambda request: "/v1/streams/" in request.url and resumed.append(request.url))
    visit.complete("First")
    until(page, "document.querySelectorAll('.token').length > 5")
    visit.press("New conversation")
    visit.complete("Second")
    assert visit.finished() == "other"
    visit.press("First")
    assert page.locator(".answer.running .token").count() > 5
    assert visit.finished() == TEXT
    visit.press("Second")
    assert visit.finished() == "other"
    assert not resumed


def test_a_deleted_conversation_stops_in_the_shard(visit: Visit, server: Server) -> None:
    server.serving.says("abc", hangs=True)
    page = visit.open()
    visit.complete("First")
    until(page, "document.querySelectorAll('.token').length > 1")
    visit.press("New conversation")
    visit.press("Delete First")
    wait_for(page, lambda: server.serving.shard.num_running == 0)
    page.reload()
    page.wait_for_selector("[data-ready]")
    assert page.locator(".history-list li").count() == 0


FRAMES = """() => {
    window.frames_ = [];
    let last = performance.now();
    const note = (now) => {
        const tokens = document.querySelector('.tokens');
        frames_.push([Date.now() / 1000, tokens ? tokens.childElementCount : 0, (now - last) / 1000]);
        last = now;
        requestAnimationFrame(note);
    };
    requestAnimationFrame(note);
}"""


def test_five_hundred_tokens_per_second_are_drawn_as_they_come(visit: Visit, server: Server) -> None:
    """A second reader of the stream says when each token came; a frame shows it soon, and frames do not stop."""
    text = "abcdefgh " * 150
    server.serving.shard.answer = lambda submit: Script(server.serving.ids(text), step_seconds=0.002)
    page = visit.open()
    page.get_by_label("Longest answer").fill("1500")
    page.evaluate(FRAMES)
    arrived: list[float] = []

    def read(stream_id: str) -> None:
        with httpx.stream("GET", f"{server.url}/v1/streams/{stream_id}?from=0", timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    arrived.append(time.time())

    with page.expect_request("**/generate_stream") as sent:
        visit.complete()
    reader = threading.Thread(target=read, args=(sent.value.headers["x-request-id"],))
    reader.start()
    assert visit.finished() == text
    reader.join()
    frames = [frame for frame in page.evaluate("frames_") if arrived[0] <= frame[0] <= arrived[-1]]
    assert len(arrived) == len(server.serving.ids(text))
    assert max(gap for _, _, gap in frames[1:]) < LONGEST_S
    for at, num_shown, _ in frames:
        assert num_shown >= sum(each < at - LONGEST_S for each in arrived)
    assert sum(0 < num_shown < len(arrived) for _, num_shown, _ in frames) > 20


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
        page.get_by_label("Longest answer").fill("300")
        page.get_by_label("Temperature").fill("1")
        page.get_by_label("Seed").fill("7")
        visit.complete(prompt)
        until(page, "document.querySelectorAll('.token').length > 20")
        os.kill(launched.shard(0), signal.SIGKILL)
        page.reload()
        assert visit.finished() == expected
        visit.close()
