"""The fused attention block hands its binding what the plain one does, and is left out where it would not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention, Glm4MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssConfig
from transformers.models.granite.modeling_granite import GraniteAttention, GraniteConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Config
from transformers.models.stablelm.modeling_stablelm import StableLmAttention, StableLmConfig

from lorikeet.shard import attention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.model.attention_binding import NAME, AttentionBinding
from lorikeet.shard.model.fusion.attention import FusedAttention
from lorikeet.shard.model.fusion.attention import fuse_attention as fuse_for
from lorikeet.shard.model.fusion.kernels import CpuKernels
from lorikeet.shard.model.fusion.verify import AttentionRecorder, attend
from lorikeet.shard.model.kernels import cpu as kernels
from tests import tiny
from tests.shard.near import worst_share

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C compiler")

SHAPE: dict[str, Any] = {
    "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2,
    "attn_implementation": NAME,
}  # fmt: skip


def fuse_attention(block: Any, shared: set[int], rotary_width: int | None = None) -> FusedAttention | None:
    return fuse_for(block, CpuKernels(), shared, rotary_width)


def block_of(kind: Any, config_kind: Any, **more: Any) -> Any:
    torch.manual_seed(3)
    block = kind(config_kind(**SHAPE, **more), 1)
    for norm in (getattr(block, name, None) for name in ("q_norm", "k_norm")):
        if norm is not None:
            torch.nn.init.normal_(norm.weight)
    block = block.bfloat16()
    device = torch.device("cpu")
    backend = attention.create("reference", device, torch.bfloat16, 16)
    block.lorikeet_binding = AttentionBinding(backend, StepInputs(16, device))
    return block


def inputs_of(num_tokens: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    angles = torch.randn(1, num_tokens, 16, generator=generator).repeat(1, 1, 2)
    x = torch.randn(1, num_tokens, SHAPE["hidden_size"], generator=generator).bfloat16()
    return x, (angles.cos().bfloat16(), angles.sin().bfloat16())


@pytest.mark.parametrize(
    ("kind", "config_kind", "more"),
    [
        (LlamaAttention, LlamaConfig, {}),
        (LlamaAttention, LlamaConfig, {"attention_bias": True}),
        (GraniteAttention, GraniteConfig, {"attention_multiplier": 0.3}),
        (Qwen2Attention, Qwen2Config, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
        (Qwen3Attention, Qwen3Config, {}),  # norms of the heads
    ],
)
@torch.inference_mode()
def test_the_attention_gets_the_same_arguments(kind: Any, config_kind: Any, more: dict[str, Any]) -> None:
    block = block_of(kind, config_kind, **more)
    binding, (x, angles) = block.lorikeet_binding, inputs_of(40)
    plain, fused = AttentionRecorder(), AttentionRecorder()
    expected = attend(block, plain, x, angles)
    module = fuse_attention(block, set())
    assert isinstance(module, FusedAttention)
    assert module.lorikeet_binding is binding
    got = attend(module, fused, x, angles)
    assert fused.options == plain.options
    for one, other in zip((expected, *plain.seen), (got, *fused.seen), strict=True):
        assert worst_share(other, one) <= 2**-6
    few = AttentionRecorder()
    attend(module, few, x[:, 10:13], (angles[0][:, 10:13], angles[1][:, 10:13]))
    for all_rows, some_rows in zip(fused.seen, few.seen, strict=True):
        assert torch.equal(all_rows[:, :, 10:13], some_rows)


def test_blocks_that_do_more_or_less_are_left_alone() -> None:
    assert fuse_attention(block_of(StableLmAttention, StableLmConfig, partial_rotary_factor=0.25), set()) is None
    assert fuse_attention(block_of(GptOssAttention, GptOssConfig), set()) is None  # its angles are half as wide
    block = block_of(LlamaAttention, LlamaConfig)
    assert fuse_attention(block, {id(block.k_proj.weight)}) is None
    assert fuse_attention(torch.nn.Linear(4, 4), set()) is None
    # its code turns as much of a head as there are angles for
    assert fuse_attention(block_of(Glm4MoeAttention, Glm4MoeConfig), set(), rotary_width=16) is None


@torch.inference_mode()
def test_a_whole_model_is_as_near_to_float32_as_transformers(tmp_path: Path) -> None:
    tiny.make("llama", tmp_path, hidden_size=128, head_dim=32)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    model = load_model(ShardConfig("tiny", str(tmp_path), "unix:/dev/null", dtype="bfloat16"))
    fused = [module for module in model.network.modules() if isinstance(module, FusedAttention)]
    assert len(fused) == model.info.num_layers
    model.allocate_kv(4)
    ids = torch.arange(3, 43) % model.info.vocab_size
    model.inputs.fill([Segment(0, 40, range(2))], ids, torch.arange(40))
    theirs, ours = oracle(ids[None]).logits[0].float(), model.forward().float()
    exact = oracle.float()(ids[None]).logits[0]  # the same weights: each of the two rounds in other places
    their_error, our_error = (theirs - exact).abs(), (ours - exact).abs()
    size = their_error.square().mean().sqrt()
    assert our_error.square().mean().sqrt() <= 1.1 * size
    assert (our_error - their_error).max() <= 6 * size
