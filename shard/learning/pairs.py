"""What is known of one tenant's requests with one adapter: their rows, the heads they use, and how well these draft."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lorikeet.shard.learning.records import HeadsDecision, Record
from lorikeet.shard.learning.rings import Pair

MIN_ROWS = 2048
"""Rows of a pair that come between two of its trainings, at least."""
ACCEPTANCE_STEPS = 256
"""Steps over which acceptance is averaged."""
KNOWN_STEPS = 64
"""Steps until acceptance is known."""
MOST_DECISIONS = 20
"""Decisions that are kept of each pair."""


class Acceptance:
    """Share of the newest steps in which the first draft was accepted."""

    def __init__(self) -> None:
        self.value, self.num_steps = 0.0, 0

    def observe(self, is_accepted: bool) -> None:
        """One more step with drafts."""
        self.num_steps += 1
        self.value += (is_accepted - self.value) / min(self.num_steps, ACCEPTANCE_STEPS)

    @property
    def is_known(self) -> bool:
        return self.num_steps >= KNOWN_STEPS


@dataclass
class LearnedPair:
    """What is known of the requests of one tenant with one adapter."""

    pair: Pair
    number: int
    given_digest: str = ""
    """The heads that requests come with."""
    num_collected: int = 0
    num_new: int = 0
    """Rows since the last training."""
    num_waits: int = 1
    """Factor of MIN_ROWS for the next training."""
    trained: int = 0
    """Number of the last training, over all pairs."""
    digest: str = ""
    """The adopted heads."""
    candidate: str = ""
    """Better heads that are being loaded."""
    replaced: str = ""
    """Heads that drafted before the adopted ones."""
    replaced_acceptance: float = 0.0
    """Acceptance of those heads."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    num_below: int = 0
    """Steps in a row with a lower acceptance than that."""
    decisions: deque[HeadsDecision] = field(default_factory=lambda: deque(maxlen=MOST_DECISIONS))

    @property
    def heads(self) -> str:
        """The heads in use, "" for none."""
        return self.digest or self.given_digest

    @property
    def is_due(self) -> bool:
        """Whether there are rows for the next training, and no new heads that are yet to be loaded."""
        return self.num_new >= MIN_ROWS * self.num_waits and not self.candidate

    def record(self) -> Record:
        """What survives a restart."""
        heads = self.given_digest, self.digest, self.replaced
        return Record(self.pair, *heads, self.replaced_acceptance, tuple(self.decisions))

    def came_with(self, digest: str) -> None:
        """A request came with these heads, "" for none. If such drafted before the adopted ones, they would again."""
        if self.replaced == self.given_digest:
            self.replaced = digest
        self.given_digest = digest


@dataclass(slots=True)
class CollectedRows:
    """The rows of one pair in one step."""

    texts: list[int] = field(default_factory=list)
    """Which request each belongs to."""
    rows: list[int] = field(default_factory=list)
    """Its index among the step's rows."""
    token_ids: list[int] = field(default_factory=list)
    """The committed token that came from it."""

    def add(self, text: int, first: int, token_ids: Sequence[int]) -> None:
        """Tokens of one request, which came from the rows from index `first` on."""
        self.texts += [text] * len(token_ids)
        self.rows += range(first, first + len(token_ids))
        self.token_ids += token_ids
