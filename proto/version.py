"""Lorikeet's version, as neighbours tell it to each other: that of pyproject.toml, read from the file in a checkout and
from what was installed elsewhere.
"""

import importlib.metadata
import tomllib
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def version() -> str:
    """The version of the code at hand."""
    if _PROJECT.is_file():
        return str(tomllib.loads(_PROJECT.read_text())["project"]["version"])
    return importlib.metadata.version("lorikeet")
