"""cpu.c: equal to the plain modules, and equal bits whatever other rows there are; with and without AMX, and compiled
for processors with fewer instructions.
"""

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lorikeet.shard.model.fusion.kernels import CpuKernels
from lorikeet.shard.model.fusion.parts import FusedMlp, FusedNorm
from lorikeet.shard.model.fusion.select import Fusion
from lorikeet.shard.model.kernels import cpu as kernels
from lorikeet.shard.model.kernels.packing import (
    BlockedMatrix,
    Float32Matrix,
    SharedMatrix,
    StreamedMatrix,
    onednn_multiplies,
    pack,
)
from tests.shard.levels import LEVELS, OWN, compiled_for
from tests.shard.near import worst_share

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C compiler")


def fuse(module: nn.Module, shared: set[int]) -> nn.Module | None:
    return Fusion(CpuKernels(), shared).fuse_module(module)


@pytest.fixture(autouse=True, params=[*LEVELS, "without tiles"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """Compiled for this processor, for processors with fewer instructions, and without AMX."""
    defines = ("WITHOUT_TILES",) if request.param == "without tiles" else ()
    with compiled_for(OWN if defines else request.param, kernels, kernels._load):
        loaded = kernels._load(*defines)
    monkeypatch.setattr(kernels, "_load", lambda: loaded)
    yield loaded


class PlainMlp(nn.Module):
    """A gated MLP as transformers writes it."""

    def __init__(self, width: int, hidden: int, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.act_fn = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("num_out", [16, 64, 65, 100, 320])
@pytest.mark.parametrize("num_in", [2, 64, 130])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_the_float32_product_rounded_once(num_out: int, num_in: int, with_bias: bool) -> None:
    x, weight = random(70, num_in), random(num_out, num_in, seed=1)
    bias = random(num_out, seed=2) if with_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = StreamedMatrix(weight, bias)(x[None])[0].double()
    assert got.shape == expected.shape
    assert ((got - expected).abs() <= 2**-8 * expected.abs() + 1e-3).all()


@pytest.mark.parametrize("num_out", [1, 4, 65])
@pytest.mark.parametrize("num_in", [1, 16, 131])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_by_a_plain_weight_is_rounded_once(num_out: int, num_in: int, with_bias: bool) -> None:
    x, weight = random(9, num_in), random(num_out, num_in, seed=1)
    bias = random(num_out, seed=2) if with_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = kernels.plain_linear(x, weight, bias)
    assert ((got.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-3).all()
    for count in (1, 2, 3):
        assert torch.equal(kernels.plain_linear(x[2 : 2 + count], weight, bias), got[2 : 2 + count])


def test_bits_do_not_depend_on_other_rows() -> None:
    matrix, x = StreamedMatrix(random(200, 202), None), random(100, 202, seed=1)
    together = matrix(x)
    for first in (0, 7, 50):
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 26, 50):
            assert torch.equal(matrix(x[first : first + count]), together[first : first + count])


def test_rows_may_lie_apart() -> None:
    matrix, wide = StreamedMatrix(random(70, 32), None), random(9, 64, seed=1)
    assert torch.equal(matrix(wide[:, :32]), matrix(wide[:, :32].contiguous()))
    assert torch.equal(matrix(wide.T[:32].T), matrix(wide[:, :32].contiguous()))


def test_the_layout_follows_type_and_shape() -> None:
    assert isinstance(pack(random(8, 6), None), StreamedMatrix)
    assert isinstance(pack(random(8, 5), None), BlockedMatrix if onednn_multiplies(torch.bfloat16) else SharedMatrix)
    assert isinstance(pack(random(8, 6).float(), None), Float32Matrix)


@torch.inference_mode()
def test_a_norm_is_replaced_by_its_equal() -> None:
    norm = LlamaRMSNorm(96, eps=1e-5).bfloat16()
    norm.weight.copy_(random(96, seed=3))
    fused, x = fuse(norm, set()), random(3, 40, 96, seed=1)
    assert isinstance(fused, FusedNorm)
    difference = (fused(x).float() - norm(x).float()).abs()
    assert (difference <= 2**-7 * norm(x).float().abs() + 1e-6).all()
    assert torch.equal(fused(x[:, 5:7]), fused(x)[:, 5:7])


@torch.inference_mode()
def test_a_gated_mlp_is_replaced_by_its_equal() -> None:
    mlp = PlainMlp(64, 200, nn.SiLU()).bfloat16()
    fused, x = fuse(mlp, set()), random(250, 64, seed=1)
    assert isinstance(fused, FusedMlp)
    assert worst_share(fused(x), mlp(x)) <= 2**-6
    for count in (1, 2, 6, 7, 97):
        assert torch.equal(fused(x[100 : 100 + count]), fused(x)[100 : 100 + count])


@torch.inference_mode()
def test_values_beyond_all_numbers_stay_in_their_row() -> None:
    mlp, norm = PlainMlp(64, 200, nn.SiLU()).bfloat16(), LlamaRMSNorm(64).bfloat16()
    x = random(5, 64, seed=1)
    changed = x.clone()
    changed[1, 3], changed[3, 5] = float("nan"), float("inf")
    for module in (fuse(mlp, set()), fuse(norm, set()), StreamedMatrix(random(70, 64), None)):
        assert callable(module)
        plain, actual = module(x), module(changed)
        assert torch.equal(actual[[0, 2, 4]], plain[[0, 2, 4]])
        assert actual[1].isnan().all()
        assert not actual[3].isfinite().all()


@torch.inference_mode()
def test_gates_of_any_size_are_those_of_torch() -> None:
    gate = torch.cat([torch.linspace(-200, 200, 4097), torch.tensor([3e38, -1e4, 0.0, -0.0, 1e-38])]).bfloat16()[None]
    gate = torch.cat([gate, gate.new_ones(1, -gate.shape[1] % 16)], 1)
    up = torch.ones_like(gate)
    expected, actual = nn.functional.silu(gate.double()), kernels.gate_times(gate, up).double()
    assert ((actual - expected).abs() <= 2**-7 * expected.abs() + 1e-34).all()


@torch.inference_mode()
def test_what_computes_something_else_is_left_alone() -> None:
    class Shifted(LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x

    assert fuse(PlainMlp(64, 128, nn.GELU()).bfloat16(), set()) is None
    assert fuse(Shifted(64).bfloat16(), set()) is None
    mlp = PlainMlp(64, 128, nn.SiLU()).bfloat16()
    assert fuse(mlp, {id(mlp.up_proj.weight)}) is None
    assert fuse(nn.LayerNorm(64).bfloat16(), set()) is None
