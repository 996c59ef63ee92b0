"""The speed of products, measured with and without instructions for bfloat16."""

import pytest
import torch

from benchmarks.serving.machine import _matmul


def test_products_of_this_machine_are_measured() -> None:
    assert _matmul(64, 96, 32, repeats=2) > 0


def test_without_instructions_for_bfloat16_products_of_float32_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    dtypes: list[torch.dtype] = []
    multiply = torch.nn.functional.linear

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        dtypes.append(weight.dtype)
        return multiply(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    assert _matmul(64, 96, 32, repeats=2) > 0
    assert set(dtypes) == {torch.float32}
