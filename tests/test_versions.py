"""The versions that pyproject.toml allows are those that `make test-oldest` and `make test-newest` install, and what
`make` installs otherwise is one of them.
"""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers")


def bounds() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each package: the first version that is allowed, and the first later one that is not."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = {}
    for requirement in requirements:
        match = re.fullmatch(r"([a-z]+)>=([0-9.]+),<([0-9.]+)", requirement)
        if match is not None:
            found[match[1]] = numbers(match[2]), numbers(match[3])
    return found


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def pins(path: str) -> dict[str, tuple[int, ...]]:
    """Major and minor version of each package."""
    lines = (ROOT / path).read_text().splitlines()
    pairs = (line.removesuffix(".*").split("==") for line in lines if line and not line.startswith("#"))
    return {package: numbers(version)[:2] for package, version in pairs}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_bounds_are_what_is_tested(package: str) -> None:
    least, beyond = bounds()[package]
    major, minor = pins("tests/versions/newest.txt")[package]
    assert pins("tests/versions/oldest.txt")[package] == least
    assert beyond == (major, minor + 1)
    assert least <= pins("constraints.txt")[package] < beyond


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("goal", "count"), [("setup", 3), ("site", 3), ("serve", 2), ("test", 3), ("test-wheel", 3)])
def test_make_installs_what_the_constraints_name(goal: str, count: int, tmp_path: Path) -> None:
    """Without them pip takes the newest torch, which is gigabytes for CUDA where there is no CPU build of it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    command = ["make", "--dry-run", goal, f"VENV={tmp_path}"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installs = [line for line in lines if " install " in line]
    assert len(installs) == count
    assert all("--constraint constraints.txt" in line for line in installs)
