"""Attention by operations of fixed shapes over the page table, as slow as it is plain: what can be captured on CPU."""

import numpy as np
import torch

from lorikeet.shard.attention.base import AttentionBackend, AttentionSpec, KvDestination, LayerKV, PagedKV
from lorikeet.shard.batch.inputs import StepInputs

CPU = torch.device("cpu")


class DenseAttention(AttentionBackend):
    """Every row looks at all pages of its segment's table row, at the most that a step may have."""

    def __init__(self, page_size: int, most_rows: int, max_kv_len: int, device: torch.device = CPU) -> None:
        self.page_size = page_size
        self._num_pages = -(-max_kv_len // page_size)
        # [most_rows, pages] pages of each row's segment; [most_rows] position of each row
        self._pages = torch.zeros(most_rows, self._num_pages, dtype=torch.long, device=device)
        self._positions = torch.zeros(most_rows, dtype=torch.long, device=device)
        self._inputs: StepInputs | None = None

    def prepare(self, inputs: StepInputs) -> None:
        self._inputs = inputs
        table = np.zeros((len(inputs.segments), self._num_pages), np.int64)
        table[:, : inputs.page_table.shape[1]] = inputs.page_table[:, : self._num_pages]
        rows = np.repeat(table, inputs.counts, axis=0)
        self._pages[: len(rows)] = torch.from_numpy(rows)
        positions = np.repeat(inputs.starts - inputs.first_rows, inputs.counts) + np.arange(len(rows))
        self._positions[: len(rows)] = torch.from_numpy(positions)

    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(kv, PagedKV) and self._inputs is not None
        for pool, x in ((kv.keys, key), (kv.values, value)):
            pool.flatten(0, 1).index_copy_(0, self._inputs.kv_slots, x)
        return self.read(spec, kv, query)

    def destination(self, kv: LayerKV) -> KvDestination:
        assert isinstance(kv, PagedKV) and self._inputs is not None
        return KvDestination(self._inputs.kv_slots, kv.keys, kv.values)

    def read(self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor) -> torch.Tensor:
        assert isinstance(kv, PagedKV)
        pools, num_rows = (kv.keys.flatten(0, 1), kv.values.flatten(0, 1)), query.shape[0]
        offsets = torch.arange(self.page_size, device=query.device)
        # [T, L] slots
        slots = (self._pages[:num_rows, :, None] * self.page_size + offsets).flatten(1)
        keys, values = (pool[slots].repeat_interleave(spec.group, 2).float() for pool in pools)
        scores = torch.einsum("thd,tlhd->thl", query.float(), keys) * spec.scaling
        hidden = torch.arange(slots.shape[1], device=query.device) > self._positions[:num_rows, None]
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        return torch.einsum("thl,tlhd->thd", scores.softmax(-1), values).to(query.dtype)
