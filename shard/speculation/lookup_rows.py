"""The indices of prompt lookup of many texts, extended by one call. Imports no torch."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorikeet.shard.speculation.lookup import CompiledLookup, Index, functions
from lorikeet.shard.speculation.states import Indices


class Proposals(NamedTuple):
    """What the texts of rows propose next."""

    # [n, most]
    draft_ids: npt.NDArray[np.uint32]
    # [n] their number
    widths: Indices
    # [n] tokens of the match that they continue
    match_lengths: Indices


class LookupRows:
    """Indices by row of device state, of which those of many rows are extended at once."""

    def __init__(self, max_rows: int) -> None:
        self._indices: list[Index | None] = [None] * max_rows
        # [max_rows] of compiled indices: where they are, 0 for others, and the tokens that they have room for
        self._addresses: npt.NDArray[np.uint64] = np.zeros(max_rows, np.uint64)
        self._num_free: Indices = np.zeros(max_rows, np.int64)

    def put(self, row: int, index: Index | None) -> None:
        """The row has this index, or none."""
        self._indices[row], self._addresses[row] = index, 0
        if isinstance(index, CompiledLookup):
            self._addresses[row], self._num_free[row] = index.address, index.num_free

    def follow(self, rows: Indices, counts: Indices, token_ids: Indices, most: Indices) -> Proposals:
        """Extend the texts of rows by `counts` tokens each, [n] all; token_ids: [T] those of all. Returns what each
        proposes next, `most` tokens at most.
        """
        shape = len(rows), max(1, int(most.max(initial=0)))
        found = Proposals(np.zeros(shape, np.uint32), *np.zeros((2, len(rows)), np.int64))
        if not np.count_nonzero(self._addresses[rows] == 0):
            self._follow_compiled(rows, counts, token_ids, most, found)
            return found
        ends = np.cumsum(counts)
        for at, row in enumerate(rows.tolist()):
            index = self._indices[row]
            assert index is not None
            index.extend(token_ids[ends[at] - counts[at] : ends[at]].tolist())
            self.put(row, index)
            draft_ids = index.propose(int(most[at]))
            found.draft_ids[at, : len(draft_ids)] = draft_ids
            found.widths[at], found.match_lengths[at] = len(draft_ids), index.match_length
        return found

    def _follow_compiled(
        self, rows: Indices, counts: Indices, token_ids: Indices, most: Indices, found: Proposals
    ) -> None:
        self._num_free[rows] -= counts
        for at in np.flatnonzero(self._num_free[rows] < 0).tolist():
            index, count = self._indices[rows[at]], int(counts[at])
            assert isinstance(index, CompiledLookup)
            index.make_room(count)
            self._num_free[rows[at]] = index.num_free - count
        texts, (draft_ids, widths, match_lengths) = self._addresses[rows], found
        of_counts, of_tokens, of_most = (np.ascontiguousarray(each, np.int64) for each in (counts, token_ids, most))
        functions().follow(
            texts.ctypes.data, len(rows), of_counts.ctypes.data, of_tokens.ctypes.data, of_most.ctypes.data,
            draft_ids.shape[1], draft_ids.ctypes.data, widths.ctypes.data, match_lengths.ctypes.data,
        )  # fmt: skip
