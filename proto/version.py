"""Lorikeet's version, from pyproject.toml in a checkout and from the package's metadata in an installation, and which
versions of router and shard are compatible.
"""

import importlib.metadata
import re
import tomllib
from pathlib import Path

TAKES_COLUMNS = ("takes-columns", "2")
"""Metadata of a stream whose router reads `StepOutput.columns`. Routers of version 0.1 do not, and those that send "1"
take all drafts in columns for prompt lookup's: a shard sends both of them an output of each request.
"""
_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def version() -> str:
    """The version of this code."""
    if _PROJECT.is_file():
        return str(tomllib.loads(_PROJECT.read_text())["project"]["version"])
    return importlib.metadata.version("lorikeet-serve")


def versions_compatible(one: str, other: str) -> bool:
    """Whether a router and a shard of these versions work together: the same major version, and minor versions that
    differ by at most one, so that a rolling upgrade works.
    """
    numbers = [re.match(r"(\d+)\.(\d+)", text) for text in (one, other)]
    majors, minors = ([int(match[group]) for match in numbers if match is not None] for group in (1, 2))
    return len(majors) == 2 and majors[0] == majors[1] and abs(minors[0] - minors[1]) <= 1
