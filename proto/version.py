"""Lorikeet's version, as neighbours tell it to each other: that of pyproject.toml, read from the file in a checkout and
from what was installed elsewhere.
"""

import importlib.metadata
import re
import tomllib
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def version() -> str:
    """The version of the code at hand."""
    if _PROJECT.is_file():
        return str(tomllib.loads(_PROJECT.read_text())["project"]["version"])
    return importlib.metadata.version("lorikeet-serve")


def versions_compatible(one: str, other: str) -> bool:
    """Whether a router and a shard of these versions work together: neighbours do, so that a server can be replaced
    piece by piece. Neighbours have the same major number, and minor ones that differ by one at most.
    """
    numbers = [re.match(r"(\d+)\.(\d+)", text) for text in (one, other)]
    majors, minors = ([int(found[group]) for found in numbers if found is not None] for group in (1, 2))
    return len(majors) == 2 and majors[0] == majors[1] and abs(minors[0] - minors[1]) <= 1
