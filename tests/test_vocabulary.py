"""One vocabulary: words that do not mean in the field what they meant here, and what to write instead.

CHANGELOG and docs/log keep the words of their day; the text of tests/real/prose.txt is only measured.
"""

import contextlib
import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
READ = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".proto",
    ".md",
    ".yaml",
    ".yml",
    ".toml",
    ".txt",
    ".tpl",
    ".json",
    ".js",
    ".css",
    ".html",
    ".go",
    "Makefile",
    "Dockerfile",
)
EXEMPT = (
    "CHANGELOG.md",
    "docs/log/",
    "tests/real/prose.txt",
    "benchmarks/results/",
    "tests/test_vocabulary.py",
    "demo/base/",
    "demo/draft/",
    "demo/data/tasks/",
    "LICENSE",
    "router/api/swagger/swagger-ui",
    "router/ui/vendor/",
)

WORDS = {
    "told": "sent, announced, logged",
    "foretell": "announce",
    r"guess(es|ed|er|ers|ing)?": "draft, propose, speculative decoding",
    r"laws?": "distribution",
    r"twins?": "fused module",
    r"crowd(s|ed)?": "prefill cap of an adapter",
    r"pacers?": "draft length controller",
    "nursery": "fork server",
    r"misfits?": "reject reason",
    "restraint": "OOM backoff",
    "entrance": "middleware",
    "outlet": "background writer",
    r"trays?": "stream buffer",
    r"harm(s|ed)?": "fault injection",
    r"doubted|blamed": "suspected, convicted",
    "whom": "which requests",
    "beside": "next to, with, in addition to",
    r"verdicts?": "validation, result",
    r"strangers?": "other requests, new users",
    "aloud": "with a warning",
    r"in (any|every|equal|other) company": "in any batch",
    r"(refused|rejected) by name": "rejected with an error that names the field",
    r"guessing ahead": "speculative decoding",
    "embedded family": "built-in demo models",
    r"what one gets": "features",
    "reading on": "documentation",
}
"""Whole words, in any case, and the field's terms."""

PATTERNS = {re.compile(rf"(?<![\w-])(?:{word})(?![\w-])", re.IGNORECASE): term for word, term in WORDS.items()}
ANY = re.compile(rf"(?<![\w-])(?:{'|'.join(WORDS)})(?![\w-])", re.IGNORECASE)


def files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name.endswith(READ) and not name.startswith(EXEMPT)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def findings(text: str) -> list[str]:
    """`line: word (field's term)` for each word in the list; underscores separate words."""
    found: list[str] = []
    spaced_text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text.replace("_", " "))
    if ANY.search(spaced_text) is None:  # true of most files; one pattern takes less time than all of them
        return found
    for number, spaced in enumerate(spaced_text.splitlines(), 1):
        found += [
            f"{number}: {hit[0]} ({term})" for pattern, term in PATTERNS.items() for hit in pattern.finditer(spaced)
        ]
    return found


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of committed files")
def test_source_and_documents_use_the_terms_of_the_field() -> None:
    bad = {path: findings(path.read_text()) for path in files()}
    lines = [f"{path.relative_to(ROOT)}:{finding}" for path, found in bad.items() for finding in found]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_help_uses_the_terms_of_the_field(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, function = SCRIPTS[script].partition(":")
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with contextlib.suppress(SystemExit):
        getattr(importlib.import_module(module), function)()
    shown = capsys.readouterr().out
    assert "usage" in shown.lower() and not findings(shown)


@pytest.mark.parametrize(
    "text", ["it is told", "num_guesses", "class DraftLaws:", "Guessing ahead", "in any company", "Twin"]
)
def test_a_word_is_found_in_prose_and_in_names(text: str) -> None:
    assert findings(text)


@pytest.mark.parametrize("text", ["harmless", "flawed", "besides", "entrances"])
def test_other_words_are_not_found(text: str) -> None:
    assert not findings(text)
