"""A fused decoder layer: on CPU one call of compiled code, elsewhere sums that are part of the norms after them.

It is made for every layer that has the parts by their usual names; on CPU all of them must be fused already. It is used
only if it computes what the layer's own code computes with the same norms, whatever attention and MLP are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lorikeet.shard.model.fusion import verify
from lorikeet.shard.model.fusion.attention import FusedAttention
from lorikeet.shard.model.fusion.compiled import CompiledLayer, CompiledLayers
from lorikeet.shard.model.fusion.kernels import CpuKernels, FusionKernels
from lorikeet.shard.model.fusion.parts import FusedMlp, FusedNorm
from lorikeet.shard.system import comparison

PLAIN = ("input_layernorm", "", "post_attention_layernorm", "")
"""Llama's names of the norms before attention, after it, before the MLP and after it."""
SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Gemma's names of these norms; it normalises the input and the output of both parts."""


class FusedDecoderLayer(nn.Module):
    """`x + attention(norm x)`, then `x + mlp(norm x)`; what is added may be normalised too."""

    def __init__(self, kernels: FusionKernels, layer: Any, norms: tuple[str, str, str, str]) -> None:
        super().__init__()
        self.attention: nn.Module = layer.self_attn
        self.mlp: nn.Module = layer.mlp
        before, after, before_mlp, after_mlp = norms
        self.input_norm: FusedNorm = getattr(layer, before)
        self.attended_norm: FusedNorm | None = getattr(layer, after) if after else None
        self.mlp_norm: FusedNorm = getattr(layer, before_mlp)
        self.output_norm: FusedNorm | None = getattr(layer, after_mlp) if after_mlp else None
        self.next_norm: list[FusedNorm] = []
        """The norm that follows the layer, if known; in a list, because it is not a submodule of the layer."""
        self.compiled_layer = CompiledLayer(self, kernels) if isinstance(kernels, CpuKernels) else None
        self._compiled = None if self.compiled_layer is None else CompiledLayers([self.compiled_layer])
        self.calls_parts = False
        """Whether its parts are called one by one although there is compiled code."""

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """hidden_states: [1, T, H]; options: for the attention. Returns [1, T, H]."""
        if self._compiled is not None and not self.calls_parts:
            output = self._compiled(hidden_states, [options["position_embeddings"]])
            if output is not None:
                return output
        return self.one_by_one(hidden_states, **options)

    def one_by_one(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """The layer's results by the parts' own calls."""
        attended = self.attention(hidden_states=self.input_norm(hidden_states), **options)[0]
        if self.attended_norm is not None:
            attended = self.attended_norm(attended)
        hidden_states, normed = self.mlp_norm.of_sum(hidden_states, attended)
        added = self.mlp(normed)
        if self.output_norm is not None:
            added = self.output_norm(added)
        return self.next_norm[0].precompute(hidden_states, added) if self.next_norm else hidden_states + added


def fuse_layer(layer: Any, kernels: FusionKernels) -> FusedDecoderLayer | None:
    """The fused decoder layer whose norms are fused already, or None."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not isinstance(attention, nn.Module) or not isinstance(mlp, nn.Module):
        return None
    names = SANDWICH if hasattr(layer, SANDWICH[2]) else PLAIN
    if not all(isinstance(getattr(layer, name, None), FusedNorm) for name in names if name):
        return None
    is_compiled = isinstance(attention, FusedAttention) and isinstance(mlp, FusedMlp)
    if kernels.compiles_layers and not is_compiled:
        return None
    fused = FusedDecoderLayer(kernels, layer, names)
    layer.self_attn, layer.mlp = fused.attention, fused.mlp = _StandIn(is_pair=True), _StandIn(is_pair=False)
    try:
        with _drawn_weights(fused):
            agrees = _agrees(layer, fused, kernels.compiles_layers)
    finally:
        layer.self_attn, layer.mlp = fused.attention, fused.mlp = attention, mlp
    return fused if agrees else None


def connect_layers(network: nn.Module) -> None:
    """Compute the norm that probably follows each layer together with the layer's last sum."""
    for parent in network.modules():
        for stack in parent.children():
            layers = [layer for layer in stack.children() if isinstance(layer, FusedDecoderLayer)]
            if not isinstance(stack, nn.ModuleList) or len(layers) != len(stack):
                continue
            for layer, following in pairwise(layers):
                layer.next_norm = [following.input_norm]
            last = getattr(parent, "norm", None)
            if layers and isinstance(last, FusedNorm):
                layers[-1].next_norm = [last]


class _StandIn(nn.Module):
    """In place of attention or MLP: its output is about one and depends on its input, but does not resemble it."""

    def __init__(self, is_pair: bool) -> None:
        super().__init__()
        self._is_pair = is_pair

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """hidden_states: [..., H]. Returns the same shape, for attention with a second value."""
        y = hidden_states.flip(-1) / hidden_states.abs().mean()
        return (y, None) if self._is_pair else y


@contextmanager
def _drawn_weights(fused: FusedDecoderLayer) -> Iterator[None]:
    """Norms compute with weights drawn for the check: a network's own may be alike, or hide a part of the layer."""
    norms = [fused.input_norm, fused.attended_norm, fused.mlp_norm, fused.output_norm]
    own = [(norm, norm.norm) for norm in norms if norm is not None]
    for seed, (module, norm) in enumerate(own):
        module.norm = replace(norm, weight=verify.norm_weight(norm.weight, seed))
    try:
        yield
    finally:
        for module, norm in own:
            module.norm = norm


@torch.inference_mode()
def _agrees(layer: Any, fused: FusedDecoderLayer, is_exact: bool) -> bool:
    """Whether both compute the same for random rows; with `is_exact` the same bits."""
    weight = fused.input_norm.weight
    x = verify.rows(weight.shape[0], weight)[None]
    try:
        expected = layer(x, attention_mask=None, position_embeddings=None)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # other arguments: another kind of layer
        return False
    if not isinstance(expected, torch.Tensor):
        return False
    got = fused.one_by_one(x, attention_mask=None, position_embeddings=None)
    if is_exact:
        return torch.equal(expected, got)
    return comparison.has_same_roundings(comparison.per_channel(expected, got), expected.dtype)
