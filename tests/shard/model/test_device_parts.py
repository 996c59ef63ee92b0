"""The twins for devices, in processes of their own: triton decides when it is imported whether it interprets."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.shard.model.test_lora_triton import run

CASES = [str(Path(__file__).with_name(name)) for name in ("device_cases.py", "device_model_cases.py")]
SAMPLE = (
    "(plain_ones and bfloat16) or left_alone or (site_gets and (llama or qwen3)) or (logits and bfloat16 and qwen3) "
    "or (mix and llama and (zipf or none)) or one_launch or twice"
)
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_a_sample_in_the_interpreter() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", *CASES, "-k", SAMPLE, interpreted="1")


@pytest.mark.device
def test_in_the_interpreter() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", *CASES, interpreted="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device() -> None:
    run("pytest", "-q", "-p", "no:cacheprovider", *CASES, interpreted="0")


def test_compiles_to_what_moves_sixteen_bytes_at_once() -> None:
    run("tests.shard.model.compile_device", interpreted="0")
