"""A decoder layer as one call: norm, attention, residual, norm, gated MLP, residual, all of them fused parts already.

A fused twin is made for any layer with those four parts; it stays only if it computes bit for bit what the layer's own
code makes of the same parts. Where the attention cannot be called from compiled code the parts run one by one, which
is what the single call is held against. Bfloat16 on CPU only.
"""

import ctypes
from typing import Any

import torch
from torch import nn

from lorikeet.shard.batch.inputs import NO_ADAPTERS
from lorikeet.shard.model.fusion import verify as trial
from lorikeet.shard.model.fusion.cpu_attention import FusedAttention
from lorikeet.shard.model.fusion.cpu_parts import FusedMlp, FusedNorm
from lorikeet.shard.model.fusion.verify import Recorder
from lorikeet.shard.model.kernels import cpu as kernels
from lorikeet.shard.model.lora.targets import compiled


class FusedDecoderLayer(nn.Module):
    """`x + attention(norm x)`, then `x + mlp(norm x)`."""

    def __init__(self, input_norm: FusedNorm, attention: FusedAttention, post_norm: FusedNorm, mlp: FusedMlp) -> None:
        super().__init__()
        self.input_norm, self.attention, self.post_norm, self.mlp = input_norm, attention, post_norm, mlp
        self.targets = [
            site
            for joined in (attention.qkv_adapters, attention.out_adapters, *mlp.adapters)
            for site in joined.targets
        ]
        self.layer = kernels.DecoderLayer(
            width=attention.out.out_features,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            num_hidden=mlp.gate.out_features,
            input_norm=input_norm.weight.data_ptr(),
            post_norm=post_norm.weight.data_ptr(),
            qkv=attention.qkv.packed.data_ptr(),
            out=attention.out.packed.data_ptr(),
            gate=mlp.gate.packed.data_ptr(),
            up=mlp.up.packed.data_ptr(),
            down=mlp.down.packed.data_ptr(),
            qkv_bias=address(attention.qkv.bias),
            out_bias=address(attention.out.bias),
            input_epsilon=input_norm.epsilon,
            post_epsilon=post_norm.epsilon,
        )
        for index, site in enumerate(self.targets):
            self.layer.base_bias[index] = address(site.base_bias)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """hidden_states: [1, T, H]; position_embeddings: cos and sin, [1, T, D]. Returns [1, T, H]."""
        site = self.attention.lorikeet_target
        native = site.backend.native(site.kv) if site.kv is not None else None
        if native is None:
            return self.one_by_one(hidden_states, position_embeddings)
        adapters = self._adapters()
        if adapters is None:
            return self.one_by_one(hidden_states, position_embeddings)
        cos, sin = (angles[0].contiguous() for angles in position_embeddings)
        return kernels.decoder_layer(self.layer, native, adapters, hidden_states.contiguous(), cos, sin)

    def _adapters(self) -> kernels.AdapterStep | None:
        """What compiled code is to know of this step's adapters; None where it cannot reach them."""
        rows = self.targets[0].rows if self.targets else NO_ADAPTERS
        if not len(rows):
            return kernels.AdapterStep()
        function = compiled(torch.bfloat16)
        if function is None:
            return None
        for index, site in enumerate(self.targets):
            self.layer.adapters[index] = ctypes.addressof(site.table)
        return kernels.AdapterStep(function, rows.address, len(rows))

    def one_by_one(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The same by the parts' own calls."""
        attended, _ = self.attention(self.input_norm(hidden_states), position_embeddings)
        hidden_states = hidden_states + attended
        output: torch.Tensor = hidden_states + self.mlp(self.post_norm(hidden_states))
        return output


def fuse_layer(layer: Any) -> FusedDecoderLayer | None:
    """The fused twin of a decoder layer whose parts are fused already, or None where it has none."""
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    parts = [getattr(layer, name, None) for name in names]
    kinds = (FusedNorm, FusedAttention, FusedNorm, FusedMlp)
    if not all(isinstance(part, kind) for part, kind in zip(parts, kinds, strict=True)):
        return None
    twin = FusedDecoderLayer(*parts)  # type: ignore[arg-type]
    return twin if _agree(layer, twin) else None


def _agree(layer: Any, twin: FusedDecoderLayer) -> bool:
    """Whether both make the same of random rows, whatever the attention returns."""
    like = torch.empty(0, dtype=torch.bfloat16)
    x, position_embeddings = trial.tokens(twin.layer.width, twin.attention.head_dim, like)
    try:
        with trial.recording(twin.attention, Recorder()), torch.inference_mode():
            wanted = layer(x, attention_mask=None, position_embeddings=position_embeddings)
            got = twin.one_by_one(x, position_embeddings)
    except (RuntimeError, TypeError):  # it wants other arguments: another kind of layer
        return False
    return isinstance(wanted, torch.Tensor) and torch.equal(wanted, got)


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
