"""Every block of the documentation is executed, or says why not; those of `make test` are checked without a server."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lorikeet.launcher.config.settings import parser
from tests.docs.snippets import LANGUAGES, Block, Sandbox, blocks, needs_demo, pages, run_page
from tests.e2e.launched import ROOT, Launched

PAGES = [page for page in pages() if blocks(page)]
RUN = [page for page in PAGES if any(block.is_run for block in blocks(page))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page: Path) -> None:
    text = page.read_text()
    assert text.count("```") % 2 == 0
    assert len(blocks(page)) == text.count("```") // 2, "a block is indented differently from its end"
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{name(page)}: name the language of\n{block.text}"
        assert not block.mark.startswith("not run: ") or len(block.reason) > 5
    assert not re.search(r"(?:^|\n\n)    \S", text), "an indented block is not executed: use a fence"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_the_syntax_of_its_language(page: Path) -> None:
    for block in blocks(page):
        if block.language == "sh":
            subprocess.run(["bash", "-n", "-c", block.text], check=True)
        elif block.language == "python":
            ast.parse(block.text)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            assert list(yaml.safe_load_all(block.text))


def launcher_lines(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        for match in re.finditer(r"(?:^|/|\$\()(?:lorikeet-launcher|lorikeet serve) ([^)]*)", line.partition(" #")[0]):
            words = shlex.split(match[1])
            yield words[1:] if words and not words[0].startswith("-") else words


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_flag_of_a_launcher_command_exists(page: Path) -> None:
    """Checks blocks that are not run too."""
    for block in blocks(page):
        for words in launcher_lines(block) if block.language == "sh" else ():
            parser().parse_args(words)


def test_blocks_that_are_not_run_are_few() -> None:
    every = [block for page in PAGES for block in blocks(page) if block.language in ("sh", "python")]
    assert sum(block.is_run for block in every) >= len(every) / 2


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    flags = ("--cpu-memory", "256MiB", "--threads", "1", "--speculative-tokens", "3")
    with Launched(*flags) as launched:
        yield launched.wait_until_ready().port


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in RUN if not needs_demo(page)], ids=name)
def test_every_block_runs(page: Path, port: int, tmp_path: Path) -> None:
    with Sandbox(tmp_path, port) as sandbox:
        run_page(page, sandbox)


def test_every_tutorial_is_executed_against_the_demo_s_model() -> None:
    """By tests/real."""
    tutorials = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    assert len(tutorials) >= 4
    for page in tutorials:
        assert needs_demo(page), f"{name(page)}: begin with the comment that names the server"
        code = [block for block in blocks(page) if block.language in ("sh", "python")]
        first = next(number for number, block in enumerate(blocks(page)) if block.is_run)
        assert all(block.is_run for block in code), f"{name(page)} has code that is not executed"
        assert any(block.is_output for block in blocks(page)[first:]), f"{name(page)} does not show what is printed"
