"""The parts that a module of transformers seems to have, found by their usual names.

A heuristic: verify.py checks whether a fused module of these parts computes the same.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from lorikeet.shard.model.quantization.integers import IntegerLinear
from lorikeet.shard.model.quantization.layers import is_quantized

Linear = nn.Linear | IntegerLinear


class NormForm(NamedTuple):
    """How a norm applies its weight."""

    offset: float
    """Added to the weight."""
    rounds: bool
    """Whether the normalised values are rounded before they are multiplied by the weight too."""


FORMS = (NormForm(0.0, True), NormForm(0.0, False), NormForm(1.0, False))
"""Llama's, OLMo's, Gemma's."""


@dataclass(frozen=True)
class Norm:
    """A possible RMS norm over the last axis."""

    # [H]
    weight: torch.Tensor
    epsilon: float
    form: NormForm = FORMS[0]


@dataclass(frozen=True)
class MlpParts:
    """Parts of a possible gated MLP."""

    ups: tuple[Linear, ...]
    """Gate and up, or one module whose output is both, side by side."""
    down: nn.Module
    has_plain_output: bool
    """Whether the last product is a linear layer whose weight no other module holds."""
    activation: Callable[[torch.Tensor], torch.Tensor] | None


@dataclass(frozen=True)
class AttentionParts:
    """Parts of a possible attention block with rotary positions."""

    qkv: tuple[Linear, ...]
    """q, k and v, or one module whose output is all of them, side by side."""
    out: nn.Module
    has_plain_output: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norms: tuple[nn.Module, nn.Module] | None
    """Norms of each head of q and of k."""


def norm_of(module: nn.Module) -> Norm | None:
    """None for other modules: an RMS norm has an epsilon and no bias."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(epsilon, float) or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    return None if getattr(module, "bias", None) is not None else Norm(weight, epsilon)


def mlp_parts(module: nn.Module, shared: set[int]) -> MlpParts | None:
    """`shared`: ids of weights that other modules hold too, which cannot be fused."""
    down = getattr(module, "down_proj", None)
    ups = _plain(module, ("gate_proj", "up_proj"), shared) or _plain(module, ("gate_up_proj",), shared)
    if not isinstance(down, nn.Module) or ups is None:
        return None
    activation = next(
        (function for name in ("act_fn", "activation_fn") if (function := getattr(module, name, None))), None
    )
    return MlpParts(ups, down, is_plain(down, shared), activation)


def attention_parts(block: Any, shared: set[int]) -> AttentionParts | None:
    """`shared`: as in `mlp_parts`."""
    out, head_dim = getattr(block, "o_proj", None), getattr(block, "head_dim", None)
    qkv = _plain(block, ("q_proj", "k_proj", "v_proj"), shared) or _plain(block, ("qkv_proj",), shared)
    if qkv is None or not isinstance(out, nn.Module) or not isinstance(head_dim, int):
        return None
    takes_angles = "position_embeddings" in inspect.signature(block.forward).parameters  # the method may be decorated
    if not takes_angles or not isinstance(getattr(block, "layer_idx", None), int):
        return None
    if len(qkv) == 3:
        num_heads, num_kv_heads = (part.out_features // head_dim for part in qkv[:2])
    else:
        num_heads = getattr(getattr(block, "config", None), "num_attention_heads", 0)
        num_kv_heads = (qkv[0].out_features // head_dim - num_heads) // 2
    of_query, of_key = getattr(block, "q_norm", None), getattr(block, "k_norm", None)
    norms = (of_query, of_key) if isinstance(of_query, nn.Module) and isinstance(of_key, nn.Module) else None
    return AttentionParts(qkv, out, is_plain(out, shared), num_heads, num_kv_heads, head_dim, norms)


def is_plain(part: Any, shared: set[int]) -> TypeGuard[Linear]:
    """Whether it is a linear layer whose weight is held by no other module, and plain or rounded when it was loaded."""
    if isinstance(part, IntegerLinear):
        return part.rounds_activations or part.is_on_device
    return isinstance(part, nn.Linear) and not is_quantized(part) and id(part.weight) not in shared


def _is_completed(part: nn.Module) -> bool:
    """Whether ranks hold parts of it and each needs the whole output, or takes its part of the input, which hooks of
    the plain module see to.
    """
    partition = getattr(part, "lorikeet_partition", None)
    return partition is not None and (partition.is_gathered or partition.is_split)


def joined_bias(parts: Sequence[Linear]) -> torch.Tensor | None:
    """[out of all parts], zeros where one has none; None where none has one."""
    if all(part.bias is None for part in parts):
        return None
    return torch.cat(
        [
            torch.zeros_like(sample(part, part.out_features)) if part.bias is None else part.bias.detach()
            for part in parts
        ]
    )


def sample(part: Linear, size: int = 0) -> torch.Tensor:
    """[size] any values with the dtype and the device of a layer's activations."""
    like = part.sample if isinstance(part, IntegerLinear) else part.weight
    return like.new_empty(size)


def _plain(module: nn.Module, names: tuple[str, ...], shared: set[int]) -> tuple[Linear, ...] | None:
    """The linear layers of these names, if they are all there."""
    linears: list[Linear] = []
    for name in names:
        part = getattr(module, name, None)
        if not is_plain(part, shared) or _is_completed(part):
            return None
        linears.append(part)
    return tuple(linears)
