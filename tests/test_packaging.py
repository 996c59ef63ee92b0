"""What is needed at run time is in the package, and `make` says in one line what a bare machine lacks."""

import fnmatch
import itertools
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("router", "shard", "adapters", "launcher", "proto", "demo")
TRAINING = ("demo/training/", "demo/evaluation/", "demo/data/")
NOT_NEEDED = ("demo/README.md",)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of committed files")
def test_files_that_are_not_code_are_in_the_package() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        package, _, inside = name.partition("/")
        if name.endswith(".py") or name in NOT_NEEDED or name.startswith(TRAINING):
            continue
        patterns = [pattern.removeprefix("**/") for pattern in data.get(f"lorikeet.{package}", ())]
        assert any(fnmatch.fnmatchcase(inside, f"*{pattern}") for pattern in patterns), name


def test_every_package_is_linked_into_lorikeet() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "src" / "lorikeet").iterdir() if path.is_symlink()}
    assert links == {name: (ROOT / name).resolve() for name in PACKAGES}


def test_no_module_is_loaded_twice() -> None:
    """Every installed module is imported in one process; two modules with one file would be two copies of its state."""
    program = (
        "import importlib, pathlib, pkgutil, sys, lorikeet\n"
        "skipped = ('ray_', '__main__', 'tether', 'rank_main', 'triton', 'demo.')\n"
        "for found in pkgutil.walk_packages(lorikeet.__path__, 'lorikeet.'):\n"
        "    if not any(part in found.name for part in skipped): importlib.import_module(found.name)\n"
        "loaded = [getattr(module, '__file__', None) for module in list(sys.modules.values())]\n"
        "files = [pathlib.Path(file).resolve() for file in loaded if file and 'site-packages' not in file]\n"
        "ours = [str(file) for file in files if file.is_relative_to(sys.argv[1])]\n"
        "print(len(ours), *sorted({file for file in ours if ours.count(file) > 1}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    count, *twice = done.stdout.split()
    assert int(count) > 150 and not twice


def test_the_image_takes_every_package() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {*PACKAGES, "src", "pyproject.toml", "README.md", "LICENSE"} <= kept


def test_versions_stand_in_one_place() -> None:
    pins = [
        *PROJECT["project"]["dependencies"],
        *itertools.chain(*PROJECT["project"]["optional-dependencies"].values()),
    ]
    pins = [pin for pin in pins if not pin.startswith("lorikeet-serve[")]  # our own extras
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
