"""When a batch of requests is sent: requests that arrive within one step of the shard travel in at most two messages.

A pure state machine. During a step a new request could only wait in the shard, so one message gathers requests until
shortly before the step should end, and another follows the step's own output. An idle shard gets the first request at
once. One that has just become idle gets it a moment later: clients whose requests ended together often send the next
ones together, and a request that misses the first message waits a whole step.
"""

import math

MARGIN_SECONDS, MARGIN = 0.002, 0.15
"""How long before the end of the step a batch should arrive, in seconds and as a fraction of the step."""
RETURNING_SECONDS = 0.05
"""How long after its last request ended clients are expected to send the next ones."""
QUIET_SECONDS = 0.0015
LONGEST_GATHER_SECONDS = 0.005


class SendTiming:
    """Send times of one shard, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._step_began = -math.inf
        self._step_seconds = 0.0
        """The expected duration of the running step."""
        self._has_sent = True
        """Whether a message was sent during the running step, or started it."""
        self._idle_since = -math.inf
        self._first_arrival = -math.inf
        """Arrival of the first of the queued requests."""
        self._last_arrival = -math.inf

    def on_arrival(self, now: float, is_first: bool) -> None:
        """A request was queued; `is_first` when the queue was empty."""
        self._last_arrival = now
        if is_first:
            self._first_arrival = now

    def on_step(self, now: float) -> None:
        """The shard reported a step and has started the next one."""
        self._step_began = now
        self._has_sent = False

    def set_step_time(self, seconds: float) -> None:
        """The shard's estimate for the running step."""
        self._step_seconds = seconds

    def on_idle(self, now: float) -> None:
        """The shard's last request ended."""
        self._idle_since = now

    def send_at(self, now: float, shard_idle: bool) -> float:
        """The time from which requests may be sent; `inf` stands for the shard's next output."""
        if not shard_idle:
            margin = max(MARGIN_SECONDS, MARGIN * self._step_seconds)
            has_passed = self._has_sent or self._step_seconds <= 2 * margin
            return math.inf if has_passed else self._step_began + self._step_seconds - margin
        if now - self._idle_since > RETURNING_SECONDS:
            return now
        return min(self._last_arrival + QUIET_SECONDS, self._first_arrival + LONGEST_GATHER_SECONDS)

    def on_send(self) -> None:
        """Requests were sent during a step, or started one."""
        self._has_sent = True
