"""Every benchmark has a command line that measures nothing before its arguments are parsed."""

import subprocess
import sys

import pytest

from benchmarks.__main__ import runnable
from tests.test_layering import ROOT

MODULES = sorted({*runnable(), "benchmarks"})


def text(module: str) -> str:
    stem = ROOT.joinpath(*module.split("."))
    path = stem.with_suffix(".py")
    return (path if path.is_file() else stem / "__main__.py").read_text()


def test_folders_have_commands() -> None:
    assert {name.split(".")[1] for name in MODULES if "." in name} >= {"serving", "adapters", "speculation", "proof"}
    assert all(sentence for sentence in runnable().values())


@pytest.mark.parametrize("module", MODULES)
def test_a_command_parses_its_arguments_by_the_shared_helper(module: str) -> None:
    assert "arguments.parser(__doc__" in text(module)
    assert "sys.argv" not in text(module)


@pytest.mark.long
@pytest.mark.parametrize("module", MODULES)
def test_help_starts_no_measurement(module: str) -> None:
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.startswith("usage:")
