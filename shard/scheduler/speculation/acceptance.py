"""How often guesses are right: of one request, and of all with its adapter, by what guessed. Knows counts only.

The newest guesses of one request say little, those of all others little about this one if requests differ. So others
count as much as requests were seen to be alike (empirical Bayes, by the method of moments: Casella 1985).
"""

from dataclasses import dataclass, field

from lorikeet.shard.scheduler.request import Source

PRIOR = {Source.LOOKUP: 0.6, Source.MEDUSA: 0.6, Source.DRAFT: 0.75}
"""Chances before anything was seen."""
PRIOR_WEIGHT = 6.0
REQUEST_MEMORY, GROUP_MEMORY, LIKENESS_MEMORY = 0.96, 0.995, 0.999
"""What an older guess counts, guess by guess."""
FIRST_WEIGHT = 12.0
"""DraftTokens that others' experience counts as, beside a request's own, before it is known how alike requests are …"""
WEIGHTS = (4.0, 64.0)
"""… at least, and at most …"""
FIRST_PAIRS = 2000.0
"""… and pairs of guesses of one request after which that is half known."""


@dataclass(slots=True)
class Rate:
    """Right guesses among guesses, the newer the weightier."""

    num_right: float = 0.0
    num_all: float = 0.0

    def observe(self, num_right: int, num_wrong: int, memory: float) -> None:
        """So many more, right ones first."""
        fade = memory ** (num_right + num_wrong)
        self.num_right = self.num_right * fade + num_right
        self.num_all = self.num_all * fade + num_right + num_wrong

    def chance(self, prior: float, weight: float) -> float:
        return (self.num_right + prior * weight) / (self.num_all + weight)


@dataclass(slots=True)
class Common:
    """The rate of many requests, and how far theirs lie apart."""

    prior: float
    """The chance before anything was seen."""
    rate: Rate = field(default_factory=Rate)
    product: float = 0.0
    """Sum over steps of what was right beyond expectation, times the same of that request's steps before. Where all
    requests have one rate it stays about zero, else it grows with the variance of their rates and …
    """
    num_pairs: float = 0.0
    """… the sum of the products of both numbers of guesses."""

    def observe(self, own: Rate, num_right: int, num_wrong: int) -> None:
        """A step of a request that had `own` before."""
        num_all, chance = num_right + num_wrong, self.chance
        fade = LIKENESS_MEMORY**num_all
        beyond, before = num_right - chance * num_all, own.num_right - chance * own.num_all
        self.product = self.product * fade + beyond * before
        self.num_pairs = self.num_pairs * fade + num_all * own.num_all
        self.rate.observe(num_right, num_wrong, GROUP_MEMORY)

    @property
    def chance(self) -> float:
        return self.rate.chance(self.prior, PRIOR_WEIGHT)

    @property
    def weight(self) -> float:
        """DraftTokens that this rate counts as for one request."""
        chance = self.chance
        within = chance * (1 - chance)
        first = within / (FIRST_WEIGHT + 1)
        apart = (self.product + FIRST_PAIRS * first) / (self.num_pairs + FIRST_PAIRS)
        least, most = WEIGHTS
        return min(most, max(least, within / apart - 1)) if apart > 0 else most


@dataclass(slots=True)
class Acceptance:
    """Of the first guess of a step, and of each behind one that was right."""

    first: Rate = field(default_factory=Rate)
    further: Rate = field(default_factory=Rate)


@dataclass(frozen=True)
class Chances:
    """That the first guess is right, and that one behind a right one is."""

    first: float
    further: float


class Group:
    """The acceptance of all requests with one adapter whose guesses come from one source."""

    def __init__(self, source: Source) -> None:
        self.first, self.further = Common(PRIOR[source]), Common(PRIOR[source])

    def observe(self, own: Acceptance, num_accepted: int, was_rejected: bool) -> None:
        """So many guesses of a step of one of them were right, and then one was wrong, or none was left."""
        if num_accepted:
            _observe(self.first, own.first, 1, 0)
            _observe(self.further, own.further, num_accepted - 1, int(was_rejected))
        elif was_rejected:
            _observe(self.first, own.first, 0, 1)

    def chances(self, own: Acceptance) -> Chances:
        """What the next guesses of one of them should do."""
        first, further = self.first, self.further
        return Chances(own.first.chance(first.chance, first.weight), own.further.chance(further.chance, further.weight))


def _observe(common: Common, own: Rate, num_right: int, num_wrong: int) -> None:
    common.observe(own, num_right, num_wrong)
    own.observe(num_right, num_wrong, REQUEST_MEMORY)
