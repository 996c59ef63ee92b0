"""The kernels for devices, in processes of their own: triton decides when it is imported whether it interprets."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
CASES = Path(__file__).with_name("lora_triton_cases.py")
SAMPLE = "(specification and 33 and bfloat16) or (any_company and 5) or largest_rank or tasks_behind or from_a_file"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


SAME_BITS_ANYWHERE = {"OPENBLAS_CORETYPE": "Prescott"}
"""numpy multiplies for the interpreter, and with some processors' code a row's bits depend on where it stands."""


def run(*command: str, interpreted: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": interpreted} | SAME_BITS_ANYWHERE
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]


def test_a_sample_in_the_interpreter() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", str(CASES), "-k", SAMPLE, interpreted="1")


@pytest.mark.device
def test_in_the_interpreter() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", str(CASES), interpreted="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", str(CASES), interpreted="0")


def test_compiles_to_what_keeps_bits_and_moves_sixteen_bytes_at_once() -> None:
    run("tests.shard.model.compile_triton", interpreted="0")
