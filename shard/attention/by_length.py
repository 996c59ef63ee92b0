"""Attention on CUDA by two kernels: ours for rows of short segments, torch's FlashAttention for long prompts.

Ours reads the keys of a group of query heads once and divides long contexts among programs, which matters where few
rows see many keys: decoding and verification. FlashAttention multiplies faster, which matters in long prompts. Which
kernel computes a row depends on the number of the step's tokens of its own request, never on other requests.
"""

import copy

import numpy as np
import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, Destination, LayerKV, PagedKV
from lorikeet.shard.attention.paged import PagedAttention, destination, store
from lorikeet.shard.attention.varlen import VarlenAttention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.batch.transfer import to_device

MOST_SHORT = 512
"""Tokens of a short segment. A padded step has no more rows, so that it launches our kernel alone."""


class ByLengthAttention(AttentionBackend):
    """The layers that both kernels support."""

    can_capture = True

    def __init__(self, short: PagedAttention, long: VarlenAttention, most_short: int = MOST_SHORT) -> None:
        """Both have pages of one size, and store K and V alike."""
        self.page_size = long.page_size
        self._short, self._long, self._most_short = short, long, most_short
        self._has_short = True
        # [rows of long segments] indices into T; None where no segment is long
        self._long_rows: torch.Tensor | None = None
        # [T] page id * P + offset in page
        self._kv_slots = torch.empty(0, dtype=torch.long)

    def unsupported_reason(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
        reason = self._long.unsupported_reason(spec, dtype, device)
        return reason or self._short.unsupported_reason(spec, dtype, device)

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        return self._short.allocate(spec, num_pages, dtype, device)

    def num_numbers(self, bounds: Bounds) -> int:
        return self._short.num_numbers(bounds)

    def prepare(self, inputs: StepInputs) -> None:
        """Raises RuntimeError for a padded step of more rows than a short segment may have."""
        self._kv_slots = inputs.kv_slots
        is_long = inputs.counts > self._most_short
        if inputs.bounds is not None and inputs.bounds.num_rows > self._most_short:
            raise RuntimeError(f"steps of more than {self._most_short} rows are not padded with this attention")
        self._has_short = not is_long.all()
        self._long_rows = None
        if not is_long.any():
            self._short.prepare(inputs)
            return
        if self._has_short:
            self._short.prepare(_part(inputs, ~is_long))
        part = _part(inputs, is_long)
        spans = zip(part.first_rows.tolist(), part.counts.tolist(), strict=True)
        rows = np.concatenate([np.arange(first, first + count) for first, count in spans])
        self._long_rows = to_device(torch.from_numpy(rows), inputs.device)
        part.first_rows = (np.cumsum(part.counts) - part.counts).astype(np.int32)
        self._long.prepare(part)

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(kv, PagedKV)
        store(kv, self._kv_slots, key, value)
        return self.read(spec, kv, query)

    def destination(self, kv: LayerKV) -> Destination | None:
        return destination(kv, self._kv_slots)

    def read(self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor) -> torch.Tensor:
        assert isinstance(kv, PagedKV)
        if self._long_rows is None:
            return self._short.read(spec, kv, query)
        if not self._has_short:
            return self._long.read(spec, kv, query)
        output = self._short.read(spec, kv, query)
        of_long = self._long.read(spec, kv, query.index_select(0, self._long_rows))
        return output.index_copy_(0, self._long_rows, of_long)


def _part(inputs: StepInputs, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> StepInputs:
    """chosen: [R]. The host's arrays of these segments only; rows are those of the whole step."""
    part = copy.copy(inputs)
    part.starts, part.counts = inputs.starts[chosen], inputs.counts[chosen]
    part.first_rows, part.page_table = inputs.first_rows[chosen], inputs.page_table[chosen]
    return part
