"""Attention written out, one segment at a time, on any device: the specification that other backends are tested by."""

import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, LayerKV
from lorikeet.shard.attention.quantized_kv import dequantize, quantize
from lorikeet.shard.batch.inputs import StepInputs


class ReferenceKV(LayerKV):
    """One row per token slot."""

    def __init__(
        self, spec: AttentionSpec, num_slots: int, dtype: torch.dtype, device: torch.device, has_scales: bool = False
    ) -> None:
        # [N * P, num_kv_heads, key_dim]
        self.keys = torch.zeros(num_slots, spec.num_kv_heads, spec.key_dim, dtype=dtype, device=device)
        # [N * P, num_kv_heads, value_dim]
        self.values = torch.zeros(num_slots, spec.num_kv_heads, spec.value_dim, dtype=dtype, device=device)
        # [N * P, num_kv_heads] float32 that a token's head is multiplied by, where it is kept in eight bits
        self.key_scales = torch.ones(self.keys.shape[:2], device=device) if has_scales else None
        self.value_scales = torch.ones(self.keys.shape[:2], device=device) if has_scales else None


class ReferenceAttention(AttentionBackend):
    """Gathers each request's pages and computes softmax(Q Kᵀ) V in float32."""

    def __init__(self, page_size: int = 16, kv_dtype: torch.dtype | None = None) -> None:
        self.page_size = page_size
        self.kv_dtype = kv_dtype
        self._inputs: StepInputs | None = None

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> ReferenceKV:
        num_slots = num_pages * self.page_size
        return ReferenceKV(spec, num_slots, self.kv_dtype or dtype, device, has_scales=self.kv_dtype is not None)

    def prepare(self, inputs: StepInputs) -> None:
        self._inputs = inputs

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert self._inputs is not None and isinstance(kv, ReferenceKV), "prepare() comes before attend()"
        written = self._inputs.kv_slots
        _put(kv.keys, kv.key_scales, written, key)
        _put(kv.values, kv.value_scales, written, value)
        # [T, num_heads, value_dim]
        output = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        first = 0
        for segment in self._inputs.segments:
            rows = slice(first, first + segment.num_tokens)
            first += segment.num_tokens
            slots = self._slots(segment.page_ids, segment.kv_len, query.device)
            output[rows] = attend_one(
                spec, query[rows], _get(kv.keys, kv.key_scales, slots), _get(kv.values, kv.value_scales, slots),
                segment.start,
            )  # fmt: skip
        return output

    def _slots(self, page_ids: object, kv_len: int, device: torch.device) -> torch.Tensor:
        """[kv_len] slot of each position."""
        positions = torch.arange(kv_len, device=device)
        pages = torch.tensor(list(page_ids), device=device)  # type: ignore[call-overload]
        slots: torch.Tensor = pages[positions // self.page_size] * self.page_size + positions % self.page_size
        return slots


def _put(pool: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, x: torch.Tensor) -> None:
    """pool: [N * P, heads, dim], scales: [N * P, heads], slots: [T], x: [T, heads, dim]."""
    if scales is None:
        pool[slots] = x
    else:
        kept, scales[slots] = quantize(x)
        pool.view(torch.uint8)[slots] = kept.view(torch.uint8)  # torch moves no elements of eight bits on every device


def _get(pool: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    """[L, heads, dim] of slots [L]."""
    if scales is None:
        return pool[slots]
    return dequantize(pool.view(torch.uint8)[slots].view(pool.dtype), scales[slots])


def attend_one(
    spec: AttentionSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
) -> torch.Tensor:
    """One request. query: [Q, heads, key_dim] at positions start…; keys, values: [L, kv_heads, dim] at 0…."""
    keys = keys.repeat_interleave(spec.group, dim=1)
    values = values.repeat_interleave(spec.group, dim=1)
    # [heads, Q, L]
    scores = torch.einsum("qhd,lhd->hql", query.float(), keys.float()) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    # [Q, L] how far back each position lies
    distance = (torch.arange(query.shape[0], device=query.device) + start)[:, None] - torch.arange(
        keys.shape[0], device=query.device
    )
    if spec.alibi_slopes is not None:
        scores = scores - spec.alibi_slopes.float()[:, None, None] * distance
    hidden = distance < 0
    if spec.window is not None:
        hidden = hidden | (distance >= spec.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.float()[:, None, None].expand(-1, query.shape[0], 1)
        probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return torch.einsum("hql,lhd->qhd", probabilities, values.float()).to(query.dtype)
