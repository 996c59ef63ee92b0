"""When a batch of requests leaves: requests that arrive within one step of the shard travel in two messages at most.

A pure state machine. While the shard runs a step a new request can do nothing there but wait, so one message gathers
until shortly before the step should end, and one more follows the step's own output. An idle shard gets the first
request at once; one that has just become idle, a moment later: requests that ended together are often followed by
others together, and whoever misses the first message waits a whole step.
"""

import math

MARGIN_SECONDS, MARGIN = 0.002, 0.15
"""A batch should be there so long before the step ends, in seconds and as a part of the step."""
RETURNING_SECONDS = 0.05
"""After its last request ended, clients that ask again at once are expected for so long."""
QUIET_SECONDS = 0.0015
LONGEST_GATHER_SECONDS = 0.005


class Pacing:
    """Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._began = -math.inf
        """The step that runs."""
        self._expected = 0.0
        """How long it should take."""
        self._has_sent = True
        """Whether a message left while it ran, or started it."""
        self._idle_since = -math.inf
        self._first_arrival = -math.inf
        """Of the requests that wait to be sent."""
        self._last_arrival = -math.inf

    def arrived(self, now: float, is_first: bool) -> None:
        """A request was queued; `is_first` when nothing waited before it."""
        self._last_arrival = now
        if is_first:
            self._first_arrival = now

    def step_began(self, now: float) -> None:
        """The shard reported a step and has gone on to the next one."""
        self._began = now
        self._has_sent = False

    def step_takes(self, seconds: float) -> None:
        """What the shard expects of the step that runs now."""
        self._expected = seconds

    def became_idle(self, now: float) -> None:
        """The shard's last request ended."""
        self._idle_since = now

    def send_at(self, now: float, shard_idle: bool) -> float:
        """The moment from which requests may be sent; `inf` is after the next output of the shard."""
        if not shard_idle:
            margin = max(MARGIN_SECONDS, MARGIN * self._expected)
            return math.inf if self._has_sent or self._expected <= 2 * margin else self._began + self._expected - margin
        if now - self._idle_since > RETURNING_SECONDS:
            return now
        return min(self._last_arrival + QUIET_SECONDS, self._first_arrival + LONGEST_GATHER_SECONDS)

    def sent(self) -> None:
        """Requests left while a step was running, or started one."""
        self._has_sent = True
