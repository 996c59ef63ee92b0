"""Several offers' guesses as arrays, to be weighed together. Imports no torch."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DraftTokens:
    """What several offers hold, the likeliest first: each array has an entry for each of n guesses."""

    values: npt.NDArray[np.float64]
    """[n] tokens that each should give."""
    owners: npt.NDArray[np.int64]
    """[n] its offer."""
    passes: npt.NDArray[np.int64]
    """[n] passes of the draft model after which it is there."""
    attended: npt.NDArray[np.int64]
    """[n] positions that it attends to."""
    num_offers: int
    num_drawn: int
    """Offers of a draft model."""

    @classmethod
    def of(
        cls,
        chances: npt.NDArray[np.float64],
        widths: npt.NDArray[np.int64],
        is_drawn: npt.NDArray[np.bool_],
        lengths: npt.NDArray[np.int64],
    ) -> Self:
        """`chances` is [offers, 2]: of the first guess, and of one behind a right one. `widths` [offers] may be 0.
        `lengths` [offers] are those of the texts so far.
        """
        owners, places = np.nonzero(np.arange(widths.max()) < widths[:, None])
        values = chances[owners, 0] * chances[owners, 1] ** places
        order = np.argsort(-values, kind="stable")  # an offer's guesses stay in order: each gains less
        owners, places = owners[order], places[order]
        passes = np.where(is_drawn[owners], places + 1, 0)
        num_drawn = int((is_drawn & (widths > 0)).sum())
        return cls(values[order], owners, passes, lengths[owners] + places + 1, len(widths), num_drawn)

    @property
    def num_passes(self) -> int:
        """Of the draft model, for all."""
        return int(self.passes.max(initial=0))
