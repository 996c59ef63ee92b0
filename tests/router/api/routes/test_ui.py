"""The page: who gets it at `/`, that it needs no key and no other host, and that vendored files are those recorded."""

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from lorikeet.adapters import refs
from lorikeet.adapters.keys import sha256
from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.adapters.selection import single
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

FOLDER = Path(__file__).parents[4] / "router" / "ui"
KEYS = (("sharing", "false"), ("alone", "true"))
"""Names, and whether they are isolated."""
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.inline: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.links += [value for name, value in attrs if name in ("src", "href") and value]
        self.inline += [f"{tag} {name}" for name, _ in attrs if name.startswith("on") or name == "style"]

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


@pytest.mark.parametrize("accept", ["*/*", "application/json", "", "text/plain, text/html"])
async def test_all_but_browsers_get_lorax_health(server: Serving, accept: str) -> None:
    answer = await server.client.get("/", headers={"accept": accept})
    assert (answer.status_code, answer.content) == (200, b"")


async def test_browsers_get_the_page_and_everyone_does_at_ui(server: Serving) -> None:
    at_root = await server.client.get("/", headers={"accept": BROWSER})
    assert at_root.headers["content-type"] == "text/html; charset=utf-8" and "accept" in at_root.headers["vary"].split(
        ", "
    )
    assert (await server.client.get("/ui")).text == at_root.text == (FOLDER / "index.html").read_text()


async def test_it_loads_only_files_of_this_server_and_has_no_inline_script(server: Serving) -> None:
    answer = await server.client.get("/ui")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';") and "unsafe" not in policy
    page = Page()
    page.feed(answer.text)
    assert not page.inline
    for link in page.links:
        if not link.startswith("#") and link != "docs":
            assert not link.startswith(("/", "http"))
            response = await server.client.get(urljoin("/ui", link))
            assert response.status_code == 200 and response.headers["content-security-policy"] == policy
    for script in FOLDER.rglob("*.js"):
        names = re.findall(r'^(?:import|export) .*from "([^"]+)"', script.read_text(), re.MULTILINE)
        for name in names:
            path = f"/ui/assets/{(script.parent / name).resolve().relative_to(FOLDER)}"
            assert (await server.client.get(path)).status_code == 200, (script.name, name)


@pytest.mark.parametrize("path", ["/ui/assets/app.js", "/ui/assets/sources.css", "/docs/assets/swagger-ui.css"])
async def test_files_are_compressed_for_clients_that_can_read_it(server: Serving, path: str) -> None:
    plain = await server.client.get(path, headers={"accept-encoding": "identity"})
    compressed = await server.client.get(path, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers and compressed.headers["content-encoding"] == "gzip"
    assert compressed.text == plain.text and compressed.num_bytes_downloaded < len(plain.content)
    assert "accept-encoding" in compressed.headers["vary"].lower()
    if "etag" in plain.headers:
        headers = {"accept-encoding": "gzip", "if-none-match": compressed.headers["etag"]}
        assert (await server.client.get(path, headers=headers)).status_code == 304


async def test_spellings_with_a_slash_redirect_within_the_path(server: Serving) -> None:
    answer = await server.client.get("/ui/")
    assert (answer.status_code, answer.headers["location"]) == (307, "../ui")


async def test_behind_a_path_prefix(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, root_path="/team/llm") as server:
        for path in ("/team/llm/ui", "/team/llm/"):
            answer = await server.client.get(path, headers={"accept": BROWSER})
            assert answer.status_code == 200
            files = await server.client.get(urljoin(path, "ui/assets/app.js"))
            assert files.status_code == 200
        bare = await server.client.get("/team/llm", headers={"accept": BROWSER})
        assert (bare.status_code, urljoin("/team/llm", bare.headers["location"])) == (307, "/team/llm/ui")


async def test_the_page_is_open_and_the_rest_is_closed_by_keys(tmp_path: Path, anyio_backend: str) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: one, sha256: {sha256('one')}}}\n")
    async with serving(tmp_path, keys_path=str(keys), admin_key_sha256=sha256("root")) as server:
        for path in ("/ui", "/ui/assets/app.js", "/"):
            assert (await server.client.get(path, headers={"accept": BROWSER})).status_code == 200
        assert (await server.client.get("/")).status_code == 401
        assert (await server.client.get("/v1/capabilities")).status_code == 401
        for key, may_watch in (("one", False), ("root", True)):
            answer = await server.client.get("/v1/capabilities", headers={"authorization": f"Bearer {key}"})
            assert answer.json()["may_watch"] is may_watch


async def test_capabilities_are_the_limits_of_the_server(tmp_path: Path, anyio_backend: str) -> None:
    fields: dict[str, Any] = {
        "speculative_tokens": 2,
        "speculative_tokens_max": 5,
        "served_model_names": ("parrot", "bird"),
    }
    async with serving(tmp_path, chat_template=False, **fields) as server:
        shown = (await server.client.get("/v1/capabilities")).json()
    assert (shown["chat"], shown["adapters"], shown["may_watch"], shown["key"]) == (False, False, True, None)
    assert (shown["speculation"]["default_tokens"], shown["speculation"]["max_tokens"]) == (2, 5)
    assert (shown["max_total_tokens"], shown["model"]) == (2048, "parrot")


async def test_capabilities_name_the_draft_sources_of_the_caller(tmp_path: Path, anyio_backend: str) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "".join(f"- {{name: {name}, sha256: {sha256(name)}, isolate: {isolate}}}\n" for name, isolate in KEYS)
    )
    async with serving(tmp_path, keys_path=str(keys), speculative_history=True) as server:

        async def shown(name: str) -> Any:
            answer = await server.client.get("/v1/capabilities", headers={"authorization": f"Bearer {name}"})
            return answer.json()["speculation"]

        speculation = await shown("sharing")
        assert (speculation["history"], speculation["default_history"], speculation["heads"]) == (True, True, False)
        assert (await shown("alone"))["history"] is False, "its outputs are proposed to nobody"


async def test_files_outside_the_folder_are_not_served(server: Serving) -> None:
    for path in ("/ui/assets/../api/app.py", "/ui/assets/%2e%2e/config.py", "/ui/assets/none.js"):
        assert (await server.client.get(path)).status_code == 404


def test_vendored_files_are_those_that_are_recorded() -> None:
    text = (FOLDER / "README.md").read_text()
    recorded = dict(re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", text, re.MULTILINE))
    names = {
        str(path.relative_to(FOLDER / "vendor")): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (FOLDER / "vendor").rglob("*.*")
    }
    assert names == recorded


async def test_models_tell_where_adapters_are(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, adapters=True) as server:
        [link] = server.dispatcher.links

        async def tier() -> str | None:
            shown: str | None = (await server.client.get("/v1/models/near")).json()["tier"]
            return shown

        server.adapter("near")
        server.service.selection.directory.add(single("near", refs.parse("near", refs.SourceKind.LOCAL)))
        assert await tier() is None
        server.says("ab")
        await server.client.post("/generate", json={"inputs": "Hi", "parameters": {"adapter_id": "near"}})
        [(_, content)] = server.service.admission.loading.contents()
        for residency, expected in (
            (pb.AdapterState.ABSENT, "disk"),
            (pb.AdapterState.RESIDENT, "device"),
            (pb.AdapterState.HOST_MEMORY, "host"),
            (pb.AdapterState.ABSENT, "disk"),
        ):
            link.residency.update(pb.AdapterState(digest=content.digest, residency=residency))
            assert await tier() == expected
