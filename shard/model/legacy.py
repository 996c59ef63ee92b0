"""Attention for bloom, falcon and mpt, whose code in transformers calls no attention function of ours.

Each class takes the projections of the module that it replaces and calls the layer's site. Alibi becomes a slope per
head: softmax does not change when a row's scores move together, so slope times distance equals slope times position.
"""

from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from lorikeet.shard.attention import AttentionBackend
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.site import NAME, AttentionBinding

# falcon looks its attention class up by the attention function's name
modeling_falcon.FALCON_ATTENTION_CLASSES[NAME] = modeling_falcon.FalconAttention


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x: [1, T, heads, D]. Returns [1, heads, T, D]."""
    return x.transpose(1, 2)


class BloomAttention(nn.Module):
    """In place of transformers' BloomAttention."""

    def __init__(self, old: Any, site: AttentionBinding) -> None:
        super().__init__()
        self.query_key_value, self.dense = old.query_key_value, old.dense
        self.num_heads, self.head_dim = old.num_heads, old.head_dim
        self.lorikeet_target = site
        slopes = modeling_bloom.build_alibi_tensor(torch.ones(1, 2), old.num_heads, torch.float32)[:, 0, 1]
        self.options = {"scaling": old.inv_norm_factor, "alibi_slopes": slopes}

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """hidden_states, residual: [1, T, H]."""
        fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
        output = self.lorikeet_target(*(_heads(fused[..., i, :]) for i in range(3)), self.options)
        return self.dense(output.flatten(2)) + residual, None


class FalconAttention(nn.Module):
    """In place of transformers' FalconAttention: grouped, multi-query or one K and V per head; rotary or alibi."""

    def __init__(self, old: Any, site: AttentionBinding) -> None:
        super().__init__()
        self.query_key_value, self.dense = old.query_key_value, old.dense
        self.head_dim, self.num_kv_heads = old.head_dim, old.num_kv_heads
        self.group = old.num_heads // old.num_kv_heads
        self.lorikeet_target = site
        self.options: dict[str, Any] = {"scaling": old.inv_norm_factor}
        if old.config.alibi:
            slopes = modeling_falcon.build_alibi_tensor(torch.ones(1, 2), old.num_heads, torch.float32)[:, 0, 1]
            self.options["alibi_slopes"] = slopes * old.inv_norm_factor

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states: [1, T, H]; position_embeddings: cosines and sines, [1, T, D] each."""
        # [1, T, kv_heads, group + 2, D]
        fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_kv_heads, self.group + 2, self.head_dim))
        query, key, value = (
            _heads(fused[..., :-2, :].flatten(2, 3)),
            _heads(fused[..., -2, :]),
            _heads(fused[..., -1, :]),
        )
        if "alibi_slopes" not in self.options:
            query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
        return self.dense(self.lorikeet_target(query, key, value, self.options).flatten(2)), None


class MptAttention(nn.Module):
    """In place of transformers' MptAttention."""

    def __init__(self, old: Any, site: AttentionBinding) -> None:
        super().__init__()
        self.Wqkv, self.out_proj = old.Wqkv, old.out_proj
        self.num_heads, self.head_dim, self.clip = old.n_heads, old.head_dim, old.clip_qkv
        self.lorikeet_target = site
        slopes = -modeling_mpt.build_mpt_alibi_tensor(old.n_heads, 2)[:, 0, 0]
        self.options = {"scaling": old.softmax_scale, "alibi_slopes": slopes}

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """hidden_states: [1, T, H]."""
        fused = self.Wqkv(hidden_states)
        if self.clip:
            fused = fused.clamp(min=-self.clip, max=self.clip)
        fused = fused.unflatten(-1, (3, self.num_heads, self.head_dim))
        output = self.lorikeet_target(*(_heads(fused[..., i, :, :]) for i in range(3)), self.options)
        return self.out_proj(output.flatten(2)), None


class MptTrunk(nn.Module):
    """In place of transformers' MptModel, which insists on a mask of its own."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.wte, self.blocks, self.norm_f = old.wte, old.blocks, old.norm_f

    def forward(self, input_ids: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
        """input_ids: [1, T]."""
        hidden_states = self.wte(input_ids)
        for block in self.blocks:
            hidden_states = block(hidden_states, position_bias=None, attention_mask=None)[0]
        return BaseModelOutputWithPast(last_hidden_state=self.norm_f(hidden_states))


REPLACEMENTS: dict[type[nn.Module], type[BloomAttention | FalconAttention | MptAttention]] = {
    modeling_bloom.BloomAttention: BloomAttention,
    modeling_falcon.FalconAttention: FalconAttention,
    modeling_mpt.MptAttention: MptAttention,
}


def replace_legacy(network: nn.Module, backend: AttentionBackend, inputs: StepInputs) -> None:
    """Put our attention in place of transformers' where it has none of the interface."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            replacement = REPLACEMENTS.get(type(child))
            if replacement is not None:
                setattr(parent, name, replacement(child, AttentionBinding(backend, inputs)))
            elif isinstance(child, modeling_mpt.MptModel):
                setattr(parent, name, MptTrunk(child))
