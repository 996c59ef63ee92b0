"""A decoder layer on CUDA whose sums are part of the norms that follow them.

A twin is made of any layer that has the parts by their usual names; it stays only if it computes what the layer's own
code makes of the same parts. The last sum is a launch of its own: the norm that follows it is another layer's.
"""

from typing import Any

import torch
from torch import nn

from shard.model import trial
from shard.model.device_parts import DeviceMlp, DeviceNorm
from shard.model.trial import Recorder

PLAIN = ("input_layernorm", "", "post_attention_layernorm", "")
"""Names of the norms before attention, after it, before the MLP and after it: Llama's …"""
SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""… and Gemma's, whose parts have norms on both sides."""


class DeviceDecoderLayer(nn.Module):
    """`x + attention(norm x)`, then `x + mlp(norm x)`; what is added may go through a norm too."""

    def __init__(self, layer: Any, norms: tuple[str, str, str, str]) -> None:
        super().__init__()
        self.attention: nn.Module = layer.self_attn
        self.mlp: DeviceMlp = layer.mlp
        before, after, before_mlp, after_mlp = norms
        self.input_norm: DeviceNorm = getattr(layer, before)
        self.attended_norm: DeviceNorm | None = getattr(layer, after) if after else None
        self.mlp_norm: DeviceNorm = getattr(layer, before_mlp)
        self.output_norm: DeviceNorm | None = getattr(layer, after_mlp) if after_mlp else None

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """hidden_states: [1, T, H]; options: for the attention. Returns [1, T, H]."""
        attended = self.attention(hidden_states=self.input_norm(hidden_states), **options)[0]
        if self.attended_norm is not None:
            attended = self.attended_norm(attended)
        hidden_states, normed = self.mlp_norm.of_sum(hidden_states, attended)
        added = self.mlp(normed)
        if self.output_norm is not None:
            added = self.output_norm(added)
        return hidden_states + added


def fuse_layer(layer: Any, rotary_width: int | None = None) -> DeviceDecoderLayer | None:
    """The twin of a decoder layer whose norms and MLP are twins already, or None where it has none. `rotary_width`: as
    for its attention.
    """
    attention = getattr(layer, "self_attn", None)
    if not isinstance(getattr(layer, "mlp", None), DeviceMlp) or not hasattr(attention, "lorikeet_site"):
        return None
    names = SANDWICH if hasattr(layer, SANDWICH[2]) else PLAIN
    if not all(isinstance(getattr(layer, name, None), DeviceNorm) for name in names if name):
        return None
    twin = DeviceDecoderLayer(layer, names)
    return twin if _agrees(layer, twin, rotary_width or _head_dim(attention)) else None


def _head_dim(attention: Any) -> int:
    return int(getattr(attention, "head_dim", 0))


def _agrees(layer: Any, twin: DeviceDecoderLayer, rotary_width: int) -> bool:
    """Whether both make the same of random rows, whatever the attention returns."""
    weight = twin.input_norm.weight
    x, position_embeddings = trial.tokens(weight.shape[0], rotary_width, weight)
    try:
        with trial.recording(twin.attention, Recorder()), torch.inference_mode():
            wanted = layer(x, attention_mask=None, position_embeddings=position_embeddings)
    except (RuntimeError, TypeError):  # it wants other arguments: another kind of layer
        return False
    if not isinstance(wanted, torch.Tensor):
        return False
    with trial.recording(twin.attention, Recorder()), torch.inference_mode():
        got = twin(x, attention_mask=None, position_embeddings=position_embeddings)
    return trial.close(wanted, got)
