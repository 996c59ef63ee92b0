"""Whether a request is what ends shards: who was computed when one ended has to show that it is not.

A pure state machine of one request. A suspect's next steps compute nothing else, so that another end says who it was.
"""

from dataclasses import dataclass

TRIAL, LONGER = 4, 4
"""Steps of its own that a suspect has to take, and by how many times more after each further end."""
LONGEST = 4096


@dataclass(slots=True)
class PoisonRequestTracker:
    """Of one request, over all shards that it ever ran on."""

    num_ends: int = 0
    """Shards that ended in a step that computed it."""
    isolation_steps: int = 0
    """Steps of its own that are still ahead of it."""

    def suspected(self) -> None:
        """A shard ended before it said what became of the request."""
        self.isolation_steps = max(self.isolation_steps, TRIAL)

    def convicted(self) -> bool:
        """A shard ended in a step that computed it. True where it is what ended it: it was not the first time, and it
        was computed alone.
        """
        was_isolated = self.isolation_steps > 0
        self.num_ends += 1
        self.isolation_steps = min(LONGEST, TRIAL * LONGER ** (self.num_ends - 1))
        return was_isolated and self.num_ends > 1

    def stepped(self, num_steps: int) -> None:
        """So many steps with it ended well."""
        self.isolation_steps = max(0, self.isolation_steps - num_steps)
