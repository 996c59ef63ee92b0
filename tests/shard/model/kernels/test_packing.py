"""oneDNN's products have equal bits for any number of rows from two on, and what is started later may use AMX."""

import os

import pytest
import torch

from lorikeet.shard.model.kernels import float32, packing

ROWS = (2, 3, 8, 17, 33, 64, 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4096, 512), (64, 2048), (8, 512)], ids=str)
def test_bits_do_not_depend_on_other_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    if not packing.onednn_multiplies(dtype):
        pytest.skip("this processor has no such products")
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, shape[1], generator=generator).to(dtype) for rows in (shape[0], 333))
    blocked, shared = packing.BlockedMatrix(weight, None), packing.SharedMatrix(weight, None)
    for matrix in (blocked, shared):
        together = matrix(x)
        for count in ROWS:
            assert torch.equal(matrix(x[:count].contiguous()), together[:count]), count


@pytest.mark.parametrize("shape", [(300, 70), (64, 2048)], ids=str)
def test_float32_does_not_need_onednn(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """That of some versions of torch does not give a row equal bits."""
    if not float32.available():
        pytest.skip("needs a compiler")
    monkeypatch.setattr(packing, "onednn_multiplies", lambda dtype: False)
    monkeypatch.setattr(packing, "PACKED_AT_ONCE", 100 * 70)
    generator = torch.Generator().manual_seed(0)
    weight, x, bias = (torch.randn(*size, generator=generator) for size in (shape, (200, shape[1]), shape[:1]))
    together = packing.multiply(x, weight, bias)
    torch.testing.assert_close(together, torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    for count in ROWS:
        assert torch.equal(packing.multiply(x[:count].contiguous(), weight, bias), together[:count]), count
    torch.testing.assert_close(packing.multiply(x, weight), together - bias, rtol=1e-4, atol=1e-4)


def test_the_environment_is_unchanged() -> None:
    assert "AVX512_CORE_BF16" not in os.environ.get("ONEDNN_MAX_CPU_ISA", "")
