"""What the page costs: bytes of its first view, and time of the main thread while a long answer comes."""

import json
from typing import Any

import pytest

from tests.e2e.page.browsing import Server, until
from tests.router.scripted_shard import Script

pytestmark = pytest.mark.long

MOST_BYTES = 150_000
NUM_TOKENS, TOKENS_PER_S = 2000, 200
LONGEST_TASK_MS = 100
PART = "Some **bold** words and `code`, then\n\n- one\n- two\n\n```python\ndef f(x):\n    return [x, 1]\n```\n\n"


def test_the_first_view_is_small_and_from_this_server(browser: Any, server: Server) -> None:
    context = browser.new_context()
    page = context.new_page()
    sizes: dict[str, int] = {}
    responses: list[Any] = []
    page.on("response", lambda response: responses.append(response))  # noqa: PLW0108 - playwright marks functions
    page.goto(server.url)
    page.wait_for_selector("[data-ready]")
    page.wait_for_load_state("networkidle")
    for response in responses:
        assert response.url.startswith(server.url)
        if "/v1/" not in response.url and response.status == 200:
            sizes[response.url] = len(response.body())
    policy = responses[0].headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'") and "unsafe" not in policy
    assert sum(sizes.values()) <= MOST_BYTES, sizes
    context.close()


def longest_task_ms(trace: bytes) -> float:
    """The most processor time that one task of a page's main thread took."""
    events = json.loads(trace)["traceEvents"]
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = [event for event in events if event["name"] == "ThreadControllerImpl::RunTask" and "tdur" in event]
    return max(event["tdur"] for event in tasks if (event["pid"], event["tid"]) in threads) / 1000


@pytest.mark.parametrize("view", ["text", "tokens"])
def test_a_long_answer_blocks_no_frame(browser: Any, server: Server, view: str) -> None:
    """Processor time, not time: other processes of a busy machine do not count."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(f"localStorage['lorikeet-tokens'] = '{json.dumps(view == 'tokens')}'")
    page.goto(server.url)
    page.wait_for_selector("[data-ready]")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer").fill(str(NUM_TOKENS))
    ids = server.serving.ids(PART * 40)[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    server.serving.shard.answer = lambda submit: Script(ids, step_seconds=1 / TOKENS_PER_S)
    browser.start_tracing(page=page, categories=["toplevel"])
    page.fill("#prompt", "Write much")
    page.press("#prompt", "Enter")
    until(page, "document.querySelector('.answer:not(.running)')")
    longest = longest_task_ms(browser.stop_tracing())
    shown = page.inner_text(".tokens" if view == "tokens" else ".prose")
    assert "return [x, 1]" in shown
    context.close()
    assert longest < LONGEST_TASK_MS
    print(f"{view}: the longest task took {longest:.0f} ms")
