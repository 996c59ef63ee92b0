"""Every block of the pages about the demo's model, executed against one server of it, prints what the page shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.snippets import Sandbox, blocks, needs_demo, pages, run_page
from tests.e2e.launched import ROOT, Launched
from tests.real import models

pytestmark = pytest.mark.real

HUB = models.CACHE / "hub"
"""Where the launcher keeps the model, which it downloads once."""
PAGES = [page for page in pages() if needs_demo(page) and any(block.is_run for block in blocks(page))]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    HUB.mkdir(parents=True, exist_ok=True)
    flags = ("--threads", "1", "--speculative-tokens", "3")
    environment = {"MODEL_ID": "lorikeet/smollm2", "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(HUB)}
    with Launched(*flags, **environment) as server:
        server.wait_for("is ready at", 600.0)
        yield server.port


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_prints_what_it_shows(page: Path, port: int, tmp_path: Path) -> None:
    with Sandbox(tmp_path, port, HF_HUB_CACHE=str(HUB)) as sandbox:
        run_page(page, sandbox)
