"""The kernels for heads, in processes of their own: triton decides when it is imported whether it interprets."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.shard.model.test_lora_triton import run

CASES = Path(__file__).with_name("heads_triton_cases.py")
SAMPLE = "(specification and 24 and (distinct or none)) or (equal_bits and bfloat16) or equal_bounds"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_a_sample_in_the_interpreter() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", str(CASES), "-k", SAMPLE, interpreted="1")


@pytest.mark.device
def test_in_the_interpreter() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", str(CASES), interpreted="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", str(CASES), interpreted="0")


def test_compiles_to_what_keeps_bits_and_copies_ahead() -> None:
    run("tests.shard.model.compile_heads_triton", interpreted="0")
