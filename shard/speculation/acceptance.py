"""Acceptance rates of drafts: of one request, and of all requests with its adapter, by the source of the drafts.

A few drafts of one request are a weak estimate, and the mean of all requests says little where requests differ. So the
mean is a prior whose weight follows from how far the requests' rates vary (empirical Bayes, by the method of moments:
Casella 1985).
"""

from dataclasses import dataclass, field

from lorikeet.proto.draft_sources import BY_VALUE
from lorikeet.shard.speculation.types import DraftKind, Source

PRIOR_WEIGHT = 6.0
REQUEST_DECAY, GROUP_DECAY, VARIANCE_DECAY = 0.96, 0.995, 0.999
"""The weight of older drafts, per draft."""
FIRST_WEIGHT = 12.0
"""Drafts that the group's rate counts as for one request until the variance between requests is known."""
WEIGHTS = (4.0, 64.0)
"""Minimum and maximum of these drafts once the variance is known."""
FIRST_PAIRS = 2000.0
"""Pairs of drafts of one request after which the measured variance counts half."""
FIRST_RETRY = 16
"""Steps without drafts after which a single draft is tried again, at first."""
LIGHTER = 0.75
"""Part of a load under which drafts cost too much; under a load this light they may pay."""


@dataclass(slots=True)
class Rate:
    """Accepted drafts among verified ones, the newer the weightier."""

    num_accepted: float = 0.0
    num_verified: float = 0.0

    def observe(self, num_accepted: int, num_rejected: int, decay: float) -> None:
        fade = decay ** (num_accepted + num_rejected)
        self.num_accepted = self.num_accepted * fade + num_accepted
        self.num_verified = self.num_verified * fade + num_accepted + num_rejected

    def mean(self, prior: float, weight: float) -> float:
        return (self.num_accepted + prior * weight) / (self.num_verified + weight)


@dataclass(slots=True)
class GroupRate:
    """The rate of many requests, and how far their own rates vary."""

    prior: float
    """The rate before any draft was verified."""
    rate: Rate = field(default_factory=Rate)
    product: float = 0.0
    """Sum over steps of the accepted drafts beyond expectation, times the same of that request's earlier steps. Where
    all requests have one rate it stays about zero, else it grows with the variance of their rates and `num_pairs`.
    """
    num_pairs: float = 0.0
    """Sum over steps of the step's verified drafts times that request's earlier ones."""

    def observe(self, own: Rate, num_accepted: int, num_rejected: int) -> None:
        """A step of a request whose rate was `own` before; updates that too."""
        num_verified, mean = num_accepted + num_rejected, self.mean
        fade = VARIANCE_DECAY**num_verified
        beyond, before = num_accepted - mean * num_verified, own.num_accepted - mean * own.num_verified
        self.product = self.product * fade + beyond * before
        self.num_pairs = self.num_pairs * fade + num_verified * own.num_verified
        self.rate.observe(num_accepted, num_rejected, GROUP_DECAY)
        own.observe(num_accepted, num_rejected, REQUEST_DECAY)

    @property
    def mean(self) -> float:
        return self.rate.mean(self.prior, PRIOR_WEIGHT)

    @property
    def weight(self) -> float:
        """Drafts that this rate counts as for one request."""
        mean = self.mean
        within = mean * (1 - mean)
        first = within / (FIRST_WEIGHT + 1)
        between = (self.product + FIRST_PAIRS * first) / (self.num_pairs + FIRST_PAIRS)
        least, most = WEIGHTS
        return min(most, max(least, within / between - 1)) if between > 0 else most


@dataclass(slots=True)
class Acceptance:
    """Acceptance of one request's drafts: the first of each step, and those after an accepted one."""

    first: Rate = field(default_factory=Rate)
    further: Rate = field(default_factory=Rate)


@dataclass(frozen=True)
class AcceptanceRates:
    """Estimates for the first draft of a step, and for each draft after an accepted one."""

    first: float
    further: float


class Group:
    """The acceptance of all requests with one adapter and one source of drafts."""

    def __init__(self, source: Source) -> None:
        prior = BY_VALUE[source].prior or 1.0
        self.first, self.further = GroupRate(prior), GroupRate(prior)

    def observe(self, own: Acceptance, num_accepted: int, was_rejected: bool) -> None:
        """A step of one request: `num_accepted` drafts, then a rejected one, or none was left."""
        if num_accepted:
            self.first.observe(own.first, 1, 0)
            self.further.observe(own.further, num_accepted - 1, int(was_rejected))
        elif was_rejected:
            self.first.observe(own.first, 0, 1)

    def rates(self, own: Acceptance) -> AcceptanceRates:
        """Estimates for the next drafts of one request."""
        first, further = self.first, self.further
        return AcceptanceRates(own.first.mean(first.mean, first.weight), own.further.mean(further.mean, further.weight))


@dataclass
class DraftState:
    """What a draft length controller keeps of one request's drafts of one kind."""

    kind: DraftKind
    width: int
    """Drafts in the newest step that could have had some."""
    num_idle: int = 0
    """Steps without drafts since."""
    recheck_after: int = 0
    """Idle steps after which the width is computed again."""
    retry_after: int = FIRST_RETRY
    """Idle steps after which one draft is tried although it is not expected to pay."""
    expensive_at: int = 0
    """Requests in a step in which these drafts, though likely accepted, did not pay; 0 where cost is not the reason."""
    from_prior: bool = False
    """Whether that is the prior from other requests of this adapter alone."""
    own: Acceptance = field(default_factory=Acceptance)

    def is_disabled(self, num_requests: int) -> bool:
        """Whether the next step, of `num_requests`, has no drafts without computing the width again."""
        return self.width == 0 and self.num_idle + 1 < self.recheck_after and num_requests > LIGHTER * self.expensive_at
