"""Environments of packages that are never part of this project's own: made on demand, which needs a package index."""

import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks" / ".venvs"


def installed(name: str, packages: Sequence[str]) -> Path:
    """The interpreter of an environment with `packages`, made unless it exists."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    if not python.is_file():
        venv.create(folder, with_pip=True)
        if packages:  # pip rejects an empty list
            _install(folder, [python, "-m", "pip", "install", "--quiet", *packages])
    return python


def unpacked(name: str, packages: Sequence[str]) -> Path:
    """A folder with the files of `packages`, without what they depend on."""
    folder = FOLDER / name
    if not folder.is_dir():
        pip = [installed("pip", []), "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        _install(folder, [*pip, *packages])
    return folder


def _install(folder: Path, command: Sequence[str | Path]) -> None:
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete folder would be taken for a complete one
        raise
