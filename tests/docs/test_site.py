"""The site is built without warnings; every page is in its navigation; what is generated is up to date and complete."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from lorikeet.launcher.cli.completion import PARSERS
from lorikeet.launcher.config.flags import FLAGS
from lorikeet.proto import shard_pb2
from lorikeet.router.error_answers import ANSWERS
from tests.docs.pages import draft_sources
from tests.docs.pages import errors as error_document
from tests.docs.pages import wire as wire_document
from tests.e2e.launched import ROOT

DOCS = ROOT / "docs"
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
OF_OTHERS = """gpus shm-size build-arg build user set head address again list smoke commit suite upgrade fail silent
compile retry switch verify replicas"""
"""Flags of other programs, and of an example, that pages name."""


@pytest.mark.long
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs-material from PyPI")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    found = re.findall(r'(?:src|href)="(https?://[^"]+)"', (tmp_path / "index.html").read_text())
    loaded = [url for url in found if re.search(r"\.(css|js|woff2?|png|svg)$", url)]
    assert loaded == [], "the site loads files from other hosts"
    for page in tmp_path.rglob("*.html"):
        targets = re.findall(r'(?:src|href)="(?!/|\w+:)([^"#]+)', page.read_text())
        dead = {target for target in targets if not (page.parent / target).exists()}
        assert dead == set(), f"{page.name} links to pages that the site does not have"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of committed files")
def test_modules_and_addresses_of_the_repository_exist() -> None:
    command = ["git", "ls-files", "*.md", "*.py", "*.yaml", "*.yml", "*.toml", "deploy", "Makefile", "Dockerfile"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        if name.startswith("docs/log/") or "/vendor/" in name:
            continue
        text = (ROOT / name).read_text()
        for target in re.findall(r"lorikeet-serve/lorikeet/(?:blob|tree)/main/([\w./-]*\w)", text):
            assert (ROOT / target).exists(), f"{name} links to {target}"
        if name.endswith(".py") or name == "CHANGELOG.md":  # which has former names
            continue
        for module in re.findall(r"python3? -m ((?:lorikeet|benchmarks|tests)[\w.]*\w)", text):
            path = ROOT / module.removeprefix("lorikeet.").replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{name} names {module}"


def navigation(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for each in node:
            yield from navigation(each)
    elif isinstance(node, dict):
        yield from navigation(list(node.values()))


def test_the_navigation_lists_pages_once() -> None:
    """Those of single experiments and decisions are reached by links from the index, which another test follows."""
    listed = list(navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(listed) == len(set(listed))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(listed) <= pages
    assert {page for page in pages if not page.startswith(("decisions/", "log/"))} <= set(listed)


def test_every_page_is_reached_from_the_index() -> None:
    reached, waiting = set[str](), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or not (DOCS / page).is_file():
            continue
        reached.add(page)
        for target in re.findall(r"\]\(([^)#\s]+\.md)", (DOCS / page).read_text()):
            path = os.path.normpath(os.path.join(os.path.dirname(page), target))
            waiting.append(path)
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert {page for page in pages if not page.startswith("decisions/")} <= reached


def written(path: Path) -> str:
    """A page without code, whose brackets are not links."""
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("](", "] ("), _FENCED.sub("", path.read_text()))


def anchors(page: Path) -> set[str]:
    """Those of its headings, on GitHub and on the site."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in plain}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of committed files")
def test_every_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    command = ["git", "ls-files", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    num_links, dead = 0, []
    for name in names:
        page = ROOT / name
        for link in re.findall(r"\]\(([^)\s]+)\)", written(page)):
            target, _, anchor = link.partition("#")
            if "://" in link or link.startswith("mailto:"):
                continue
            num_links += 1
            path = Path(os.path.normpath(page.parent / target)) if target else page
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                dead.append(f"{name}: {link}")
    assert num_links > 300
    assert dead == []


def test_a_release_is_a_page_of_the_changelog() -> None:
    """Entries that a merge brought back stand twice, or make it long."""
    text = (ROOT / "CHANGELOG.md").read_text()
    entries = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(entries) == len(set(entries))
    for release in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert len(release) < 20_000, f"shorten {release.partition(chr(10))[0]}: to what users notice"


@pytest.mark.parametrize(
    ("name", "lines"),
    [("errors", error_document.lines), ("wire", wire_document.lines), ("draft-sources", draft_sources.lines)],
    ids=lambda each: str(each)[:6],
)
def test_generated_pages_are_up_to_date(name: str, lines: Callable[[], Iterator[str]]) -> None:
    assert (DOCS / "reference" / f"{name}.md").read_text() == "\n".join(lines()) + "\n", "run make docs"


def test_every_error_has_a_meaning() -> None:
    for kind in ANSWERS:  # KeyError: give the class a docstring
        assert len(error_document.meaning(kind)) > 10, kind
    assert set(error_document.MEANINGS) <= {kind.__name__ for kind in ANSWERS}


def test_every_message_and_field_of_the_wire_is_listed() -> None:
    text = "\n".join(wire_document.lines())
    for message in shard_pb2.DESCRIPTOR.message_types_by_name.values():
        start = text.index(f"## Message {message.name}\n")
        section = text[start : text.find("\n## ", start + 1)]
        for field in message.fields:
            assert f"| {field.number} | `{field.name}` |" in section
    for enum in shard_pb2.DESCRIPTOR.enum_types_by_name.values():
        assert all(f"| {value.number} | `{value.name}` |" in text for value in enum.values)


def test_every_flag_that_a_page_names_exists() -> None:
    """Pages about migrating name flags of others."""
    known = {f"--{name}" for name in FLAGS}
    for make_parser in PARSERS.values():
        pages = [make_parser().format_help(), *_below(make_parser())]
        known |= {word for page in pages for word in re.findall(r"--[a-z][a-z0-9-]*", page)}
    others = {f"--{name}" for name in OF_OTHERS.split()}
    for page in sorted(DOCS.glob("*.md")):
        if page.name.startswith(("migrating", "tests", "cuda", "installation")):
            continue
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])", page.read_text()))
        assert named <= known | others, f"{page.name} names {sorted(named - known - others)}"


def _below(parser: object) -> Iterator[str]:
    """Help of the commands of a command."""
    for action in parser._actions:  # type: ignore[attr-defined]
        for each in (getattr(action, "choices", None) or {}).values() if hasattr(action, "add_parser") else ():
            yield each.format_help()
