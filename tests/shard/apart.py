"""Runs tests of Triton kernels in separate processes: triton decides at import whether it interprets."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SAME_BITS_ANYWHERE = {"OPENBLAS_CORETYPE": "Prescott"}
"""numpy multiplies for the interpreter, and on some processors a row's bits depend on its position."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
class KernelsApart:
    """The tests of some kernels, named by the subclass."""

    cases: tuple[Path, ...]
    """Files of tests that pytest does not collect by itself."""
    sample: str
    """The tests that `make test` runs, as for `pytest -k`: see test_triton_samples.py."""
    compiles: str
    """The module that compiles the kernels and checks their instructions."""

    @pytest.mark.device
    def test_in_the_interpreter(self) -> None:
        self._run(interpreted="1")

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_on_the_device(self) -> None:
        self._run(interpreted="0")

    @pytest.mark.device
    def test_compiles_for_hopper(self) -> None:
        run(self.compiles, interpreted="0")

    def _run(self, interpreted: str) -> None:
        run("pytest", "-q", "-p", "no:cacheprovider", *map(str, self.cases), interpreted=interpreted)


def run(*command: str, interpreted: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": interpreted} | SAME_BITS_ANYWHERE
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
