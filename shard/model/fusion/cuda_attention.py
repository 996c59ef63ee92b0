"""An attention block's own work on CUDA: q, k and v as one product, their norms and rotary positions in place on it.

A twin is made of any block with the right parts; it stays only if it hands the attention site the same q, k, v and
options as the plain block does, and makes the same of what the site returns. Writing K and V to their pages is the
attention backend's.
"""

from typing import Any

import torch
from torch import nn

from lorikeet.shard.model.adapters.discovery import FusedTargets, target_of
from lorikeet.shard.model.fusion import verify as trial
from lorikeet.shard.model.fusion.cuda_parts import DeviceNorm, FusedMatrix, fuse_norm
from lorikeet.shard.model.fusion.patterns import AttentionParts, attention_parts
from lorikeet.shard.model.fusion.verify import Recorder
from lorikeet.shard.model.kernels import triton as device_kernels
from lorikeet.shard.model.site import AttentionBinding

Norms = tuple[DeviceNorm, DeviceNorm]
"""Of each head of q and of k: alike but for their weights."""


class DeviceAttention(nn.Module):
    """What a transformers attention block computes, given the position embeddings of its model."""

    def __init__(self, block: Any, parts: AttentionParts, norms: Norms | None, options: dict[str, Any]) -> None:
        """`options`: what the plain block passes to its attention function by keyword."""
        super().__init__()
        self.lorikeet_target: AttentionBinding = block.lorikeet_target
        self.layer_idx: int = block.layer_idx
        self.num_heads, self.num_kv_heads, self.head_dim = parts.num_heads, parts.num_kv_heads, parts.head_dim
        self.options = options
        self.out = parts.out
        self.qkv = FusedMatrix(parts.qkv)
        self.qkv_adapters = FusedTargets(self.qkv, [target_of(part) for part in parts.qkv])
        self.q_norm: DeviceNorm | None = None if norms is None else norms[0]
        self.k_norm: DeviceNorm | None = None if norms is None else norms[1]

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states: [1, T, H]; position_embeddings: cos and sin, [1, T, R]. Returns ([1, T, H], None)."""
        # [1, T, (heads + 2 kv_heads) D]
        qkv = self.qkv(hidden_states)
        self.qkv_adapters.adapt(hidden_states[0], qkv[0])
        self._rotate(qkv[0], position_embeddings)
        # [1, heads + 2 kv_heads, T, D]
        heads = qkv.view(1, qkv.shape[1], -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        output = self.lorikeet_target(query, key, value, self.options)
        projected: torch.Tensor = self.out(output.reshape(*hidden_states.shape[:-1], -1))
        return projected, None

    def _rotate(self, qkv: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> None:
        """qkv: [T, columns], in place."""
        cos, sin = (angles[0].contiguous() for angles in position_embeddings)
        shape = [self.num_heads, self.num_kv_heads, self.head_dim]
        of_query, of_key = self.q_norm, self.k_norm
        if of_query is None or of_key is None:
            device_kernels.rotate(qkv, cos, sin, shape, None, None, 0.0, 0.0, False)
            return
        device_kernels.rotate(qkv, cos, sin, shape, of_query.weight, of_key.weight, of_query.epsilon, *of_query.form)


def fuse_attention(block: Any, shared: set[int], rotary_width: int | None = None) -> DeviceAttention | None:
    """The twin of an attention block, or None where it has none. `shared`: weights that others hold too;
    `rotary_width`: of the position embeddings, that of a head if not known.
    """
    parts = attention_parts(block, shared)
    if parts is None or parts.num_kv_heads < 1:
        return None
    norms = _norms(parts)
    if parts.norms is not None and norms is None:
        return None
    weight = parts.qkv[0].weight
    x, position_embeddings = trial.tokens(weight.shape[1], rotary_width or parts.head_dim, weight)

    def make(plain: Recorder) -> DeviceAttention | None:
        if _shapes(plain) != [(parts.num_heads, parts.head_dim), *[(parts.num_kv_heads, parts.head_dim)] * 2]:
            return None
        return DeviceAttention(block, parts, norms, plain.options)

    return trial.matches_reference(block, make, x, position_embeddings)


def _norms(parts: AttentionParts) -> Norms | None:
    """The twins of the norms of q's and k's heads, if one kernel can compute both."""
    if parts.norms is None:
        return None
    of_query, of_key = (fuse_norm(norm) for norm in parts.norms)
    if of_query is None or of_key is None or (of_query.form, of_query.epsilon) != (of_key.form, of_key.epsilon):
        return None
    is_of_heads = all(norm.weight.shape[0] == parts.head_dim for norm in (of_query, of_key))
    return (of_query, of_key) if is_of_heads else None


def _shapes(recorder: Recorder) -> list[tuple[int, int]]:
    """Heads and their width of q, k and v."""
    return [(seen.shape[1], seen.shape[3]) for seen in recorder.seen]
