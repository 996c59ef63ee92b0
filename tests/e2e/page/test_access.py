"""Who gets the page from where: other host names, keys, path prefixes; and the choice of an adapter."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.proto import shard_pb2 as pb
from tests.e2e.page.browsing import TEXT, Server, Visit

pytestmark = pytest.mark.long

NUM_ADAPTERS = 2000


def test_it_works_over_plain_http_from_another_host(browser: Any, server: Server) -> None:
    """Where `crypto.randomUUID` and `navigator.clipboard` do not exist."""
    server.serving.says(TEXT, ends=True)
    with Visit(browser, server.url.replace("127.0.0.1", "lorikeet.test")) as visit:
        page = visit.open()
        assert not page.evaluate("isSecureContext")
        visit.complete()
        assert visit.finished() == TEXT
        visit.press("Copy as code")
        page.wait_for_selector("dialog[open] pre")
        code = page.locator("dialog[open] pre").first.text_content()
        visit.press("Copy curl")
        assert page.get_by_role("button", name="Copied", exact=True).is_visible()
        page.keyboard.press("Escape")
        page.fill("#prompt", "")
        page.focus("#prompt")
        page.keyboard.press("Control+V")
        assert page.input_value("#prompt") == code


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
        visit.close()


def test_the_picker_shows_where_adapters_are(browser: Any, adapting: Server) -> None:
    serving = adapting.serving
    [link] = serving.dispatcher.links
    serving.says(TEXT, ends=True)
    with Visit(browser, adapting.url) as visit:
        page = visit.open()

        def rows() -> list[list[str]]:
            page.click(".adapter-button")
            page.wait_for_selector(".picker-row")
            found = [row.split("\n") for row in page.locator(".picker-row").all_inner_texts()[1:]]
            page.keyboard.press("Escape")
            return found

        assert rows() == [[name, "not loaded"] for name in ("first", "second", "third")]
        for name in ("second", "third"):
            body = {"inputs": "Hi", "parameters": {"adapter_id": name}}
            assert httpx.post(f"{adapting.url}/generate", json=body).status_code == 200
        known = serving.service.admission.loading.digests_by_name()
        digests = {name.partition(":")[2]: min(found) for name, found in known.items()}
        for name, residency in (("second", pb.AdapterState.HOST_MEMORY), ("third", pb.AdapterState.RESIDENT)):
            state = pb.AdapterState(digest=digests[name], residency=residency)
            adapting.call(lambda state=state: link.residency.update(state))
        assert rows() == [["third", "on the device"], ["second", "in host memory"], ["first", "not loaded"]]
        absent = pb.AdapterState(digest=digests["third"], residency=pb.AdapterState.ABSENT)
        adapting.call(lambda: link.residency.update(absent))
        assert ["third", "on disk"] in rows()


def test_a_key_stays_in_the_tab(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: one, sha256: {sha256('secret one')}}}\n")
    with Server(tmp_path, keys_path=str(keys), admin_key_sha256=sha256("root")) as server:
        visit = Visit(browser, server.url)
        page = visit.page
        page.goto(server.url)
        page.fill("dialog input[type=password]", "secret one")
        page.get_by_role("button", name="Use this key").click()
        page.wait_for_selector("[data-ready]")
        visit.complete()
        assert visit.finished() == TEXT
        page.get_by_role("button", name="Copy as code").click()
        assert "secret one" not in page.content() and "LORIKEET_API_KEY" in page.inner_text("dialog[open]")
        assert "secret" not in json.dumps(page.evaluate("[location.href, {...localStorage}]"))
        page.keyboard.press("Escape")
        page.click("#tab-live")
        page.wait_for_selector(".live-login")
        assert "needs the admin key" in page.inner_text(".live-login")
        visit.context.close()


def test_it_works_behind_a_path_prefix(browser: Any, tmp_path: Path) -> None:
    with Server(tmp_path, root_path="/team/llm") as server:
        visit = Visit(browser, server.url)
        requested: list[str] = []  # the server itself answers without the prefix too
        visit.page.on("request", lambda request: requested.append(urlsplit(request.url).path))
        for path in ("/team/llm/", "/team/llm/ui", "/team/llm/ui/"):
            visit.open(path)
        visit.complete()
        assert visit.finished() == TEXT
        assert not [path for path in requested if not path.startswith("/team/llm/")]
        visit.close()
