"""Binds attention modules of transformers to our backend: they call one registered function, which finds the layer's
binding.

Each attention module has a binding, which records the layer's shape at its first call, before any KV exists. Bloom,
falcon and mpt, whose code in transformers calls no attention function, get attention classes of ours here. Alibi
becomes a slope per head: softmax does not change when a row's scores change by the same amount, so slope times distance
equals slope times position.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from lorikeet.shard.attention import AttentionBackend, AttentionSpec, LayerKV
from lorikeet.shard.attention.base import KvDestination
from lorikeet.shard.batch.inputs import StepInputs

NAME = "lorikeet"


class AttentionBinding(nn.Module):
    """One layer's attention and KV. A module without parameters, so that walking the model finds it."""

    def __init__(self, backend: AttentionBackend, inputs: StepInputs) -> None:
        super().__init__()
        self.inputs = inputs
        self.backend = backend
        self.spec: AttentionSpec | None = None
        self.kv: LayerKV | None = None
        self.num_calls = 0
        # by slot, [tokens, kv_heads, D] float32 each: keys and values of virtual tokens
        self.prefixes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """query: [1, heads, T, D], key and value: [1, kv_heads, T, D]. Returns [1, T, heads, D]."""
        self.num_calls += 1
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if self.spec is None:
            self.spec = describe(query, key, value, options)
        if self.kv is None:
            return value.new_zeros(1, query.shape[0], self.spec.num_heads, self.spec.value_dim)
        for slot, rows, places in self.inputs.virtual_rows if self.prefixes else ():
            if slot in self.prefixes:
                keys, values = self.prefixes[slot]
                key[rows], value[rows] = keys[places].to(key.dtype), values[places].to(value.dtype)
        num_tokens = self.inputs.kv_slots.shape[0]  # a step of one token is computed as two
        output = self.backend.attend(self.spec, self.kv, query[:num_tokens], key[:num_tokens], value[:num_tokens])
        return output.expand(query.shape[0], -1, -1)[None]

    def destination(self) -> KvDestination | None:
        """Where a kernel may write the step's K and V, to call `read` next; None where it may not."""
        if self.kv is None or (self.prefixes and self.inputs.virtual_rows):
            return None
        return self.backend.destination(self.kv)

    def read(self, query: torch.Tensor) -> torch.Tensor:
        """Compute attention as `forward` does, with K and V already at their destination."""
        assert self.spec is not None and self.kv is not None
        self.num_calls += 1
        return self.backend.read(self.spec, self.kv, query[0].transpose(0, 1))[None]


def is_attention(module: nn.Module) -> bool:
    """Whether a module of transformers calls the attention function."""
    return isinstance(getattr(module, "layer_idx", None), int) or isinstance(getattr(module, "is_causal", None), bool)


def describe(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> AttentionSpec:
    """The layer's properties, from the arguments of a call. query: [T, heads, D], key and value: [T, kv_heads, D]."""
    scaling = options.get("scaling")
    return AttentionSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_dim=query.shape[2],
        value_dim=value.shape[2],
        scaling=query.shape[2] ** -0.5 if scaling is None else float(scaling),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        alibi_slopes=options.get("alibi_slopes"),
        is_causal=bool(options.get("is_causal", True)),
    )


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' attention modules look up. Masks are ours: theirs must be None."""
    if attention_mask is not None:
        raise ValueError("the model needs an attention mask that it makes itself")
    binding: AttentionBinding = module.lorikeet_binding  # type: ignore[assignment]
    if options.get("is_causal") is None:  # as transformers' other attention functions
        options["is_causal"] = getattr(module, "is_causal", True)
    return binding(query, key, value, options), None


AttentionInterface.register(NAME, paged_attention)

# falcon looks its attention class up by the attention function's name
modeling_falcon.FALCON_ATTENTION_CLASSES[NAME] = modeling_falcon.FalconAttention


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x: [1, T, heads, D]. Returns [1, heads, T, D]."""
    return x.transpose(1, 2)


class BloomAttention(nn.Module):
    """In place of transformers' BloomAttention."""

    def __init__(self, old: Any, binding: AttentionBinding) -> None:
        super().__init__()
        self.query_key_value, self.dense = old.query_key_value, old.dense
        self.num_heads, self.head_dim = old.num_heads, old.head_dim
        self.lorikeet_binding = binding
        slopes = modeling_bloom.build_alibi_tensor(torch.ones(1, 2), old.num_heads, torch.float32)[:, 0, 1]
        self.options = {"scaling": old.inv_norm_factor, "alibi_slopes": slopes}

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """hidden_states, residual: [1, T, H]."""
        fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
        output = self.lorikeet_binding(*(_heads(fused[..., i, :]) for i in range(3)), self.options)
        return self.dense(output.flatten(2)) + residual, None


class FalconAttention(nn.Module):
    """In place of transformers' FalconAttention: grouped, multi-query or one K and V per head; rotary or alibi."""

    def __init__(self, old: Any, binding: AttentionBinding) -> None:
        super().__init__()
        self.query_key_value, self.dense = old.query_key_value, old.dense
        self.head_dim, self.num_kv_heads = old.head_dim, old.num_kv_heads
        self.group = old.num_heads // old.num_kv_heads
        self.lorikeet_binding = binding
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
        return self.dense(self.lorikeet_binding(query, key, value, self.options).flatten(2)), None


class MptAttention(nn.Module):
    """In place of transformers' MptAttention."""

    def __init__(self, old: Any, binding: AttentionBinding) -> None:
        super().__init__()
        self.Wqkv, self.out_proj = old.Wqkv, old.out_proj
        self.num_heads, self.head_dim, self.clip = old.n_heads, old.head_dim, old.clip_qkv
        self.lorikeet_binding = binding
        slopes = -modeling_mpt.build_mpt_alibi_tensor(old.n_heads, 2)[:, 0, 0]
        self.options = {"scaling": old.softmax_scale, "alibi_slopes": slopes}

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """hidden_states: [1, T, H]."""
        fused = self.Wqkv(hidden_states)
        if self.clip:
            fused = fused.clamp(min=-self.clip, max=self.clip)
        fused = fused.unflatten(-1, (3, self.num_heads, self.head_dim))
        output = self.lorikeet_binding(*(_heads(fused[..., i, :, :]) for i in range(3)), self.options)
        return self.out_proj(output.flatten(2)), None


class MptTrunk(nn.Module):
    """In place of transformers' MptModel, which always makes a mask."""

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
    """Replace attention classes of transformers that do not use its attention interface."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            replacement = REPLACEMENTS.get(type(child))
            if replacement is not None:
                setattr(parent, name, replacement(child, AttentionBinding(backend, inputs)))
            elif isinstance(child, modeling_mpt.MptModel):
                setattr(parent, name, MptTrunk(child))
