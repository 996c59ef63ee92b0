"""Acceptance rates of drafts: of one request, and of all requests with its adapter, by the source of the drafts.

A few drafts of one request are a weak estimate, so the rate of all requests is its prior.
"""

from dataclasses import dataclass, field
from typing import Self

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


@dataclass(slots=True)
class Rate:
    """Accepted drafts among verified ones, the newer the weightier."""

    num_accepted: float = 0.0
    num_verified: float = 0.0

    def observe(self, num_accepted: int, num_rejected: int) -> None:
        fade = DECAY ** (num_accepted + num_rejected)
        self.num_accepted = self.num_accepted * fade + num_accepted
        self.num_verified = self.num_verified * fade + num_accepted + num_rejected

    @property
    def mean(self) -> float:
        return self.num_accepted / self.num_verified

    def with_prior(self, prior: float) -> float:
        """The mean, if drafts with the rate `prior` had come before."""
        return (self.num_accepted + prior * PRIOR_WEIGHT) / (self.num_verified + PRIOR_WEIGHT)


@dataclass(frozen=True)
class AcceptanceRates:
    """Estimates for the first draft of a step, and for each draft after an accepted one."""

    first: float
    further: float


CERTAIN = AcceptanceRates(1.0, 1.0)


@dataclass(slots=True)
class Acceptance:
    """The first drafts of steps, and those after an accepted one."""

    first: Rate = field(default_factory=Rate)
    further: Rate = field(default_factory=Rate)

    def observe(self, num_accepted: int, was_rejected: bool) -> None:
        """A step: `num_accepted` drafts, then a rejected one, or none was left."""
        if num_accepted:
            self.first.observe(1, 0)
            self.further.observe(num_accepted - 1, int(was_rejected))
        elif was_rejected:
            self.first.observe(0, 1)

    def rates(self, prior: "Acceptance") -> AcceptanceRates:
        """Estimates for the next drafts."""
        return AcceptanceRates(self.first.with_prior(prior.first.mean), self.further.with_prior(prior.further.mean))


@dataclass(slots=True, eq=False)
class DraftState:
    """Drafts of one kind: of one request, or of all requests of a group."""

    kind: DraftKind
    width: int = 1
    """Drafts in the newest step that could have had some."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    idle_until: int = 0
    """The step before which there are no drafts; 0 if the last decision was to have some."""
    retry_after: int = RETRY
    """Steps without drafts after the next decision to have none."""
    load: int = 0
    """Requests in the step in which drafts were found not to pay; with half as many they may."""
    is_expensive: bool = False
    """Whether they would not pay even if all were accepted."""
    is_tried: bool = False
    """Whether one draft was verified after a rest, so that the next decision knows what it costs now."""
    num_followers: int = 0
    """Of a group: new requests that had no drafts because it had none."""

    @classmethod
    def of_group(cls, kind: DraftKind) -> Self:
        """A group without any request so far. The rate of the source's row fades like older drafts."""
        rate = BY_VALUE[kind[1]].prior or 1.0
        first, further = (Rate(rate * PRIOR_WEIGHT, PRIOR_WEIGHT) for _ in range(2))
        return cls(kind, acceptance=Acceptance(first, further))

    def is_idle(self, step: int, load: int) -> bool:
        """Whether a step of so many requests has no drafts, without a decision."""
        return step < self.idle_until and 2 * load > self.load

    def rest(self, step: int, load: int, is_expensive: bool) -> None:
        """Drafts do not pay in a step with so many requests."""
        self.width, self.load, self.is_expensive, self.is_tried = 0, load, is_expensive, False
        self.idle_until = step + self.retry_after

    def wake(self) -> None:
        """Drafts pay."""
        self.idle_until, self.retry_after, self.is_tried = 0, RETRY, False
