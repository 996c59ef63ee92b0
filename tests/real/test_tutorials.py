"""One server of the demo's model: what its pages show is what their blocks print, and its adapters do what is said."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from lorikeet.demo.smollm2 import drafts, evaluation
from lorikeet.demo.smollm2.prompts import chats
from lorikeet.launcher.models import demo
from tests.docs.snippets import Block, Sandbox, blocks, needs_demo, pages, run_page
from tests.e2e.launched import ROOT, Launched
from tests.real import models

pytestmark = pytest.mark.real

HUB = models.CACHE / "hub"
"""Where the launcher finds the demo's model, as if it had downloaded it."""
PICTURE = ROOT / "docs" / "images" / "demo.svg"
LEAST_OF_HEADS = 1.15
"""Tokens per step with the demo's Medusa heads: 1.3 were measured."""
PAGES = [page for page in pages() if needs_demo(page) and any(block.is_run for block in blocks(page))]


def scores() -> dict[str, Any]:
    """Those that are published, by adapter."""
    rows: dict[str, Any] = json.loads(evaluation.SCORES.read_text())
    return rows


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    folder = models.folder("smollm2", "bfloat16")
    models.made(HUB / demo.FOLDER / demo.NAME, lambda path: path.symlink_to(folder))
    flags = ("--threads", "1", "--speculative-tokens", "3")
    environment = {"MODEL_ID": "lorikeet/smollm2", "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(HUB)}
    with Launched(*flags, **environment) as server:
        server.wait_for("is ready at", 600.0)
        yield server.port


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_prints_what_it_shows(page: Path, port: int, tmp_path: Path) -> None:
    with Sandbox(tmp_path, port, HF_HUB_CACHE=str(HUB)) as sandbox:
        run_page(page, sandbox)


@pytest.mark.parametrize("task", sorted(scores()))
def test_an_adapter_of_the_demo_scores_above_the_model_without_it(port: int, task: str) -> None:
    """On some of the held-out examples whose scores demo/README.md has: eight, or all where one in five is right."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600.0) as client:
        row = evaluation.scores(client, task, 24 if task == "cite" else 8, show=0)
    assert row["score"] > row["base"]


def test_heads_of_the_demo_save_steps(port: int) -> None:
    """On some of the held-out chats of demo/README.md; `measure` compares the texts with those without drafts."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600.0) as client:
        totals = drafts.measure(client, evaluation.BASE, chats(4, held_out=True), drafts.clock_of(None))
    assert totals["off"].tokens == totals["off"].steps >= 100
    assert totals["heads"].tokens / totals["heads"].steps >= LEAST_OF_HEADS


def recorded(picture: Path) -> list[tuple[str, str]]:
    """Commands of the terminal in a picture, each with what it printed."""
    root = ElementTree.fromstring(picture.read_text())
    lines = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    parts = "\n".join(lines).split("$ ")[1:]
    commands = []
    for part in parts:
        rows = part.splitlines()
        size = next(size for size in range(1, len(rows) + 1) if "\n".join(rows[:size]).count('"') % 2 == 0)
        commands.append(("\n".join(rows[:size]), "\n".join(rows[size:])))
    return commands


def test_the_recording_of_the_readme_is_what_the_commands_print(port: int, tmp_path: Path) -> None:
    chats = [(text, output) for text, output in recorded(PICTURE) if text.startswith("lorikeet chat")]
    assert len(chats) >= 3
    with Sandbox(tmp_path, port, HF_HUB_CACHE=str(HUB)) as sandbox:
        for text, output in chats:
            assert output in sandbox.run(Block("sh", text))
