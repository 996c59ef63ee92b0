"""The live view while requests run: steps, tables, drafts of the last minute, failures; wide and narrow."""

from typing import Any

import httpx
import pytest

from lorikeet.proto import shard_pb2 as pb
from tests.e2e.page.browsing import Server, Visit, until, violations, wait_for

pytestmark = pytest.mark.long


def card(page: Any, title: str) -> str:
    return str(page.inner_text(f"section.card[aria-label='{title}']"))


@pytest.mark.parametrize("width", [380, 1380])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_running_requests_are_shown(browser: Any, adapting: Server, axe: str, theme: str, width: int) -> None:
    serving = adapting.serving
    shard, [link] = serving.shard, serving.dispatcher.links
    serving.says("secret output", hangs=True)
    parameters: list[dict[str, Any]] = [{}, {"adapter_id": "first"}, {"adapter_id": "first"}]
    visit = Visit(browser, adapting.url, color_scheme=theme, viewport={"width": width, "height": 800})
    page = visit.page
    asked = []
    for number, each in enumerate(parameters, 1):  # one after another, so that their order is known
        body = {"inputs": "secret prompt", "parameters": each}
        asked.append(adapting.start(serving.client.post("/generate", json=body)))
        wait_for(page, lambda number=number: shard.num_running == number)
    assert httpx.post(f"{adapting.url}/generate", json={"inputs": ""}).status_code == 422
    visit.open("/#live")

    def tell() -> None:
        ids = list(link.running)
        detail = pb.StepDetail(ids=ids, num_tokens=[40, 1, 1], num_drafts=[0, 3, 0])
        load = pb.Load(num_running=3, used_pages=100, cached_pages=50, step_ms=17, step_tokens=45)
        link.update(pb.StepOutput(step_detail=detail, load=load), 0.0)

    adapting.call(tell)
    until(page, "document.querySelectorAll('.step-row').length === 3")
    rows = [row.split("\n") for row in page.locator(".step-row").all_inner_texts()]
    assert [(name.split(maxsplit=1)[1], count) for name, count in rows] == [
        ("base model", "40"),
        ("first", "1+3"),
        ("first", "1"),
    ]
    labels = page.evaluate("[...document.querySelectorAll('.step-row .parts')].map((each) => each.ariaLabel)")
    assert labels[0].endswith("prompt 40, drafts 0") and labels[1].endswith("drafts 3")
    now = page.inner_text(".tiles").split("\n")
    assert now[now.index("Running") + 1] == "3" and now[now.index("Waiting") + 1] == "0"
    adapters = page.locator("section[aria-label=Adapters] tbody tr").all_inner_texts()
    assert [row.split("\t") for row in adapters] == [["first", "2", "0", "0"], ["base model", "1", "0", "0"]]
    assert "100 used, 50 cached, 3,946 free of 4,096" in card(page, "KV pages")
    assert "17 ms" in card(page, "Replicas") and "45" in card(page, "Replicas")
    failures = [row.split("\t") for row in page.locator("section[aria-label^=Failures] tbody tr").all_inner_texts()]
    assert [
        int(last_minute) > 0 for kind, status, last_minute, *_ in failures if (kind, status) == ("validation", "422")
    ] == [True]
    page.locator("section[aria-label=Adapters] .scroll").focus()
    page.wait_for_timeout(1200)
    assert page.evaluate("document.activeElement.ariaLabel") == "Adapter", "an update leaves the focus where it is"
    assert "secret" not in page.content()
    assert violations(page, axe) == []
    for each in asked:
        each.cancel()
    wait_for(page, lambda: shard.num_running == 0)
    until(page, "document.querySelector('section[aria-label=Adapters]').innerText.includes('No request is')")
    assert "No request runs." in card(page, "Current step")
    visit.close()


def test_drafts_are_those_of_the_last_minute(visit: Visit, server: Server) -> None:
    """Not all since the server's start: of one request before the view was opened, and one after."""
    serving = server.serving
    serving.says("a" * 30, per_step=3, num_rejected=1)
    body = {"inputs": "Hi", "parameters": {"speculative_tokens": 3, "max_new_tokens": 30}}
    assert httpx.post(f"{server.url}/generate", json=body).status_code == 200
    page = visit.open("/#live")
    drafts = "document.querySelector('section[aria-label^=Draft]').textContent"
    until(page, f"{drafts}.includes('No draft token was verified')")
    assert httpx.post(f"{server.url}/generate", json=body).status_code == 200
    until(page, f"{drafts}.includes('67 % of 30')")
    assert "Lookup" in page.evaluate(drafts) and "Since this view was opened" in page.evaluate(drafts)


def test_older_drafts_leave_the_minute(visit: Visit) -> None:
    page = visit.open("/#live")
    shown = page.evaluate(
        """async () => {
        const { LiveView } = await import('./ui/assets/live/live.js');
        const root = document.createElement('div');
        const view = new LiveView(root, { may_watch: true });
        const card = () => root.querySelector('section[aria-label^=Draft]').textContent;
        const at = (time, drafted, accepted) => {
            view.draw({ time, drafts: { lookup: { drafted, accepted } }, generated_tokens: 0, prompt_tokens: 0,
                shards: [], requests: { running: 0, waiting: 0, preempted: 0 }, adapters: [], failures: [],
                tiers: { device: 0, host: 0, disk: 0, into_slot: 0, from_source: [] } });
            return card();
        };
        return [at(1000, 500, 500), at(1030, 600, 550), at(1059, 600, 550), at(1095, 600, 550), at(1096, 10, 1),
            at(1097, 20, 3), view.totals.length];
        }"""
    )
    assert "No draft token" in shown[0] and "50 % of 100" in shown[1] and "50 % of 100" in shown[2]
    assert "No draft token" in shown[3], "they are older than a minute"
    assert "No draft token" in shown[4] and "20 % of 10" in shown[5], "after a restart of the server"
    assert shown[6] == 2
