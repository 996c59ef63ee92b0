"""The tests of quantised bases with the packages that they need, which serving and tests are without: an environment
that sees this one's packages and has the extras of pyproject.toml beside them.

    python -m benchmarks.quantized               installs what is missing
    python -m benchmarks.proof --part devices-quantized
"""

import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import Any

from benchmarks.case import Cases
from benchmarks.clients import num_failed, outcomes
from benchmarks.peers import VENVS
from benchmarks.servers import REPOSITORY

__all__ = ["NUM_TESTS", "SETTINGS", "install", "measure", "num_failed"]

NUM_TESTS = 76
EXTRAS = ("bitsandbytes", "hqq", "torchao", "gptq")
OPTIONS = ("-k", "quantized", "-n", "2", "--dist", "worksteal")
SETTINGS: dict[str, Any] = {"options": OPTIONS, "extras": EXTRAS}
FOLDER = VENVS / "quantized"


def install() -> Path:
    """Make the environment where it is missing. Returns the folder of its packages."""
    python = FOLDER / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(FOLDER)}))
    if not python.exists():
        venv.create(FOLDER, with_pip=True)
        (packages / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [requirement for extra in EXTRAS for requirement in extras[extra]]
    subprocess.run([python, "-m", "pip", "-q", "--disable-pip-version-check", "install", *wanted], check=True)
    return packages


def measure(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per test; one that was skipped has failed."""
    paths = f"{REPOSITORY}:{install()}"
    for case in outcomes("tests/shard/model", *OPTIONS, OMP_NUM_THREADS="1", PYTHONPATH=paths):
        if case.name not in finished:
            yield case


if __name__ == "__main__":
    print(install())
    sys.exit(0)
