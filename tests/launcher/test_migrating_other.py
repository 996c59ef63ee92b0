"""Tests, flags and programs that docs/migrating-other.md names exist."""

import re
from pathlib import Path

from lorikeet.launcher.cli import generate
from lorikeet.launcher.config.flags import FLAGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating-other.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ") and "| here |" not in line]


def test_every_row_names_a_test_that_exists() -> None:
    assert len(ROWS) > 50
    for theirs, ours, test in ROWS:
        assert theirs and ours
        match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", test)
        assert match is not None, test
        path = ROOT / match[1]
        assert path.is_file(), test
        assert re.search(rf"^(async )?def {match[2]}\(", path.read_text(), re.MULTILINE), test


def test_every_named_flag_exists() -> None:
    examples = "".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    known = {f"--{name}" for name in FLAGS} | set(generate.parser()._option_string_actions)
    named = {flag for _, ours, _ in ROWS for flag in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", ours)}
    assert len(named) > 15
    assert {flag for flag in named - known if f'"{flag}"' not in examples} <= {"-m"}


def test_every_named_program_exists() -> None:
    assert all((ROOT / path).is_file() for path in re.findall(r"\bexamples/[\w.]+", PAGE.replace("## LMFlow", "")))
    modules = set(re.findall(r"python -m ([\w.]+)", PAGE))
    stems = [ROOT.joinpath(*module.split(".")) for module in modules]
    assert stems and all(stem.with_suffix(".py").is_file() or (stem / "__main__.py").is_file() for stem in stems)
    tables = set(re.findall(r"benchmarks\.speculation (\w+)", PAGE))
    source = (ROOT / "benchmarks" / "speculation" / "__main__.py").read_text()
    listed = re.search(r"python -m benchmarks\.speculation (.*)", source)
    assert listed is not None and tables <= set(re.findall(r"\w+", listed[1]))
