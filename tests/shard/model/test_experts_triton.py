"""The kernels for experts on devices, in processes of their own, as test_lora_triton.py runs those for adapters."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.shard.model.test_lora_triton import run

CASES = Path(__file__).with_name("experts_triton_cases.py")
SAMPLE = "(cut_them and zipf) or (products and 144) or (specification and mixtral and (zipf or none)) or captured_block"
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


def test_compiles_for_hopper() -> None:
    run("tests.shard.model.compile_experts", interpreted="0")
