"""What a step is padded to, so that a graph that was captured once computes it: few numbers of rows, and the most there
can be of everything else. Imports no torch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FEW = (1, 2, 4)
"""Numbers of rows below the first multiple of …"""
NARROW, NARROW_UP_TO, WIDE = 8, 64, 16
"""… these: of NARROW up to so many rows, of WIDE beyond."""
DRAFTS_PER_ROW, MAX_DRAFTS = 4, 128
"""Rows of heads' guesses behind each row of a padded step with heads, and the rows of the largest such step; steps that
want more run as they come."""


@dataclass(frozen=True)
class Bounds:
    """What a padded step is computed as: two steps with equal bounds are the same launches at the same addresses."""

    num_rows: int
    """T, and S: every row's logits are computed."""
    max_kv_len: int
    """Tokens that a request sees at most."""
    num_drafts: int = 0
    """E: rows of heads' guesses."""
    has_adapters: bool = False
    """Whether rows may belong to adapters; with guesses they always may."""

    @property
    def num_logits(self) -> int:
        """Rows of the output head: S + E."""
        return self.num_rows + self.num_drafts


class Padding:
    """The bounds that there are."""

    def __init__(self, most_rows: int, max_kv_len: int, spare_page: int, has_adapters: bool = False) -> None:
        """No step of more than `most_rows` tokens is padded. spare_page: where the KV of padding goes. has_adapters:
        whether there are any, LoRA or heads.
        """
        self.row_counts = row_counts(most_rows)
        self.max_kv_len = max_kv_len
        self.spare_page = spare_page
        self._has_adapters = has_adapters

    @property
    def most_rows(self) -> int:
        return self.row_counts[-1]

    def fit(self, num_rows: int, num_logits: int, num_drafts: int, has_adapters: bool) -> Bounds | None:
        """Of a step with so many rows, rows whose logits are wanted and rows of guesses; None where it is too large."""
        if num_rows > self.most_rows or num_logits > self.most_rows:
            return None
        found = self.row_counts[bisect_left(self.row_counts, max(num_rows, num_logits))]
        if num_drafts > (DRAFTS_PER_ROW * found if self._has_adapters and found <= MAX_DRAFTS else 0):
            return None
        if has_adapters and not self._has_adapters:
            return None
        return self._bounds(found, bool(num_drafts), has_adapters or bool(num_drafts))

    def all(self) -> list[Bounds]:
        """Every one, the largest first: what a smaller graph needs then fits into what a larger one has left."""
        families = [(False, False)]
        if self._has_adapters:
            families += [(False, True), (True, True)]
        found = [
            self._bounds(rows, *family)
            for rows in self.row_counts
            for family in families
            if rows <= MAX_DRAFTS or not family[0]
        ]
        return sorted(found, key=lambda bounds: (bounds.num_logits, bounds.has_adapters), reverse=True)

    def _bounds(self, num_rows: int, has_drafts: bool, has_adapters: bool) -> Bounds:
        return Bounds(num_rows, self.max_kv_len, DRAFTS_PER_ROW * num_rows if has_drafts else 0, has_adapters)


def row_counts(most: int) -> Sequence[int]:
    """The numbers of rows that steps are padded to, rising, `most` the last."""
    steps = [*FEW, *range(NARROW, NARROW_UP_TO, NARROW), *range(NARROW_UP_TO, most, WIDE)]
    return [count for count in steps if count < most] + [most]
