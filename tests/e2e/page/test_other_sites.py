"""Pages of other sites, and of a name that resolves to this machine, next to a server without API keys."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.page.browsing import TEXT, Server, Visit

ATTACK = """
async (target) => {
  const seen = [];
  const note = async (name, options) => {
    try {
      const answer = await fetch(target + name, options);
      const text = answer.type === "opaque" ? "" : await answer.text();
      if (text && answer.status !== 421) seen.push(`${name} ${answer.status} ${text.slice(0, 60)}`);
    } catch {}
  };
  const json = {"content-type": "application/json"};
  const body = JSON.stringify({inputs: "Hi", parameters: {max_new_tokens: 4}});
  for (const path of ["/v1/models", "/metrics", "/info", "/", "/ui", "/docs", "/health", "/v1/capabilities"]) {
    await note(path, {});
    await note(path, {mode: "no-cors"});
  }
  for (const path of ["/generate", "/", "/v1/completions", "/v1/chat/completions", "/generate_stream", "/tokenize"]) {
    await note(path, {method: "POST", headers: json, body});
    await note(path, {method: "POST", body, mode: "no-cors"});
    await note(path, {method: "POST", body: new Blob([body]), mode: "no-cors"});
    await note(path, {method: "POST", body: new URLSearchParams({inputs: "Hi"}), mode: "no-cors"});
    navigator.sendBeacon(target + path, new Blob([body], {type: "text/plain"}));
    try { navigator.sendBeacon(target + path, new Blob([body], {type: "application/json"})); } catch {}
  }
  for (const path of ["/health_generate", "/startup"]) {
    await note(path, {});
    await note(path, {mode: "no-cors"});
    await new Promise((done) => {
      const image = new Image();
      image.onload = image.onerror = done;
      image.src = target + path;
    });
  }
  return seen;
}
"""


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>hostile</title>")

    def log_message(self, *_: Any) -> None:
        """Nothing is written."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Another site, on this machine's second name, which the browser does not take for loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Page)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://hostile.test:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_page_of_another_site_reads_nothing_and_starts_nothing(browser: Any, server: Server, site: str) -> None:
    server.serving.shard.submits.clear()
    context = browser.new_context()
    page = context.new_page()
    page.goto(site)
    for target in (server.url, server.url.replace("127.0.0.1", "localhost")):
        assert page.evaluate(ATTACK, target) == []
    context.close()
    assert server.serving.shard.submits == []


def test_the_same_page_succeeds_where_the_operator_allows_all(browser: Any, tmp_path: Path, site: str) -> None:
    """So that the other tests can fail."""
    with Server(tmp_path, cors_allow_origin=("*",)) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(site)
        seen = page.evaluate(ATTACK, server.url)
        context.close()
        assert any(line.startswith("/v1/models 200") for line in seen), seen
        assert server.serving.shard.submits


def test_a_name_that_resolves_to_this_machine_reads_nothing_and_starts_nothing(browser: Any, server: Server) -> None:
    server.serving.shard.submits.clear()
    context = browser.new_context()
    page = context.new_page()
    port = urlsplit(server.url).port
    answer = page.goto(f"http://hostile.test:{port}/")
    assert answer.status == 421
    assert page.evaluate(ATTACK, "") == []
    context.close()
    assert server.serving.shard.submits == []


def test_the_servers_own_page_works(browser: Any, server: Server) -> None:
    server.serving.says(TEXT, ends=True)
    for name in ("127.0.0.1", "localhost"):
        with Visit(browser, server.url.replace("127.0.0.1", name)) as visit:
            visit.open()
            visit.complete()
            assert visit.finished() == TEXT
