"""How often guesses are right: of one request, and of all with its adapter, by what guessed. Knows counts only."""

from dataclasses import dataclass, field

from shard.request import Source

PRIOR = {Source.LOOKUP: 0.6, Source.MEDUSA: 0.6, Source.DRAFT: 0.75}
"""Chances before anything was seen."""
PRIOR_WEIGHT = 6.0
GROUP_WEIGHT = 12.0
"""Guesses that others' experience counts as, beside a request's own."""
REQUEST_MEMORY, GROUP_MEMORY = 0.96, 0.995
"""What an older guess counts, guess by guess."""


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
class Acceptance:
    """Of the first guess of a step, and of each behind one that was right."""

    first: Rate = field(default_factory=Rate)
    further: Rate = field(default_factory=Rate)

    def observe(self, num_accepted: int, was_rejected: bool, memory: float) -> None:
        """So many guesses of a step were right, and then one was wrong, or none was left."""
        if num_accepted:
            self.first.observe(1, 0, memory)
            self.further.observe(num_accepted - 1, int(was_rejected), memory)
        elif was_rejected:
            self.first.observe(0, 1, memory)


@dataclass(frozen=True)
class Chances:
    """That the first guess is right, and that one behind a right one is."""

    first: float
    further: float


def chances(own: Acceptance, group: Acceptance, source: Source) -> Chances:
    """What a request's next guesses of a source should do."""
    return Chances(
        own.first.chance(group.first.chance(PRIOR[source], PRIOR_WEIGHT), GROUP_WEIGHT),
        own.further.chance(group.further.chance(PRIOR[source], PRIOR_WEIGHT), GROUP_WEIGHT),
    )
