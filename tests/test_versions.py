"""The versions that pyproject.toml allows are those that `make test-oldest` and `make test-newest` install."""

import re
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


def pins(name: str) -> dict[str, tuple[int, ...]]:
    """Major and minor version of each package."""
    lines = (ROOT / "tests/versions" / f"{name}.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {package: numbers(version)[:2] for package, version in pairs}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_bounds_are_what_is_tested(package: str) -> None:
    least, beyond = bounds()[package]
    major, minor = pins("newest")[package]
    assert pins("oldest")[package] == least
    assert beyond == (major, minor + 1)
