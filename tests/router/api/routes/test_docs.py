"""The page at `/docs` needs no other host, and no answer sends a client to one."""

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

FOLDER = Path(__file__).parents[4] / "router" / "api" / "swagger"


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href") and value is not None]


async def test_the_page_loads_files_of_this_server_only(server: Serving) -> None:
    page = await server.client.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    links = Links()
    links.feed(page.text)
    files = [link for link in links.found if not link.startswith("data:")]
    assert len(files) == 3 and not any("//" in link for link in files)
    for link in files:
        answer = await server.client.get(urljoin("/docs", link))
        assert answer.status_code == 200 and len(answer.content) > 50
    assert (await server.client.get("/openapi.json")).status_code == 200


async def test_files_outside_the_folder_are_not_served(server: Serving) -> None:
    for path in ("/docs/assets/../docs.py", "/docs/assets/%2e%2e/docs.py", "/docs/assets/", "/docs/assets/none.js"):
        assert (await server.client.get(path)).status_code == 404


def test_vendored_files_are_those_that_are_recorded() -> None:
    recorded = dict(
        re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    )
    ours = {"index.html", "start.js", "README.md"}
    files = {path.name: path for path in FOLDER.iterdir() if path.name not in ours}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == recorded


@pytest.mark.parametrize("path", ["/admin/adapters/", "/v1/models/", "/docs/", "/health/"])
async def test_no_answer_redirects_to_another_host(path: str, tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, allowed_hosts=("*",)) as server:
        answer = await server.client.get(path, headers={"host": "evil.example"})
    assert "location" not in answer.headers
    assert answer.status_code in (200, 403, 404)
