"""The newest output tokens of each pair of tenant and adapter with their hidden states, in memory of bounded size.

The memory is shared with the trainer's process and has no name, so that nothing of it reaches a disk (except as swap).
If it is full, the pair with the most rows gives up its oldest block. Imports no torch.
"""

import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lorikeet.proto.learning import BLOCK_ROWS, Pair, RowBlock, RowsLayout

Bits = npt.NDArray[np.uint16]
"""Of bfloat16."""


class Rings:
    """All rings of a shard."""

    def __init__(self, layout: RowsLayout) -> None:
        """Raises OSError if the system has no memory files."""
        self.layout = layout
        self.fd = os.memfd_create("lorikeet-learning", os.MFD_CLOEXEC)
        """Descriptor of the memory."""
        os.ftruncate(self.fd, layout.num_bytes)
        self._memory = mmap.mmap(self.fd, layout.num_bytes)
        self._versions, self._rows = layout.arrays(memoryview(self._memory))
        self._free = list(reversed(range(layout.num_blocks)))
        self._rings: OrderedDict[Pair, deque[RowBlock]] = OrderedDict()
        """Blocks of each pair, oldest first; the least recently used pair first."""
        self._version = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that have rows."""
        return (self.layout.num_blocks - len(self._free)) * (self.layout.num_bytes // self.layout.num_blocks)

    def num_rows(self, pair: Pair) -> int:
        """Rows of a pair that are kept."""
        return _num_rows(self._rings.get(pair))

    def append(
        self, pair: Pair, texts: Sequence[int], token_ids: Sequence[int], hidden: npt.NDArray[np.uint16]
    ) -> None:
        """Add rows. texts, token_ids: [n]; hidden: [n, H] bits of bfloat16."""
        ring = self._rings.setdefault(pair, deque())
        self._rings.move_to_end(pair)
        first = 0
        while first < len(token_ids):
            if not ring or ring[-1].num_rows == BLOCK_ROWS:
                ring.append(self._take_block())
            number, version, num_rows = ring[-1]
            end = min(len(token_ids), first + BLOCK_ROWS - num_rows)
            start = number * BLOCK_ROWS + num_rows
            rows = self._rows[start : start + end - first]
            rows["text"], rows["token_id"], rows["hidden"] = texts[first:end], token_ids[first:end], hidden[first:end]
            ring[-1] = RowBlock(number, version, num_rows + end - first)
            first = end

    def blocks(self, pair: Pair) -> tuple[RowBlock, ...]:
        """The blocks of a pair, oldest first."""
        return tuple(self._rings.get(pair, ()))

    def clear(self) -> None:
        """Delete all rows, from the memory too."""
        self._rings.clear()
        self._free = list(reversed(range(self.layout.num_blocks)))
        self._memory.madvise(mmap.MADV_REMOVE)
        self._version += 1
        self._versions[:] = self._version

    def _take_block(self) -> RowBlock:
        if self._free:
            number = self._free.pop()
        else:
            # the least recently used of those with the most rows; the newest pair may have none, and needs the block
            pair, ring = max(self._rings.items(), key=lambda item: _num_rows(item[1]))
            number = ring.popleft().number
            if not ring and pair != next(reversed(self._rings)):
                del self._rings[pair]
        self._version += 1
        self._versions[number] = self._version
        return RowBlock(number, self._version, 0)


def _num_rows(ring: Sequence[RowBlock] | None) -> int:
    return (len(ring) - 1) * BLOCK_ROWS + ring[-1].num_rows if ring else 0
