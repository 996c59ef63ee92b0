"""The newest output tokens of each pair of tenant and adapter with their hidden states, in memory of bounded size.

The memory is shared with the trainer's process and has no name, so that nothing of it reaches a disk (except as swap).
If it is full, the pair with the most rows gives up its oldest block. Imports no torch.
"""

import mmap
import os
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lorikeet.proto.learning import BLOCK_ROWS, RowBlock, RowsLayout

Pair = tuple[str, str]
"""The tenant, and the digest of the adapter."""


@dataclass(slots=True)
class _Ring:
    """The blocks of one pair."""

    blocks: deque[int] = field(default_factory=deque)
    """Oldest first."""
    num_last: int = BLOCK_ROWS
    """Rows in the newest block."""

    @property
    def num_rows(self) -> int:
        return (len(self.blocks) - 1) * BLOCK_ROWS + self.num_last if self.blocks else 0


class Rings:
    """All rings of a shard."""

    def __init__(self, layout: RowsLayout) -> None:
        """Raises OSError if the system has no memory files."""
        self.layout = layout
        self.fd = os.memfd_create("lorikeet-learning", os.MFD_CLOEXEC)
        """Descriptor of the memory."""
        os.ftruncate(self.fd, layout.num_bytes)
        self._memory = mmap.mmap(self.fd, layout.num_bytes)
        self._arrays = layout.arrays(memoryview(self._memory))
        self._free = list(reversed(range(layout.num_blocks)))
        self._rings: OrderedDict[Pair, _Ring] = OrderedDict()  # least recently used first
        self._version = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that have rows."""
        return (self.layout.num_blocks - len(self._free)) * (self.layout.num_bytes // self.layout.num_blocks)

    def num_rows(self, pair: Pair) -> int:
        """Rows of a pair that are kept."""
        ring = self._rings.get(pair)
        return 0 if ring is None else ring.num_rows

    def append(
        self,
        pair: Pair,
        texts: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
        hidden: npt.NDArray[np.uint16],
    ) -> None:
        """Add rows. texts, token_ids: [n]; hidden: [n, H] bits of bfloat16."""
        ring = self._rings.setdefault(pair, _Ring())
        self._rings.move_to_end(pair)
        first, num_rows = 0, len(token_ids)
        while first < num_rows:
            if ring.num_last == BLOCK_ROWS:
                ring.blocks.append(self._take_block())
                ring.num_last = 0
            taken = min(num_rows - first, BLOCK_ROWS - ring.num_last)
            start = ring.blocks[-1] * BLOCK_ROWS + ring.num_last
            rows, source = slice(start, start + taken), slice(first, first + taken)
            self._arrays.texts[rows] = texts[source]
            self._arrays.token_ids[rows] = token_ids[source]
            self._arrays.hidden[rows] = hidden[source]
            ring.num_last += taken
            first += taken

    def blocks(self, pair: Pair) -> tuple[RowBlock, ...]:
        """The blocks of a pair, oldest first."""
        ring = self._rings.get(pair)
        if ring is None:
            return ()
        sizes = [BLOCK_ROWS] * (len(ring.blocks) - 1) + [ring.num_last]
        versions = self._arrays.versions[list(ring.blocks)].tolist()
        return tuple(map(RowBlock, ring.blocks, versions, sizes))

    def clear(self) -> None:
        """Delete all rows, from the memory too."""
        self._rings.clear()
        self._free = list(reversed(range(self.layout.num_blocks)))
        self._memory.madvise(mmap.MADV_REMOVE)
        self._version += 1
        self._arrays.versions[:] = self._version

    def _take_block(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            # the least recently used of those with the most rows; the newest pair may have none, and needs the block
            pair, ring = max(self._rings.items(), key=lambda item: item[1].num_rows)
            block = ring.blocks.popleft()
            if not ring.blocks and pair != next(reversed(self._rings)):
                del self._rings[pair]
        self._version += 1
        self._arrays.versions[block] = self._version
        return block
