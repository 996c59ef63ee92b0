"""The form of a norm is found whatever the network's weights are, and no other form replaces it."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from lorikeet.shard.model.fusion.kernels import CpuKernels, FusionKernels
from lorikeet.shard.model.fusion.parts import fuse_norm
from lorikeet.shard.model.fusion.patterns import FORMS, Norm, NormForm
from lorikeet.shard.model.kernels import cpu
from lorikeet.shard.model.lora.targets import LoraTarget
from lorikeet.shard.system import comparison

LLAMA, OLMO, GEMMA = FORMS
KINDS: dict[Any, NormForm] = {
    LlamaRMSNorm: LLAMA, Qwen3RMSNorm: LLAMA, Olmo2RMSNorm: OLMO, GptOssRMSNorm: OLMO, GemmaRMSNorm: GEMMA,
    Gemma2RMSNorm: GEMMA, Gemma3RMSNorm: GEMMA, Qwen3NextRMSNorm: GEMMA,
}  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
WIDTH = 640
WEIGHTS = {
    "alike": torch.ones(WIDTH),
    "zeros": torch.zeros(WIDTH),
    "large": torch.logspace(-1, 3.2, WIDTH),  # as in Gemma 3 270M
    "one large": torch.cat([torch.full((1,), 2000.0), torch.full((WIDTH - 1,), 0.02)]),
}


class TorchKernels(FusionKernels):
    """Norms of any form in PyTorch."""

    def rms_norm(self, x: torch.Tensor, norm: Norm, adapters: LoraTarget | None = None) -> torch.Tensor:
        wide = x.double()
        scaled = wide * (wide.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
        scaled = (scaled.to(x.dtype) if norm.form.rounds else scaled).double()
        return (scaled * (norm.weight.double() + norm.form.offset)).to(x.dtype)


class WithoutOffset(TorchKernels):
    """Computes every form without its offset."""

    def rms_norm(self, x: torch.Tensor, norm: Norm, adapters: LoraTarget | None = None) -> torch.Tensor:
        return super().rms_norm(x, Norm(norm.weight, norm.epsilon, norm.form._replace(offset=0.0)))


def norm_of(kind: Any, weights: str, dtype: torch.dtype) -> nn.Module:
    norm: nn.Module = kind(WIDTH, eps=1e-6).to(dtype).requires_grad_(False)
    norm.weight.copy_(WEIGHTS[weights])
    return norm


@DTYPES
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_form_is_found_whatever_the_weights_are(kind: Any, weights: str, dtype: torch.dtype) -> None:
    norm = norm_of(kind, weights, dtype)
    fused = fuse_norm(norm, TorchKernels())
    assert fused is not None and fused.weight is norm.weight
    assert fused.norm.form.offset == KINDS[kind].offset
    assert dtype == torch.float32 or fused.norm.form == KINDS[kind]  # in float32 nothing is rounded
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert comparison.has_same_roundings(comparison.relative(norm(x), fused(x)), dtype)


@DTYPES
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_of_another_form_is_left_alone(kind: Any, weights: str, dtype: torch.dtype) -> None:
    class OtherForms(TorchKernels):
        forms = tuple(form for form in FORMS if form != KINDS[kind])

    norm = norm_of(kind, weights, dtype)
    fused = fuse_norm(norm, OtherForms())
    if dtype == torch.float32 and KINDS[kind].offset == 0.0:  # either form is right: nothing is rounded
        assert fused is not None and fused.norm.form.offset == 0.0
    else:
        assert fused is None
    assert (fuse_norm(norm, WithoutOffset()) is None) == (KINDS[kind].offset != 0.0)


@pytest.mark.skipif(not cpu.available(), reason="needs a C compiler")
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_norms_are_of_the_forms_that_the_code_computes(kind: Any, weights: str) -> None:
    norm = norm_of(kind, weights, torch.bfloat16)
    fused = fuse_norm(norm, CpuKernels())
    assert (fused is not None) == (KINDS[kind] in CpuKernels.forms)


@DTYPES
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("width", [64, 4096])
def test_a_layer_norm_is_no_rms_norm(width: int, weights: str, dtype: torch.dtype) -> None:
    norm = CohereLayerNorm(width).to(dtype)
    norm.weight.data.copy_(WEIGHTS[weights].repeat(7)[:width])
    assert fuse_norm(norm, TorchKernels()) is None
