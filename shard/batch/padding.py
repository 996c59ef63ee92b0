"""What a step is padded to, so that a captured graph computes it: a few numbers of rows, and the maximum of everything
else. Imports no torch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FEW = (1, 2, 4)
"""Numbers of rows below the first multiple of NARROW."""
NARROW, NARROW_UP_TO, WIDE = 8, 64, 16
"""Numbers of rows are multiples of NARROW up to NARROW_UP_TO rows, and of WIDE up to MOST_WANTED rows."""
WIDEST = 64
"""Numbers of rows beyond MOST_WANTED are multiples of this: steps with a part of a prompt."""
MOST_WANTED = 256
"""Rows whose logits a padded step computes, at most: those of a prompt are not wanted."""
DRAFTS_PER_ROW, MAX_DRAFTS = 4, 128
"""Rows of heads' draft tokens for each row of a padded step with heads, and the rows of the largest such step; larger
steps run without padding."""
MOST_SUM_ROWS = 32
"""Rows of the largest padded step with sums of adapters: those steps have graphs of their own."""
MOST_LOGITS = max(MOST_WANTED, MAX_DRAFTS * (1 + DRAFTS_PER_ROW))
"""Rows of the output head of a padded step, at most."""


@dataclass(frozen=True)
class Bounds:
    """The sizes of a padded step: two steps with equal bounds are the same launches at the same addresses."""

    num_rows: int
    """T."""
    max_kv_len: int
    """Most tokens that a request sees."""
    num_drafts: int = 0
    """E: rows of heads' draft tokens."""
    has_adapters: bool = False
    """Whether rows may belong to adapters; with draft tokens of heads they always may."""
    has_sums: bool = False
    """Whether rows may belong to sums of adapters, whose kernels other steps do not launch."""

    @property
    def num_wanted(self) -> int:
        """S: every row's logits are computed, of up to MOST_WANTED rows."""
        return min(self.num_rows, MOST_WANTED)

    @property
    def num_logits(self) -> int:
        """Rows of the output head: S + E."""
        return self.num_wanted + self.num_drafts


class Padding:
    """All bounds of a model."""

    def __init__(
        self, most_rows: int, max_kv_len: int, spare_page: int, has_adapters: bool = False, has_sums: bool = False
    ) -> None:
        """Steps of more than `most_rows` tokens are not padded. spare_page: where the KV of padding goes. has_adapters:
        whether the shard serves any, LoRA or heads; has_sums: whether it serves sums of adapters too.
        """
        self.row_counts = row_counts(most_rows)
        self.max_kv_len = max_kv_len
        self.spare_page = spare_page
        self._has_adapters, self._has_sums = has_adapters, has_sums

    @property
    def most_rows(self) -> int:
        return self.row_counts[-1]

    def fit(
        self, num_rows: int, num_logits: int, num_drafts: int, has_adapters: bool, has_sums: bool = False
    ) -> Bounds | None:
        """The least bounds of a step, by its rows, wanted logits and draft tokens of heads; None if it is too large."""
        if num_rows > self.most_rows or num_logits > min(self.most_rows, MOST_WANTED):
            return None
        found = self.row_counts[bisect_left(self.row_counts, max(num_rows, num_logits))]
        if num_drafts > (DRAFTS_PER_ROW * found if self._has_adapters and found <= MAX_DRAFTS else 0):
            return None
        if has_adapters and not self._has_adapters:
            return None
        if has_sums and not (self._has_sums and found <= MOST_SUM_ROWS):
            return None
        return self._bounds(found, bool(num_drafts), has_adapters or bool(num_drafts), has_sums)

    def all(self) -> list[Bounds]:
        """All, the largest first: a smaller graph then fits into the memory that a larger one has left."""
        families = [(False, False, False)]
        if self._has_adapters:
            families += [(False, True, False), (True, True, False)]
        if self._has_sums:
            families += [(False, True, True), (True, True, True)]
        found = [
            self._bounds(rows, *family)
            for rows in self.row_counts
            for family in families
            if rows <= (MOST_SUM_ROWS if family[2] else MAX_DRAFTS if family[0] else rows)
        ]
        return sorted(found, key=lambda each: (each.num_logits, each.num_rows, each.has_adapters), reverse=True)

    def _bounds(self, num_rows: int, has_drafts: bool, has_adapters: bool, has_sums: bool) -> Bounds:
        num_drafts = DRAFTS_PER_ROW * num_rows if has_drafts else 0
        return Bounds(num_rows, self.max_kv_len, num_drafts, has_adapters, has_sums)


def row_counts(most: int) -> Sequence[int]:
    """The numbers of rows that steps are padded to, ascending, up to `most`."""
    wide = range(NARROW_UP_TO, MOST_WANTED, WIDE)
    steps = [*FEW, *range(NARROW, NARROW_UP_TO, NARROW), *wide, *range(MOST_WANTED, most, WIDEST)]
    return [count for count in steps if count < most] + [most]
