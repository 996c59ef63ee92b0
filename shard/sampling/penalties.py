"""Logit processors: logit bias, watermark and penalties, and the token counts that penalties need."""

from dataclasses import dataclass

import torch

from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.sampling.noise import Purpose, hash_bits, row_keys

PROMPT = 1 << 30
_WATERMARK_KEY = 15485863


@dataclass(frozen=True)
class Bias:
    """Logit bias of some rows of a chunk, B entries in all; no (row, token) twice."""

    # [B] row of the chunk of each entry
    rows: torch.Tensor
    # [B] token of each entry
    ids: torch.Tensor
    # [B] float32, added to the logit
    values: torch.Tensor

    def apply(self, scores: torch.Tensor) -> None:
        """scores: [S, V], changed in place."""
        scores.index_put_((self.rows, self.ids), scores[self.rows, self.ids] + self.values)


@dataclass(frozen=True)
class Penalties:
    """Repetition, frequency and presence penalties of n rows of a chunk."""

    # [n] rows of the chunk
    rows: torch.Tensor
    # [n] rows of the counts
    slots: torch.Tensor
    # [n, 1] factor for tokens of prompt and output, 1 is neutral
    repetition: torch.Tensor
    # [n, 1] subtracted per occurrence in the output
    frequency: torch.Tensor
    # [n, 1] subtracted once for tokens of the output
    presence: torch.Tensor

    def apply(self, scores: torch.Tensor, counts: "TokenCounts") -> None:
        """scores: [S, V], changed in place."""
        known = counts.table.index_select(0, self.slots)
        penalised = scores.index_select(0, self.rows)
        factor = torch.where(penalised < 0, penalised * self.repetition, penalised / self.repetition)
        penalised = torch.where(known != 0, factor, penalised)
        known &= PROMPT - 1
        penalised -= known * self.frequency
        penalised -= known.clamp_(max=1) * self.presence
        scores.index_copy_(0, self.rows, penalised)


class TokenCounts:
    """How often each token occurs in the output of a request, and whether it is in its prompt; grown as needed."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # [slots, V] int32: occurrences in the output, plus PROMPT for tokens of the prompt
        self.table = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        # [1] int64 address of the table, at an address that stays when the table grows
        self.address = torch.zeros(1, dtype=torch.long, device=device)
        self._free: list[int] = []

    def take(self, token_ids: list[int], num_prompt: int) -> int:
        """A slot that holds the counts of the first `num_prompt` tokens as prompt and of the others as output."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        known = torch.tensor(token_ids, dtype=torch.long)
        counts = torch.bincount(known[num_prompt:], minlength=self._vocab_size).to(torch.int32)
        counts[known[:num_prompt]] |= PROMPT
        self.table[slot].copy_(to_device(counts, self._device))
        return slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def append(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """slots, token_ids: [n]. One more output token for each slot."""
        self.add(slots, token_ids, torch.ones_like(token_ids, dtype=torch.int32))

    def add(self, slots: torch.Tensor, token_ids: torch.Tensor, changes: torch.Tensor) -> None:
        """slots, token_ids: [n]; changes: [n] int32, added to the numbers of output tokens."""
        self.table.view(-1).index_add_(0, slots * self._vocab_size + token_ids, changes)

    def _grow(self) -> None:
        num_slots = self.table.shape[0]
        added = torch.zeros(max(num_slots, 4), self._vocab_size, dtype=torch.int32, device=self._device)
        self.table = torch.cat([self.table, added])
        self.address.fill_(self.table.data_ptr())
        self._free.extend(range(num_slots, self.table.shape[0]))


@dataclass(frozen=True)
class Watermark:
    """A part `gamma` of the vocabulary, chosen by the token before, is green and gains `delta`."""

    # [V] int64 by token id
    words: torch.Tensor
    gamma: float
    delta: float

    def green(self, previous_ids: torch.Tensor) -> torch.Tensor:
        """previous_ids: [S]. Returns [S, V] bool: the green list after each of these tokens."""
        keys = row_keys(torch.full_like(previous_ids, _WATERMARK_KEY), previous_ids, Purpose.GREEN_LIST)
        return (hash_bits(self.words, keys) >> 32) < round((self.gamma - 0.5) * 2**32)

    def apply(self, scores: torch.Tensor, rows: torch.Tensor, previous_ids: torch.Tensor) -> None:
        """scores: [S, V], changed in place; rows: [n] of them that are marked; previous_ids: [n]."""
        marked = scores.index_select(0, rows)
        marked += self.green(previous_ids) * self.delta
        scores.index_copy_(0, rows, marked)
