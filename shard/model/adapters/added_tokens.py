"""Tokens that adapters add: rows of the embedding and of the output head after those of the base.

Their weights are zeros, to which an adapter adds its own. Only the rows of an adapter that has such tokens can choose
them.
"""

from typing import Any

import torch
from torch import nn

from lorikeet.shard.batch.row_groups import AdapterRows


class AddedTokens:
    """Which of them the adapter in each slot has."""

    def __init__(self, first: int) -> None:
        """`first`: the lowest id of an added token."""
        self._first = first
        self._counts: dict[int, int] = {}
        # [slots + 1] int64 where kernels compute adapters: the same, and 0 for rows without an adapter
        self._table = torch.zeros(1, dtype=torch.long)

    def place(self, num_slots: int, device: torch.device) -> None:
        """Let a device know them too, whose steps may be captured before any adapter is in a slot."""
        self._table = torch.zeros(num_slots + 1, dtype=torch.long, device=device)

    def put(self, slot: int, count: int) -> None:
        """Let rows of `slot` choose the first `count` of them."""
        if count:
            self._counts[slot] = count
            if slot < len(self._table) - 1:
                self._table[slot].fill_(count)

    def clear(self, slot: int) -> None:
        """Empty `slot`."""
        if self._counts.pop(slot, 0) and slot < len(self._table) - 1:
            self._table[slot].zero_()

    def exclude(self, logits: torch.Tensor, rows: AdapterRows) -> None:
        """Set the logits of tokens that a row does not have to -inf. logits: [rows, V], in place."""
        if rows.groups is not None:
            added = logits[:, self._first :]
            # the last entry for rows of slot -1
            counts = self._table[rows.groups.row_slots[: len(logits)].long()]
            is_absent = torch.arange(added.shape[1], device=logits.device) >= counts[:, None]
            added.masked_fill_(is_absent, float("-inf"))
            return
        own = [
            logits[first : first + count, self._first : self._first + self._counts[slot]]
            for slot, first, count in rows.tasks.tolist()
            if slot in self._counts
        ]
        kept = [part.clone() for part in own]
        logits[:, self._first :] = float("-inf")
        for part, values in zip(own, kept, strict=True):
            part.copy_(values)


def extend(network: Any, text_config: Any, num_extra: int) -> None:
    """Give the embedding and the output head `num_extra` more rows of zeros. Raises ValueError where that is not
    possible.
    """
    size = int(text_config.vocab_size)
    ends = (network.get_input_embeddings(), network.get_output_embeddings())
    kinds = [type(end) for end in ends]
    if kinds != [nn.Embedding, nn.Linear] or any(len(end.weight) != size for end in ends):
        raise ValueError("its embedding and output head cannot get rows for tokens of adapters")
    network.resize_token_embeddings(size + num_extra, mean_resizing=False)
    text_config.vocab_size = size + num_extra
    with torch.no_grad():
        for end in (network.get_input_embeddings(), network.get_output_embeddings()):
            end.weight[size:] = 0
            if getattr(end, "bias", None) is not None:
                end.bias[size:] = 0
    network.requires_grad_(False)
