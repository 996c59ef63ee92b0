"""An attention block's own work around the attention itself: q, k and v as one product, rotary positions in place.

A fused twin is made for any block with q_proj, k_proj, v_proj and o_proj; it stays only if it hands the attention site
the same q, k, v and options as the plain block does, and makes the same of what the site returns. Bfloat16 on CPU only.
"""

from typing import Any

import torch
from torch import nn

from lorikeet.shard.model.adapters.discovery import FusedTargets, target_of
from lorikeet.shard.model.fusion import verify as trial
from lorikeet.shard.model.fusion.patterns import attention_parts, is_plain, joined_bias
from lorikeet.shard.model.kernels import cpu as kernels
from lorikeet.shard.model.kernels.packing import StreamedMatrix
from lorikeet.shard.model.site import AttentionBinding


class FusedAttention(nn.Module):
    """What a transformers attention block computes, given the position embeddings of its model."""

    def __init__(self, block: Any, options: dict[str, Any]) -> None:
        """`options`: what the plain block passes to its attention function by keyword."""
        super().__init__()
        parts = (block.q_proj, block.k_proj, block.v_proj)
        self.lorikeet_target: AttentionBinding = block.lorikeet_target
        self.layer_idx: int = block.layer_idx
        self.head_dim: int = block.head_dim
        self.num_heads, self.num_kv_heads = (part.out_features // block.head_dim for part in parts[:2])
        self.options = options
        self.qkv = StreamedMatrix(torch.cat([part.weight.detach() for part in parts]), joined_bias(parts))
        self.out = StreamedMatrix(block.o_proj.weight.detach(), block.o_proj.bias)
        self.qkv_adapters = FusedTargets(self.qkv, [target_of(part) for part in parts])
        self.out_adapters = FusedTargets(self.out, [target_of(block.o_proj)])

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states: [1, T, H]; position_embeddings: cos and sin, [1, T, D]. Returns ([1, T, H], None)."""
        # [1, T, (heads + 2 kv_heads) D]
        qkv = self.qkv(hidden_states)
        self.qkv_adapters.adapt(hidden_states[0], qkv[0])
        cos, sin = (angles[0].contiguous() for angles in position_embeddings)
        kernels.rotate(qkv[0], self.num_heads + self.num_kv_heads, cos, sin)
        # [1, heads + 2 kv_heads, T, D]
        heads = qkv.view(1, qkv.shape[1], -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        output = self.lorikeet_target(query, key, value, self.options)
        seen = output.reshape(*hidden_states.shape[:-1], -1)
        projected = self.out(seen)
        self.out_adapters.adapt(seen[0], projected[0])
        return projected, None


def fuse_attention(block: Any, shared: set[int], rotary_width: int | None = None) -> FusedAttention | None:
    """The fused twin of an attention block, or None where it has none. `shared`: weights that others hold too;
    `rotary_width`: of the position embeddings, that of a head if not known.
    """
    parts = attention_parts(block, shared)
    if parts is None or len(parts.qkv) != 3 or not is_plain(parts.out, shared) or parts.head_dim % 32:
        return None
    if any(part.in_features % 2 for part in (*parts.qkv, parts.out)) or rotary_width not in (None, parts.head_dim):
        return None
    like = torch.empty(0, dtype=torch.bfloat16)
    x, position_embeddings = trial.tokens(parts.qkv[0].in_features, parts.head_dim, like)
    return trial.matches_reference(block, lambda plain: FusedAttention(block, plain.options), x, position_embeddings)
