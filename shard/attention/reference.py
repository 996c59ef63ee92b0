"""Reference attention, one segment at a time, on any device: the specification that other backends are tested against.

Also specifies K and V in eight bits: float8_e4m3fn with one float32 scale per token and K and V head. A scale depends
on its token alone, so the stored values do not depend on the batch.
"""

import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, LayerKV, PagedKV
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.system import gpu

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., dim]. Returns it in eight bits, and the factor of each row, [...] float32."""
    x = x.float()
    largest = x.abs().amax(-1)
    scale = torch.where(largest > 0, gpu.divide(largest, MAX_FP8), 1.0)
    return (x / scale[..., None]).to(FP8), scale


def dequantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x: [..., dim] in eight bits, scale: [...]. Returns float32."""
    return x.float() * scale[..., None]


class ReferenceAttention(AttentionBackend):
    """Gathers each request's pages and computes softmax(Q Kᵀ) V in float32."""

    def __init__(self, page_size: int = 16, kv_dtype: torch.dtype | None = None) -> None:
        self.page_size = page_size
        self.kv_dtype = kv_dtype
        self._inputs: StepInputs | None = None

    def prepare(self, inputs: StepInputs) -> None:
        self._inputs = inputs

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert self._inputs is not None and isinstance(kv, PagedKV), "prepare() comes before attend()"
        written = self._inputs.kv_slots
        _put(kv.keys, kv.key_scales, written, key)
        _put(kv.values, kv.value_scales, written, value)
        # [T, num_heads, value_dim]
        output = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        first = 0
        for segment in self._inputs.segments:
            rows = slice(first, first + segment.num_tokens)
            first += segment.num_tokens
            slots = self._slots(segment, query.device)
            keys, values = _get(kv.keys, kv.key_scales, slots), _get(kv.values, kv.value_scales, slots)
            output[rows] = attend_one(spec, query[rows], keys, values, segment.start)
        return output

    def _slots(self, segment: Segment, device: torch.device) -> torch.Tensor:
        """[kv_len] slot of each position: page id * P + offset in page."""
        positions = torch.arange(segment.kv_len, device=device)
        pages = torch.tensor(list(segment.page_ids), device=device)
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size


def _put(pool: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, x: torch.Tensor) -> None:
    """pool: [N, P, heads, dim], scales: [N, P, heads], slots: [T], x: [T, heads, dim]."""
    if scales is not None:
        x, scales.flatten(0, 1)[slots] = quantize(x)
        x, pool = x.view(torch.uint8), pool.view(torch.uint8)  # not every device copies elements of eight-bit floats
    pool.flatten(0, 1)[slots] = x


def _get(pool: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    """[L, heads, dim] of slots [L]."""
    if scales is None:
        return pool.flatten(0, 1)[slots]
    rows = pool.view(torch.uint8).flatten(0, 1)[slots].view(pool.dtype)
    return dequantize(rows, scales.flatten(0, 1)[slots])


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
    # [Q, L] distance of each position from the query's
    positions = torch.arange(query.shape[0], device=query.device) + start
    distance = positions[:, None] - torch.arange(keys.shape[0], device=query.device)
    if spec.alibi_slopes is not None:
        scores = scores - spec.alibi_slopes.float()[:, None, None] * distance
    hidden = distance < 0 if spec.is_causal else torch.zeros_like(distance, dtype=torch.bool)
    if spec.window is not None:
        hidden = hidden | (distance.abs() >= spec.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.float()[:, None, None].expand(-1, query.shape[0], 1)
        probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return torch.einsum("hql,lhd->qhd", probabilities, values.float()).to(query.dtype)
