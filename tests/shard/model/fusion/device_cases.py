"""The fused modules for devices against transformers' plain modules: run by test_cuda_parts.py in a process of its own,
on CUDA or, with TRITON_INTERPRET=1, on CPU.
"""

import os
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Gemma3TextConfig
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention, Glm4MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssConfig
from transformers.models.granite.modeling_granite import GraniteAttention, GraniteConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig, LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2Config, Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3Config, Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Config
from transformers.models.stablelm.modeling_stablelm import StableLmAttention, StableLmConfig

from lorikeet.shard import attention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.attention_binding import NAME, AttentionBinding
from lorikeet.shard.model.fusion import attention as fused_attention
from lorikeet.shard.model.fusion import parts
from lorikeet.shard.model.fusion.attention import FusedAttention
from lorikeet.shard.model.fusion.kernels import CudaKernels
from lorikeet.shard.model.fusion.parts import FusedMlp, FusedNorm
from lorikeet.shard.model.fusion.patterns import FORMS
from lorikeet.shard.model.fusion.verify import AttentionRecorder, attend, close
from lorikeet.shard.model.kernels import triton as device_kernels

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPE: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "num_hidden_layers": 2,
    "intermediate_size": 40, "vocab_size": 32, "pad_token_id": 0, "attn_implementation": NAME,
}  # fmt: skip


def fuse_norm(module: torch.nn.Module) -> FusedNorm | None:
    return parts.fuse_norm(module, CudaKernels())


def fuse_mlp(module: torch.nn.Module, shared: set[int]) -> FusedMlp | None:
    return parts.fuse_mlp(module, CudaKernels(), shared)


def fuse_attention(block: Any, shared: set[int], rotary_width: int | None = None) -> FusedAttention | None:
    return fused_attention.fuse_attention(block, CudaKernels(), shared, rotary_width)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def settle(module: torch.nn.Module, dtype: torch.dtype) -> Any:
    """Random weights, norms' weights unlike each other."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        size = 0.3 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
        values = size * torch.randn(parameter.shape, generator=generator)
        parameter.data = values + ("norm" in name or name == "weight")
    return module.requires_grad_(False).to(DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, Gemma2RMSNorm])
@torch.inference_mode()
def test_norms_are_the_plain_ones(kind: Any, dtype: torch.dtype) -> None:
    norm = settle(kind(88, eps=1e-3), dtype)
    module = fuse_norm(norm)
    assert module is not None and module.weight is norm.weight
    if dtype != torch.float32:
        assert module.norm.form == FORMS[(LlamaRMSNorm, Olmo2RMSNorm, Gemma2RMSNorm).index(kind)]
    wide = drawn(3, 100, dtype=dtype)
    for x in (
        drawn(2, 3, 88, dtype=dtype),
        wide[:, 4:92],
        drawn(2, 88, 2, dtype=dtype).transpose(1, 2),
        1e-3 * wide[:, :88],
    ):
        expected = norm(x)
        assert close(expected, module(x)) and module(x).is_contiguous()
        if dtype != torch.float32 and DEVICE.type == "cpu":
            assert (expected == module(x)).float().mean() > 0.99
        sums, normed = module.of_sum(x, x.flip(0))
        assert torch.equal(sums, x + x.flip(0)) and torch.equal(normed, module(sums))
    assert module(wide[:0, :88]).shape == (0, 88)


def test_a_layer_norm_is_left_alone_however_wide() -> None:
    for width in (48, 4096):
        assert fuse_norm(settle(CohereLayerNorm(width), torch.bfloat16)) is None
    assert fuse_norm(settle(torch.nn.LayerNorm(48), torch.bfloat16)) is None


@DTYPES
@pytest.mark.parametrize(("is_tanh", "width"), [(False, 24), (True, 24), (False, 1100)])
@torch.inference_mode()
def test_gates_are_the_plain_ones(is_tanh: bool, width: int, dtype: torch.dtype) -> None:
    x = 3 * drawn(3, 2 * width, dtype=dtype)
    x[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -10.0])
    first, up = x.split(width, dim=1)
    expected = (functional.gelu(first, approximate="tanh") if is_tanh else functional.silu(first)) * up
    assert close(expected, device_kernels.gate(x, is_tanh))
    assert device_kernels.gate(x[:0], is_tanh).shape == (0, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "config_kind", "more"),
    [
        (LlamaMLP, LlamaConfig, {}),
        (LlamaMLP, LlamaConfig, {"mlp_bias": True}),
        (LlamaMLP, LlamaConfig, {"hidden_act": "gelu_pytorch_tanh"}),
        (Phi3MLP, Phi3Config, {}),
    ],
)
@torch.inference_mode()
def test_mlps_are_the_plain_ones(kind: Any, config_kind: Any, more: dict[str, Any], dtype: torch.dtype) -> None:
    mlp = settle(kind(config_kind(**SHAPE, **more)), dtype)
    module = fuse_mlp(mlp, set())
    assert isinstance(module, FusedMlp) and module.down is mlp.down_proj
    x = drawn(1, 5, 48, dtype=dtype)
    assert close(mlp(x), module(x))


def test_mlps_that_do_something_else_are_left_alone() -> None:
    assert fuse_mlp(settle(LlamaMLP(LlamaConfig(**SHAPE, hidden_act="gelu")), torch.float32), set()) is None
    mlp = settle(LlamaMLP(LlamaConfig(**SHAPE)), torch.float32)
    assert fuse_mlp(mlp, {id(mlp.up_proj.weight)}) is None
    assert fuse_mlp(torch.nn.Linear(4, 4), set()) is None


def block_of(kind: Any, config_kind: Any, dtype: torch.dtype, **more: Any) -> Any:
    block = settle(kind(config_kind(**SHAPE, **more), 1), dtype)
    backend = attention.create("reference", DEVICE, dtype, 16)
    block.lorikeet_binding = AttentionBinding(backend, StepInputs(16, DEVICE))
    return block


FUSED = {
    "llama": (LlamaAttention, LlamaConfig, {}, None),
    "llama biases": (LlamaAttention, LlamaConfig, {"attention_bias": True}, None),
    "granite": (GraniteAttention, GraniteConfig, {"attention_multiplier": 0.3}, None),
    "qwen2": (
        Qwen2Attention,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
        None,
    ),
    "qwen3": (Qwen3Attention, Qwen3Config, {}, None),
    "gemma3": (Gemma3Attention, Gemma3TextConfig, {}, None),
    "phi3": (Phi3Attention, Phi3Config, {}, None),
    "phi3 partial": (Phi3Attention, Phi3Config, {}, 12),
    "glm4_moe": (Glm4MoeAttention, Glm4MoeConfig, {"use_qk_norm": True}, 16),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in FUSED), ("qwen3", torch.float32), ("phi3 partial", torch.float16)],
    ids=str,
)
@torch.inference_mode()
def test_the_attention_gets_the_same_arguments(name: str, dtype: torch.dtype) -> None:
    kind, config_kind, more, width = FUSED[name]
    block = block_of(kind, config_kind, dtype, **more)
    module = fuse_attention(block, set(), width)
    assert isinstance(module, FusedAttention) and module.lorikeet_binding is block.lorikeet_binding
    assert (module.qkv.out_features, module.qkv.in_features) == (8 * 24, 48)
    x = drawn(1, 5, 48, dtype=dtype)
    angles = drawn(1, 5, (width or 24) // 2, dtype=torch.float32, seed=8).repeat(1, 1, 2)
    plain, fused = AttentionRecorder(), AttentionRecorder()
    for chosen in ([0, 1, 2, 3, 4], [3]):
        turned = (angles[:, chosen].cos().to(dtype), angles[:, chosen].sin().to(dtype))
        expected = attend(block, plain, x[:, chosen], turned)
        got = attend(module, fused, x[:, chosen], turned)
        assert fused.options == plain.options
        for one, other in zip((expected, *plain.seen), (got, *fused.seen), strict=True):
            assert close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [24, 16])
@pytest.mark.parametrize("has_norms", [False, True])
def test_k_and_v_go_to_their_pages(has_norms: bool, width: int, dtype: torch.dtype) -> None:
    shape, angles = [5, 2, 24], drawn(6, width, dtype=dtype)
    weights = drawn(2, 24, dtype=dtype).unbind() if has_norms else (None, None)
    qkv, slots = drawn(6, 9 * 24, dtype=dtype), torch.tensor([7, 3, 40, 0, 12, 41], device=DEVICE)
    plain, stored = qkv.clone(), qkv.clone()
    keys, values = torch.zeros(2, 3, 16, 2, 24, dtype=dtype, device=DEVICE).unbind()
    device_kernels.rotate(plain, angles, angles, shape, *weights, None, None, None, 1e-5, 0.0, True)
    device_kernels.rotate(stored, angles, angles, shape, *weights, slots, keys, values, 1e-5, 0.0, True)
    query, key, value = plain.view(6, 9, 24).split([5, 2, 2], dim=1)
    # compiled apart, one of both may fuse multiplications and additions
    agrees = torch.equal if DEVICE.type == "cpu" else close
    assert agrees(query, stored.view(6, 9, 24)[:, :5])
    assert torch.equal(value, qkv.view(6, 9, 24)[:, 7:]) and not torch.equal(key, qkv.view(6, 9, 24)[:, 5:7])
    assert agrees(key, keys.flatten(0, 1)[slots]) and torch.equal(values.flatten(0, 1)[slots], value)
    for pool in (keys, values):
        assert int((pool.flatten(0, 1).abs().sum((1, 2)) > 0).sum()) == 6


def test_blocks_that_do_more_or_less_are_left_alone() -> None:
    dtype = torch.bfloat16
    partial = block_of(StableLmAttention, StableLmConfig, dtype, partial_rotary_factor=0.25)
    assert fuse_attention(partial, set()) is None and fuse_attention(partial, set(), 6) is None
    assert fuse_attention(block_of(GptOssAttention, GptOssConfig, dtype), set()) is None
    assert fuse_attention(block_of(Olmo2Attention, Olmo2Config, dtype), set()) is None  # norms of all heads at once
    block = block_of(LlamaAttention, LlamaConfig, dtype)
    assert fuse_attention(block, {id(block.k_proj.weight)}) is None


def test_the_operators_say_what_they_return() -> None:
    for check in (
        (
            device_kernels.rms_norm,
            (drawn(2, 8, dtype=torch.float32), drawn(8, dtype=torch.float32), 1e-5, 0.0, True),
        ),
        (device_kernels.gate, (drawn(2, 8, dtype=torch.float32), False)),
    ):
        torch.library.opcheck(check[0].overload, check[1])
    x, weight = drawn(2, 8, dtype=torch.float32), drawn(8, dtype=torch.float32)
    torch.library.opcheck(device_kernels.add_rms_norm.overload, (x, x.clone(), weight, 1e-5, 0.0, True))
    angles = drawn(2, 4, dtype=torch.float32)
    torch.library.opcheck(device_kernels.rotate.overload, (x, angles, angles, [1, 1, 4], *[None] * 5, 0.0, 0.0, False))
