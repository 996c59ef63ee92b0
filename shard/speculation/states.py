"""What schedules know of drafts, as arrays: one row for the drafts of one kind of a request, and one for those of all
requests of a group. Imports no torch and reads no clock.

A few drafts of one request are a weak estimate of its acceptance, so the rates of its group are its prior.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from lorikeet.proto.draft_sources import BY_VALUE

DraftKind = tuple[str, int, bool]
"""The statistics group of a draft: its adapter, its source, and whether texts had a long match."""
DECAY = 0.99
"""The weight of older drafts, per draft."""
PRIOR_WEIGHT = 12.0
"""Drafts that a prior counts as: the rate of a group for a request, and that of the source's row for a new group."""
RETRY = 16
"""Steps without drafts after which one is tried again, doubled each time that it is in vain, up to RETRY²; and new
requests of which one tries drafts that do not pay for others.
"""
NO_STATE = -1
FIRST_ROWS = 64

Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]


class DraftStates:
    """The arrays are indexed by row; each has an entry for each row, of which some are free."""

    def __init__(self) -> None:
        self.kinds: list[DraftKind] = []
        self._free: list[int] = []
        self.counts: Values = np.zeros((0, 2, 2))
        """[rows, 2, 2] accepted and verified drafts, the newer the weightier: of the first ones of steps, and of those
        after an accepted one.
        """
        # [rows] each
        self.groups: Indices = np.zeros(0, np.int64)
        """Row of the group, NO_STATE if that was dropped."""
        self.follows: Flags = np.zeros(0, bool)
        """Whether a request has decided nothing by itself: it rests as its group does."""
        self.is_known: Flags = np.zeros(0, bool)
        """Whether a step could have had such drafts of the request, or it has followed a group that rested."""
        self.widths: Indices = np.zeros(0, np.int64)
        """Drafts in the newest step that could have had some."""
        self.idle_until: Indices = np.zeros(0, np.int64)
        """The step before which there are no drafts; 0 if the last decision was to have some."""
        self.retry_after: Indices = np.zeros(0, np.int64)
        """Steps without drafts after the next decision to have none."""
        self.loads: Indices = np.zeros(0, np.int64)
        """Requests in the step in which drafts were found not to pay; with half as many they may."""
        self.is_expensive: Flags = np.zeros(0, bool)
        """Whether they would not pay even if all were accepted."""
        self.is_tried: Flags = np.zeros(0, bool)
        """Whether one draft was verified after a rest, so that the next decision knows what it costs now."""
        self.num_followers: Indices = np.zeros(0, np.int64)
        """Of a group: new requests that had no drafts because it had none."""
        self.bounds: Indices = np.zeros(0, np.int64)
        """Most drafts of a request with schedule `heuristic`, 0 for others."""
        self.serials: Indices = np.zeros(0, np.int64)
        """A number that no other row has had."""
        self._num_added = 0

    def add(self, kind: DraftKind, group: int) -> int:
        """A request without any draft of this kind so far. Returns its row."""
        row = self._take()
        self.kinds[row], self.groups[row], self.follows[row] = kind, group, True
        self.counts[row] = 0.0
        self.widths[row], self.idle_until[row], self.retry_after[row] = 1, 0, RETRY
        self.loads[row], self.is_expensive[row], self.is_tried[row], self.num_followers[row] = 0, False, False, 0
        self.bounds[row], self.is_known[row] = 0, False
        return row

    def add_group(self, kind: DraftKind) -> int:
        """A group without any request so far. The rate of the source's row fades like older drafts."""
        row = self.add(kind, NO_STATE)
        self.follows[row] = False
        self.counts[row, 0], self.counts[row, 1] = (BY_VALUE[kind[1]].prior or 1.0) * PRIOR_WEIGHT, PRIOR_WEIGHT
        return row

    def remove(self, row: int) -> None:
        """The request has ended, or the group was dropped."""
        self.groups[self.groups == row] = NO_STATE
        self._free.append(row)

    def _take(self) -> int:
        if not self._free:
            num_rows, num_more = len(self.kinds), max(FIRST_ROWS, len(self.kinds))
            for name, array in list(vars(self).items()):
                if isinstance(array, np.ndarray):
                    setattr(self, name, np.concatenate([array, np.zeros((num_more, *array.shape[1:]), array.dtype)]))
            self.kinds += [("", 0, False)] * num_more
            self._free += range(num_rows + num_more - 1, num_rows - 1, -1)
        row = self._free.pop()
        self._num_added += 1
        self.serials[row] = self._num_added
        return row

    def count(self, row: int, num_accepted: int, was_rejected: int) -> None:
        """Record drafts of one step: `num_accepted` were accepted, then as many rejected, one or none."""
        first, further = min(num_accepted, 1), max(num_accepted - 1, 0)
        first_verified, further_verified = max(first, was_rejected), further + first * was_rejected
        (of_first, of_further), (by_first, by_further) = self.counts[row].tolist()
        fade, further_fade = DECAY**first_verified, DECAY**further_verified
        self.counts[row] = (
            (of_first * fade + first, of_further * further_fade + further),
            (by_first * fade + first_verified, by_further * further_fade + further_verified),
        )

    def observe(self, rows: Indices, order: Indices, num_accepted: Indices, rejected: Indices) -> None:
        """As `count`, of several, [n]. A row may occur several times; the smaller `order`, the older."""
        by_row = np.lexsort((order, rows))
        rows, num_accepted, rejected = rows[by_row], num_accepted[by_row], rejected[by_row]
        ends = np.append((rows[1:] != rows[:-1]).nonzero()[0], len(rows) - 1)
        firsts = np.append(0, ends[:-1] + 1)
        # [2, 2, n] as in `counts`
        found = np.zeros((2, 2, len(rows)))
        np.minimum(num_accepted, 1, out=found[0, 0])
        np.maximum(num_accepted - 1, 0, out=found[0, 1])
        further = found[0, 0] * rejected
        found[1, 0], found[1, 1] = found[0, 0] + rejected - further, found[0, 1] + further
        until = found[1].cumsum(axis=1)
        # [2, n] drafts of the same row until its last ones
        of_row = np.repeat(until[:, ends], ends - firsts + 1, axis=1)
        sums = np.add.reduceat(found * DECAY ** (of_row - until), firsts, axis=2)
        fade = DECAY ** np.add.reduceat(found[1], firsts, axis=1)
        rows = rows[ends]
        self.counts[rows] = self.counts[rows] * fade.T[:, None] + sums.transpose(2, 0, 1)

    def rates(self, rows: Indices, groups: Indices) -> Values:
        """[n, 2] estimated acceptance of the first draft of a step, and of each after an accepted one."""
        num_accepted, num_verified = self.counts[rows].transpose(1, 0, 2)
        rates: Values = (num_accepted + self.prior_rates(groups) * PRIOR_WEIGHT) / (num_verified + PRIOR_WEIGHT)
        return rates

    def prior_rates(self, groups: Indices) -> Values:
        """[n, 2] the same for requests without any draft."""
        num_accepted, num_verified = self.counts[groups].transpose(1, 0, 2)
        rates: Values = num_accepted / num_verified
        return rates

    def is_idle(self, rows: Any, step: int, load: int) -> Any:
        """Whether a step of so many requests has no drafts, without a decision. rows: one, or [n]."""
        return (step < self.idle_until[rows]) & (2 * load > self.loads[rows])

    def rest(self, row: int, step: int, load: int, is_expensive: bool) -> None:
        """Drafts do not pay in a step with so many requests."""
        self.widths[row], self.loads[row], self.is_expensive[row], self.is_tried[row] = 0, load, is_expensive, False
        self.idle_until[row] = step + self.retry_after[row]

    def wake(self, rows: Indices) -> None:
        """Drafts pay."""
        self.idle_until[rows], self.retry_after[rows], self.is_tried[rows] = 0, RETRY, False
