"""A fused attention block: q, k and v as one product, their norms and rotary positions in place on its output.

It is made for every block with the right parts, and used only if it passes the same q, k, v and options to the layer's
attention as the plain block does, and computes the same from the attention's output. The attention backend writes K and
V to their pages.
"""

from typing import Any

import torch
from torch import nn

from lorikeet.shard.model.adapters.discovery import FusedTargets, target_of
from lorikeet.shard.model.attention_binding import AttentionBinding
from lorikeet.shard.model.fusion import verify
from lorikeet.shard.model.fusion.kernels import FusionKernels, HeadNorms
from lorikeet.shard.model.fusion.parts import fuse_norm
from lorikeet.shard.model.fusion.patterns import AttentionParts, attention_parts, sample
from lorikeet.shard.model.fusion.verify import PositionEmbeddings


class FusedAttention(nn.Module):
    """What a transformers attention block computes, given the position embeddings of its model."""

    def __init__(
        self, kernels: FusionKernels, block: Any, parts: AttentionParts, norms: HeadNorms, options: dict[str, Any]
    ) -> None:
        """`options`: what the plain block passes to its attention function by keyword."""
        super().__init__()
        self._kernels, self.norms, self._options = kernels, norms, options
        self.lorikeet_binding: AttentionBinding = block.lorikeet_binding
        self.layer_idx: int = block.layer_idx
        self.num_heads, self.num_kv_heads, self.head_dim = parts.num_heads, parts.num_kv_heads, parts.head_dim
        self.qkv = kernels.join(parts.qkv)
        self.qkv_adapters = FusedTargets(self.qkv, [target_of(part) for part in parts.qkv])
        self.out = kernels.output(parts.out)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: PositionEmbeddings, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states: [1, T, H]; position_embeddings: cos and sin, [1, T, R]. Returns ([1, T, H], None)."""
        # [1, T, (heads + 2 kv_heads) D]
        shrunk = self.qkv_adapters.begin(hidden_states[0])
        qkv = self.qkv(hidden_states)
        self.qkv_adapters.adapt(hidden_states[0], qkv[0], shrunk)
        shape = [self.num_heads, self.num_kv_heads, self.head_dim]
        destination = self.lorikeet_binding.destination() if self._kernels.stores_kv else None
        self._kernels.rotate(qkv[0], position_embeddings, shape, self.norms, destination)
        # [1, heads + 2 kv_heads, T, D]
        heads = qkv.view(1, qkv.shape[1], -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if destination is None:
            output = self.lorikeet_binding(query, key, value, self._options)
        else:
            output = self.lorikeet_binding.read(query)
        projected: torch.Tensor = self.out(output.reshape(*hidden_states.shape[:-1], -1))
        return projected, None


def fuse_attention(
    block: Any, kernels: FusionKernels, shared: set[int], rotary_width: int | None = None
) -> FusedAttention | None:
    """The fused attention block, or None. `shared`: ids of weights that other modules hold too; `rotary_width`: of the
    position embeddings, that of a head if not known.
    """
    parts = attention_parts(block, shared)
    if parts is None or parts.num_kv_heads < 1 or not kernels.supports_attention(parts, rotary_width):
        return None
    norms = _norms(parts, kernels)
    if parts.norms is not None and norms is None:
        return None
    first = parts.qkv[0]
    x, angles = verify.tokens(first.in_features, rotary_width or parts.head_dim, sample(first))

    def make(plain: verify.AttentionRecorder) -> FusedAttention | None:
        shapes = [(seen.shape[1], seen.shape[3]) for seen in plain.seen]
        if shapes != [(parts.num_heads, parts.head_dim), *[(parts.num_kv_heads, parts.head_dim)] * 2]:
            return None
        return FusedAttention(kernels, block, parts, norms, plain.options)

    return verify.matches_reference(block, make, x, angles)


def _norms(parts: AttentionParts, kernels: FusionKernels) -> HeadNorms:
    """The norms of q's and k's heads, if one kernel can compute both."""
    if parts.norms is None:
        return None
    fused = [fuse_norm(norm, kernels) for norm in parts.norms]
    norms = [one.norm for one in fused if one is not None and one.weight.shape[0] == parts.head_dim]
    if len(norms) != 2 or (norms[0].epsilon, norms[0].form) != (norms[1].epsilon, norms[1].form):
        return None
    return norms[0], norms[1]
