"""Greedy texts, adapters, speculation and logits on a CUDA device; without one, the last two with tiny shapes."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")  # the modules below import it

from benchmarks.cuda.setup import SMOKE, Setup
from tests import tiny
from tests.cuda import logits, lossless
from tests.shard.engine import adapter_exactness, architecture_runs

on_the_device = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SETUPS = [
    pytest.param(SMOKE, marks=pytest.mark.device, id="cpu"),
    pytest.param(Setup(), marks=on_the_device, id="cuda"),
]
LARGEST_DIFFERENCE = 2.0**-5
"""Largest difference of a logit by any kernel, as a share of the largest logit."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_texts_equal_transformers(name: str, tmp_path: Path) -> None:
    for run in architecture_runs.run(name, tmp_path, Setup().device, lossless.TIE):
        assert run["differences"] == [], run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", adapter_exactness.ARCHITECTURES)
def test_texts_under_adapters_equal_peft(name: str, tmp_path: Path) -> None:
    for tried in adapter_exactness.check(name, tmp_path, device=Setup().device, tie=lossless.TIE):
        assert tried.differences == [], tried


@pytest.mark.parametrize("setup", SETUPS)
def test_speculation_changes_no_text(setup: Setup) -> None:
    for case in lossless.measure(setup):
        assert case.error == ""
        assert case.raw["changed"] == 0, case.raw
        assert lossless.share_of_sampled(case.raw) <= 0.01


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("kernels", logits.KERNELS)
def test_kernels_compute_the_logits_of_the_reference(setup: Setup, kernels: str) -> None:
    for case in logits.measure(setup, kernels):
        assert case.error == ""
        assert kernels == "fp8" or logits.worst(case.raw) <= LARGEST_DIFFERENCE, case.raw
