"""The tests of quantized bases with the packages that they need and serving does not: an environment that
sees this one's packages and has the extras of pyproject.toml in addition. Needs a package index.
"""

import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from tests.pytest_outcomes import ROOT, outcomes

EXTRAS = ("bitsandbytes", "hqq", "torchao", "gptq")
FOLDER = ROOT / "benchmarks" / ".venvs" / "quantized"


def install() -> Path:
    """Make the environment if it is missing. Returns the folder of its packages."""
    python = FOLDER / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(FOLDER)}))
    if not python.exists():
        venv.create(FOLDER, with_pip=True)
        (packages / "outer.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    expected = [requirement for extra in EXTRAS for requirement in extras[extra]]
    subprocess.run([python, "-m", "pip", "-q", "--disable-pip-version-check", "install", *expected], check=True)
    return packages


@pytest.mark.long
def test_no_test_of_quantized_bases_is_skipped_or_fails() -> None:
    paths = f"{ROOT / 'src'}:{ROOT}:{install()}"
    options = ("-k", "not with_packages", "-m", "not device and not gpu")
    actual = outcomes("tests/shard/model/quantization", *options, OMP_NUM_THREADS="1", PYTHONPATH=paths)
    assert {name: why for name, why in actual.items() if why} == {}
    assert len(actual) >= 128
