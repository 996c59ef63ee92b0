"""Where a model's attention meets ours: transformers calls one registered function, which finds the layer's site.

A site is bound to each attention module. It learns the layer's shape from its first call, before any KV exists.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from lorikeet.shard.attention import AttentionBackend, AttentionSpec, LayerKV
from lorikeet.shard.batch.inputs import StepInputs

NAME = "lorikeet"


class AttentionBinding(nn.Module):
    """One layer's place in the KV memory. A module without parameters, so that it is found by walking the model."""

    def __init__(self, backend: AttentionBackend, inputs: StepInputs) -> None:
        super().__init__()
        self.inputs = inputs
        self.backend = backend
        self.spec: AttentionSpec | None = None
        self.kv: LayerKV | None = None
        self.num_calls = 0

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
        num_tokens = self.inputs.kv_slots.shape[0]  # the row has a second token where a step has but one
        output = self.backend.attend(self.spec, self.kv, query[:num_tokens], key[:num_tokens], value[:num_tokens])
        return output.expand(query.shape[0], -1, -1)[None]


def describe(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> AttentionSpec:
    """The layer's fixed facts, from the arguments of a call. query: [T, heads, D], key and value: [T, kv_heads, D]."""
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
    )


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' attention modules call by name. Masks are ours: theirs must be None."""
    if attention_mask is not None:
        raise ValueError("the model insists on an attention mask of its own")
    site: AttentionBinding = module.lorikeet_target  # type: ignore[assignment]
    return site(query, key, value, options), None


AttentionInterface.register(NAME, paged_attention)
