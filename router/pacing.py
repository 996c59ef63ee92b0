"""When a batch of requests leaves: requests that arrive within one step of the shard travel in two messages at most.

A pure state machine. While the shard runs a step a new request can do nothing there but wait, so one message gathers
until shortly before the step should end, and one more follows the step's own output. An idle shard gets the first
request at once.
"""

import math
from collections import deque


class Pacing:
    """Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=4)
        self._gather_until = math.inf

    def step_began(self, now: float, last_step_seconds: float) -> None:
        """The shard reported a step and has gone on to the next one."""
        self._durations.append(last_step_seconds)
        # The shortest of the last few: a message that comes too late costs its requests a whole step.
        expected = min(self._durations)
        self._gather_until = now + 0.8 * expected - 0.001 if expected >= 0.005 else math.inf

    def send_at(self, now: float, shard_idle: bool) -> float:
        """The moment from which requests may be sent; `inf` is after the next output of the shard."""
        return now if shard_idle else self._gather_until

    def sent(self) -> None:
        """Requests left while a step was running, or started one."""
        self._gather_until = math.inf
