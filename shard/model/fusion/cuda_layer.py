"""A decoder layer on CUDA whose sums are part of the norms that follow them, in the next layer too.

A twin is made of any layer that has the parts by their usual names; it stays only if it computes what the layer's own
code makes of the same norms, whatever its attention and MLP are.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lorikeet.shard.model.fusion import verify as trial
from lorikeet.shard.model.fusion.cuda_parts import DeviceNorm

PLAIN = ("input_layernorm", "", "post_attention_layernorm", "")
"""Names of the norms before attention, after it, before the MLP and after it: Llama's …"""
SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""… and Gemma's, whose parts have norms on both sides."""
TOLERANCE = 2**-6
"""Of what roundings may leave of the largest value: so much may be left on average. The sums are the same sums."""


class DeviceDecoderLayer(nn.Module):
    """`x + attention(norm x)`, then `x + mlp(norm x)`; what is added may go through a norm too."""

    def __init__(self, layer: Any, norms: tuple[str, str, str, str]) -> None:
        super().__init__()
        self.attention: nn.Module = layer.self_attn
        self.mlp: nn.Module = layer.mlp
        before, after, before_mlp, after_mlp = norms
        self.input_norm: DeviceNorm = getattr(layer, before)
        self.attended_norm: DeviceNorm | None = getattr(layer, after) if after else None
        self.mlp_norm: DeviceNorm = getattr(layer, before_mlp)
        self.output_norm: DeviceNorm | None = getattr(layer, after_mlp) if after_mlp else None
        self.next_norm: list[DeviceNorm] = []
        """What the layer's output goes through next, if that is known: in a list, for it is no part of the layer."""

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """hidden_states: [1, T, H]; options: for the attention. Returns [1, T, H]."""
        attended = self.attention(hidden_states=self.input_norm(hidden_states), **options)[0]
        if self.attended_norm is not None:
            attended = self.attended_norm(attended)
        hidden_states, normed = self.mlp_norm.of_sum(hidden_states, attended)
        added = self.mlp(normed)
        if self.output_norm is not None:
            added = self.output_norm(added)
        return self.next_norm[0].ahead(hidden_states, added) if self.next_norm else hidden_states + added


def fuse_layer(layer: Any) -> DeviceDecoderLayer | None:
    """The twin of a decoder layer whose norms are twins already, or None where it has none."""
    if not all(isinstance(getattr(layer, name, None), nn.Module) for name in ("self_attn", "mlp")):
        return None
    names = SANDWICH if hasattr(layer, SANDWICH[2]) else PLAIN
    if not all(isinstance(getattr(layer, name, None), DeviceNorm) for name in names if name):
        return None
    attention, mlp = layer.self_attn, layer.mlp
    layer.self_attn, layer.mlp = _StandIn(is_pair=True), _StandIn(is_pair=False)
    try:
        agrees = _agrees(layer, DeviceDecoderLayer(layer, names))
    finally:
        layer.self_attn, layer.mlp = attention, mlp
    return DeviceDecoderLayer(layer, names) if agrees else None


def link(network: nn.Module) -> None:
    """Let each layer's last sum be part of the norm that is likely to come next, which finds it done if it does."""
    for parent in network.modules():
        for stack in parent.children():
            layers = [layer for layer in stack.children() if isinstance(layer, DeviceDecoderLayer)]
            if not isinstance(stack, nn.ModuleList) or len(layers) != len(stack):
                continue
            for layer, following in pairwise(layers):
                layer.next_norm = [following.input_norm]
            last = getattr(parent, "norm", None)
            if layers and isinstance(last, DeviceNorm):
                layers[-1].next_norm = [last]


class _StandIn(nn.Module):
    """In place of attention or MLP: what it returns is about one, hangs on its input and is not like it."""

    def __init__(self, is_pair: bool) -> None:
        super().__init__()
        self._is_pair = is_pair

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """hidden_states: [..., H]. Returns as much, for attention with a second value."""
        y = hidden_states.flip(-1) / hidden_states.abs().mean()
        return (y, None) if self._is_pair else y


@torch.inference_mode()
def _agrees(layer: Any, twin: DeviceDecoderLayer) -> bool:
    """Whether both make the same of random rows."""
    weight = twin.input_norm.weight
    x = trial.rows(weight.shape[0], weight)[None]
    try:
        wanted = layer(x, attention_mask=None, position_embeddings=None)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it wants something else: another kind of layer
        return False
    if not isinstance(wanted, torch.Tensor):
        return False
    got = twin(x, attention_mask=None, position_embeddings=None)
    apart = (wanted.float() - got.float()).abs().mean()
    is_near = apart <= TOLERANCE * trial.TOLERANCES[wanted.dtype] * wanted.float().abs().mean()
    return trial.close(wanted, got) and bool(is_near)
