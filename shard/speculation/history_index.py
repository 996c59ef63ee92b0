"""An index of the outputs of earlier requests, by tenant and adapter: what followed the newest tokens of a text.

The match is the longest suffix of a request's tokens, of the lengths in LENGTHS, that an earlier output has; of several
the newest. This is a suffix index over outputs as in Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975), with one
index per tenant and adapter.

All tokens are in blocks of one array, and one hash table (history.c) finds where a sequence of tokens last ended. Both
are allocated at the start, so that no step has to copy them into a larger one. A collision overwrites the older entry,
and a match is compared token by token. Imports no torch.
"""

from collections import OrderedDict
from collections.abc import Sequence
from ctypes import Structure, byref, c_int64, c_uint32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lorikeet.shard.system.memory import mapped_zeros
from lorikeet.shard.system.native import library

LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24)
"""Tokens of the suffixes that are found."""
CONTEXT = LENGTHS[-1]
"""Last tokens of the prompt that precede an output in the index, so that its first tokens can be proposed."""
BLOCK = 1024
"""Tokens of a block, which belongs to one pair of tenant and adapter."""
MAX_DRAFTS = 64
MIN_BYTES = 1 << 20
ENTRIES_PER_TOKEN = 2 * len(LENGTHS)
"""Entries of the hash table per token: half of it is empty when all blocks are full."""
BYTES_PER_TOKEN = 4 * (1 + ENTRIES_PER_TOKEN)
SOURCE = Path(__file__).with_name("history.c")

Pair = tuple[str, str]
"""The tenant, and the digest of the adapter."""


class _Index(Structure):
    """`Index` of history.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "table", "owners", "lengths")),
        *((name, c_int64) for name in ("num_entries", "num_lengths", "block")),
    ]


@dataclass(eq=False, slots=True)
class _Text:
    """The outputs of one pair."""

    number: int
    """Never used again, so that entries of a pair that is gone do not match."""
    blocks: list[int] = field(default_factory=list)
    """Oldest first."""
    num_last: int = BLOCK
    """Tokens in the newest block."""


class HistoryIndex:
    """The index of one shard, of at most `max_bytes` bytes. The pair that was not used for longest goes first."""

    def __init__(self, max_bytes: int) -> None:
        """Raises CompilerMissing."""
        num_blocks = max(2, max(max_bytes, MIN_BYTES) // (BYTES_PER_TOKEN * BLOCK))
        # [num_blocks * BLOCK]
        self._tokens = np.frombuffer(mapped_zeros(num_blocks * BLOCK * 4), np.uint32)
        # [num_blocks * BLOCK * ENTRIES_PER_TOKEN]
        self._table = np.frombuffer(mapped_zeros(num_blocks * BLOCK * ENTRIES_PER_TOKEN * 4), np.uint32)
        # [num_blocks], 0 for none
        self._owners = np.zeros(num_blocks, np.int64)
        self._lengths = np.array(LENGTHS, np.int32)
        arrays = (self._tokens, self._table, self._owners, self._lengths)
        pointers = [each.ctypes.data for each in arrays]
        self._index = byref(_Index(*pointers, self._table.size, len(LENGTHS), BLOCK))
        self._suffix, self._drafts, self._length = (c_uint32 * CONTEXT)(), (c_uint32 * MAX_DRAFTS)(), c_int64()
        own = library(SOURCE)
        self._add, self._propose = own.history_add, own.history_propose
        self._add.restype = None
        self._add.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_int64)
        self._propose.restype = c_int64
        self._propose.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        self._free = list(range(num_blocks))
        self._texts: OrderedDict[Pair, _Text] = OrderedDict()
        self._num_texts = 0

    def __len__(self) -> int:
        """Pairs of tenant and adapter."""
        return len(self._texts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays. The operating system provides memory for the parts that were written."""
        return self._tokens.nbytes + self._table.nbytes + self._owners.nbytes

    def add(self, pair: Pair, token_ids: Sequence[int]) -> None:
        """Index an output with the CONTEXT tokens before it."""
        text = self._texts.get(pair)
        if text is None:
            self._num_texts += 1
            text = self._texts[pair] = _Text(self._num_texts)
        self._texts.move_to_end(pair)
        step = BLOCK - 1 - CONTEXT
        for first in range(0, len(token_ids), step):  # a part begins with the last tokens of the one before
            self._write(text, token_ids[max(0, first - CONTEXT) : first + step])

    def propose(self, pair: Pair, token_ids: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
        """At most `num_tokens` draft tokens after `token_ids`, and the length of the match that they continue."""
        if num_tokens <= 0:
            return [], 0
        text = self._texts.get(pair)
        if text is None:
            return [], 0
        self._texts.move_to_end(pair)
        suffix = token_ids[-CONTEXT:]
        self._suffix[: len(suffix)] = list(suffix)
        most = min(num_tokens, MAX_DRAFTS)
        arguments = (self._suffix, len(suffix), most, self._drafts, byref(self._length))
        num_drafts = self._propose(self._index, text.number, *arguments)
        return (self._drafts[:num_drafts], self._length.value) if num_drafts else ([], 0)

    def _write(self, text: _Text, token_ids: Sequence[int]) -> None:
        """Index at most BLOCK - 1 tokens."""
        num_tokens = len(token_ids)
        if text.num_last + num_tokens + 1 > BLOCK:
            block = self._take_block(text)
            text.blocks.append(block)
            self._owners[block] = text.number
            text.num_last = 0
        first = text.blocks[-1] * BLOCK + text.num_last
        self._add(self._index, text.number, (c_uint32 * num_tokens)(*token_ids), num_tokens, first)
        text.num_last += num_tokens + 1

    def _take_block(self, text: _Text) -> int:
        """A free block; where there is none, those of the pair that was not used for longest become free."""
        if not self._free:
            oldest = next(iter(self._texts))
            if self._texts[oldest] is text:  # it has all blocks
                return text.blocks.pop(0)
            self._free += self._texts.pop(oldest).blocks
        return self._free.pop()
