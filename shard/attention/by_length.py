"""Attention on CUDA by two kernels: the paged kernel for short segments, torch's FlashAttention for long prompts.

The paged kernel reads the keys of a group of query heads once and divides long contexts among programs, which matters
where few rows see many keys: decoding and verification. FlashAttention multiplies faster, which matters in long
prompts. Which kernel computes a row depends on the query length and the context length of its own request in the step,
by the device's table (kernel_limits.py), never on other requests.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, KvDestination, LayerKV, PagedKV
from lorikeet.shard.attention.kernel_limits import BUILT_IN, KernelLimits
from lorikeet.shard.attention.paged import PagedAttention, destination, store
from lorikeet.shard.attention.varlen import VarlenAttention
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.batch.transfer import to_device


class ByLengthAttention(AttentionBackend):
    """The layers that both kernels support."""

    can_capture = can_add_accepted = True

    def __init__(self, paged: PagedAttention, flash: VarlenAttention, table: KernelLimits = BUILT_IN) -> None:
        """Both have pages of one size, and store K and V alike."""
        self.page_size = flash.page_size
        self._paged, self._flash, self._table = paged, flash, table
        self._has_paged = True
        # [rows of FlashAttention's segments] indices into T; None where it has no segment
        self._flash_rows: torch.Tensor | None = None
        # [T] page id * P + offset in page
        self._kv_slots = torch.empty(0, dtype=torch.long)

    @property
    def parts(self) -> Sequence[AttentionBackend]:
        """Each kernel is verified by itself: a table may send all segments of the trial steps to one of them."""
        return self._paged, self._flash

    def unsupported_reason(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
        reason = self._flash.unsupported_reason(spec, dtype, device)
        return reason or self._paged.unsupported_reason(spec, dtype, device)

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        self._flash.reserve(spec, dtype, device)
        return self._paged.allocate(spec, num_pages, dtype, device)

    def num_numbers(self, bounds: Bounds) -> int:
        return self._paged.num_numbers(bounds)

    def prepare(self, inputs: StepInputs) -> None:
        """Raises RuntimeError for a padded step of so many rows that a segment might be FlashAttention's: a captured
        step launches the paged kernel alone.
        """
        self._kv_slots = inputs.kv_slots
        most = self._table.most_captured
        if inputs.bounds is not None and inputs.bounds.num_rows > most:
            raise RuntimeError(
                f"a step is padded to {inputs.bounds.num_rows} rows, but only up to {most} rows are certain to be "
                "computed by the paged kernel alone"
            )
        contexts = inputs.starts + inputs.counts
        is_paged = self._table.is_paged(inputs.counts, contexts) | (contexts > self._flash.most_context)
        self._has_paged = bool(is_paged.any())
        self._flash_rows = None
        if is_paged.all():
            self._paged.prepare(inputs)
            return
        if self._has_paged:
            self._paged.prepare(_part(inputs, is_paged))
        part = _part(inputs, ~is_paged)
        spans = zip(part.first_rows.tolist(), part.counts.tolist(), strict=True)
        rows = np.concatenate([np.arange(first, first + count) for first, count in spans])
        self._flash_rows = to_device(torch.from_numpy(rows), inputs.device)
        part.first_rows = (np.cumsum(part.counts) - part.counts).astype(np.int32)
        self._flash.prepare(part)

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(kv, PagedKV)
        store(kv, self._kv_slots, key, value)
        return self.read(spec, kv, query)

    def destination(self, kv: LayerKV) -> KvDestination | None:
        return destination(kv, self._kv_slots)

    def read(self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor) -> torch.Tensor:
        assert isinstance(kv, PagedKV)
        if self._flash_rows is None:
            return self._paged.read(spec, kv, query)
        if not self._has_paged:
            return self._flash.read(spec, kv, query)
        output = self._paged.read(spec, kv, query)
        of_flash = self._flash.read(spec, kv, query.index_select(0, self._flash_rows))
        return output.index_copy_(0, self._flash_rows, of_flash)


def _part(inputs: StepInputs, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> StepInputs:
    """chosen: [R]. The host's arrays of these segments only; rows are those of the whole step."""
    part = copy.copy(inputs)
    part.starts, part.counts = inputs.starts[chosen], inputs.counts[chosen]
    part.first_rows, part.page_table = inputs.first_rows[chosen], inputs.page_table[chosen]
    part.num_uncertain, part.device_rows = inputs.num_uncertain[chosen], inputs.device_rows[chosen]
    return part
