"""An attention block's own work around the attention itself: q, k and v as one product, rotary positions in place.

A fused twin is made for any block with q_proj, k_proj, v_proj and o_proj; it stays only if it hands the attention site
the same q, k, v and options as the plain block does, and makes the same of what the site returns. Bfloat16 on CPU only.
"""

from typing import Any

import torch
from torch import nn

from shard.model import kernels
from shard.model.adapter_sites import JoinedSites, site_of
from shard.model.packing import StreamedMatrix
from shard.model.quantized import is_quantized
from shard.model.site import AttentionSite

NUM_TRIAL_TOKENS = 5
TOLERANCE = 2**-6
"""Relative difference that roundings to bfloat16 in another order may leave."""


class FusedAttention(nn.Module):
    """What a transformers attention block computes, given the position embeddings of its model."""

    def __init__(self, block: Any, options: dict[str, Any]) -> None:
        """`options`: what the plain block passes to its attention function by keyword."""
        super().__init__()
        parts = (block.q_proj, block.k_proj, block.v_proj)
        self.lorikeet_site: AttentionSite = block.lorikeet_site
        self.layer_idx: int = block.layer_idx
        self.head_dim: int = block.head_dim
        self.num_heads, self.num_kv_heads = (part.out_features // block.head_dim for part in parts[:2])
        self.options = options
        self.qkv = StreamedMatrix(torch.cat([part.weight.detach() for part in parts]), _joined_bias(parts))
        self.out = StreamedMatrix(block.o_proj.weight.detach(), block.o_proj.bias)
        self.qkv_adapters = JoinedSites(self.qkv, [site_of(part) for part in parts])
        self.out_adapters = JoinedSites(self.out, [site_of(block.o_proj)])

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
        output = self.lorikeet_site(query, key, value, self.options)
        seen = output.reshape(*hidden_states.shape[:-1], -1)
        projected = self.out(seen)
        self.out_adapters.adapt(seen[0], projected[0])
        return projected, None


class Recorder:
    """Stands in for an attention site: keeps what it is given, returns something that depends on no implementation."""

    def __init__(self) -> None:
        self.seen: tuple[torch.Tensor, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """query: [1, heads, T, D], key and value: [1, kv_heads, T, D]. Returns [1, T, heads, D]."""
        self.seen, self.options = (query, key, value), options
        generator = torch.Generator().manual_seed(1)
        return torch.randn(1, query.shape[2], query.shape[1], value.shape[3], generator=generator).to(query.dtype)


def fuse_attention(block: Any, shared: set[int]) -> FusedAttention | None:
    """The fused twin of an attention block, or None where it has none. `shared`: weights that others hold too."""
    if not _has_parts(block, shared):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, NUM_TRIAL_TOKENS, block.q_proj.in_features, generator=generator).bfloat16()
    angles = torch.randn(1, NUM_TRIAL_TOKENS, block.head_dim // 2, generator=generator).repeat(1, 1, 2)
    position_embeddings = (angles.cos().bfloat16(), angles.sin().bfloat16())
    plain, fused = Recorder(), Recorder()
    with torch.inference_mode():
        try:
            wanted = _trial(block, plain, x, position_embeddings)
        except (RuntimeError, TypeError):  # it wants other arguments or other angles: another kind of block
            return None
        twin = FusedAttention(block, plain.options)
        got = _trial(twin, fused, x, position_embeddings)
    pairs = [(wanted, got), *zip(plain.seen, fused.seen, strict=True)]
    return twin if all(_close(one, other) for one, other in pairs) else None


def _trial(
    block: Any, recorder: Recorder, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """What the block makes of x [1, T, H] with the recorder as its attention."""
    site = block.lorikeet_site
    del block.lorikeet_site
    block.lorikeet_site = recorder
    try:
        output: torch.Tensor = block(hidden_states=x, position_embeddings=position_embeddings, attention_mask=None)[0]
    finally:
        del block.lorikeet_site
        block.lorikeet_site = site
    return output


def _has_parts(block: Any, shared: set[int]) -> bool:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        part = getattr(block, name, None)
        if not isinstance(part, nn.Linear) or is_quantized(part):
            return False
        if id(part.weight) in shared or part.in_features % 2:
            return False
    head_dim = getattr(block, "head_dim", None)
    if not isinstance(head_dim, int) or head_dim % 32 or not isinstance(getattr(block, "layer_idx", None), int):
        return False
    names = block.forward.__code__.co_varnames[: block.forward.__code__.co_argcount]
    return "position_embeddings" in names


def _joined_bias(parts: tuple[nn.Linear, ...]) -> torch.Tensor | None:
    """[out of all parts], zeros where one has none; None where none has one."""
    if all(part.bias is None for part in parts):
        return None
    return torch.cat(
        [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
    )


def _close(wanted: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether both are the same but for roundings."""
    if wanted.shape != got.shape:
        return False
    difference = (wanted.float() - got.float()).abs().max()
    return bool(difference <= TOLERANCE * wanted.float().abs().max())
