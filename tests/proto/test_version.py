"""The version, in a checkout and in an installation."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from lorikeet.proto import version

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def output_of(*command: str, cwd: Path, path: Path) -> str:
    """The output of a Python that finds our packages only on `path`."""
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env={"PYTHONPATH": str(path)}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def test_a_checkout_says_what_its_pyproject_says(tmp_path: Path) -> None:
    assert version.version() == DECLARED
    assert output_of("-m", "lorikeet.launcher", "--version", cwd=tmp_path, path=ROOT / "src") == f"lorikeet {DECLARED}"


def test_an_installation_says_what_was_installed(tmp_path: Path) -> None:
    package = tmp_path / "lorikeet" / "proto"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "lorikeet" / "__init__.py", package.parent)
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "proto" / name, package)
    (tmp_path / "lorikeet_serve-9.8.7.dist-info").mkdir()
    (tmp_path / "lorikeet_serve-9.8.7.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: lorikeet-serve\nVersion: 9.8.7\n"
    )
    program = "from lorikeet.proto.version import version; print(version())"
    assert output_of("-c", program, cwd=tmp_path, path=tmp_path) == "9.8.7"
