"""Which draft tokens of several offers give the most expected tokens per second. Imports no torch."""

from dataclasses import dataclass, field, fields
from typing import Self

import numpy as np
import numpy.typing as npt

from lorikeet.shard.speculation.costs import DraftCosts, StepCosts


@dataclass(frozen=True)
class Load:
    """A step apart from the drafts whose number is being chosen."""

    num_sampled: int
    """Requests that get a token."""
    num_tokens: int
    """Tokens of the step without drafts."""
    num_attended: int = field(default=0, compare=False)
    """Positions that these attend to, summed over them; changes with each step of the same requests."""
    num_fixed: int = 0
    """Draft tokens of other requests."""

    @property
    def has_prompts(self) -> bool:
        return self.num_tokens > self.num_sampled

    def __add__(self, other: "Load") -> "Load":
        """Both in one step."""
        names = [each.name for each in fields(Load)]
        return Load(*(getattr(self, name) + getattr(other, name) for name in names))


NO_LOAD = Load(0, 0)


@dataclass(frozen=True)
class Candidates:
    """The draft tokens of several offers, the most probable first: each array has an entry for each of n tokens."""

    values: npt.NDArray[np.float64]
    """Expected tokens from each draft token, [n]."""
    owners: npt.NDArray[np.int64]
    """Index of the offer of each draft token, [n]."""
    passes: npt.NDArray[np.int64]
    """Passes of the draft model after which each draft token is known, [n]; 0 for offers of other sources."""
    attended: npt.NDArray[np.int64]
    """Positions that each draft token attends to, [n]."""
    num_offers: int
    num_drawn: int
    """Number of offers of a draft model."""

    @classmethod
    def of(
        cls,
        rates: npt.NDArray[np.float64],
        widths: npt.NDArray[np.int64],
        is_drawn: npt.NDArray[np.bool_],
        lengths: npt.NDArray[np.int64],
    ) -> Self:
        """`rates` is [offers, 2]: of the first draft, and of one after an accepted one. `widths` [offers] may be 0.
        `lengths` [offers] are those of the texts so far.
        """
        owners, depths = np.nonzero(np.arange(widths.max()) < widths[:, None])
        values = rates[owners, 0] * rates[owners, 1] ** depths
        order = np.argsort(-values, kind="stable")  # an offer's drafts stay in order: each gains less
        owners, depths = owners[order], depths[order]
        passes = np.where(is_drawn[owners], depths + 1, 0)
        num_drawn = int((is_drawn & (widths > 0)).sum())
        return cls(values[order], owners, passes, lengths[owners] + depths + 1, len(widths), num_drawn)

    @property
    def num_passes(self) -> int:
        """Passes of the draft model for all draft tokens."""
        return int(self.passes.max(initial=0))

    def best(self, load: Load, costs: StepCosts, drafting: DraftCosts) -> tuple[float, npt.NDArray[np.int64]]:
        """The highest expected tokens per second, and the widths of all offers that give it."""
        num_tokens = load.num_tokens + load.num_fixed
        seconds = costs.expected(range(num_tokens, num_tokens + len(self.values) + 1))
        num_drafted = int(self.attended[self.passes == 1].sum())
        draft_seconds = drafting.expected(self.num_drawn, num_drafted, self.num_passes)
        is_known = self.passes <= np.arange(self.num_passes + 1)[:, None]  # [depths, n]
        nums_taken = is_known.cumsum(axis=1)  # [depths, n] of each depth, up to each candidate
        tokens = load.num_sampled + (is_known * self.values).cumsum(axis=1)
        attended = load.num_attended + (is_known * self.attended).cumsum(axis=1)
        rates = tokens / (seconds[nums_taken] + costs.per_attended * attended + draft_seconds[:, None])
        rate = load.num_sampled / float(seconds[0] + costs.per_attended * load.num_attended)
        if not rates.size or rates.max() <= rate:
            return rate, np.zeros(self.num_offers, np.int64)
        depth, last = np.unravel_index(rates.argmax(), rates.shape)
        taken = self.owners[: last + 1][is_known[depth, : last + 1]]
        return float(rates[depth, last]), np.bincount(taken, minlength=self.num_offers)
