"""What is needed at run time is in the package, and `make` says in one line what a bare machine lacks."""

import fnmatch
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("router", "shard", "adapters", "launcher", "proto", "demo")
NOT_NEEDED = ("demo/README.md",)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of committed files")
def test_files_that_are_not_code_are_in_the_package() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        package, _, inside = name.partition("/")
        if name.endswith(".py") or name in NOT_NEEDED:
            continue
        assert any(fnmatch.fnmatchcase(inside, pattern) for pattern in data.get(package, ())), name


def test_the_image_takes_every_package() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {*PACKAGES, "pyproject.toml", "README.md", "LICENSE"} <= kept


def test_versions_stand_in_one_place() -> None:
    pins = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"]]
    pins = [pin for pin in pins if not pin.startswith("lorikeet[")]  # what another of our own lists names
    names = [pin.split("=")[0].rstrip("<>~!") for pin in pins]
    assert len(names) == len(set(names))
    assert all(any(sign in pin for sign in "<>=") for pin in pins)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("answers", "part"),
    [
        ("exit 1", "needs Python 3.11 or newer"),
        ('case "$*" in *version_info*) exit 0;; *) exit 1;; esac', "has no venv module"),
    ],
)
def test_make_says_what_is_missing(tmp_path: Path, answers: str, part: str) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{answers}\n")
    python.chmod(0o755)
    result = subprocess.run(
        ["make", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1
    assert part in said[0]
    assert "apt-get install" in said[0]
