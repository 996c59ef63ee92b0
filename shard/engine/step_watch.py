"""Describes steps to the routers that ask for it: one in a tenth of a second, so that it costs next to nothing."""

import time
from collections.abc import Iterable, Sequence

from lorikeet.shard.grpc.outbox import MAX_DETAILS, Outbox, StepDetail
from lorikeet.shard.requests.request import Request
from lorikeet.shard.requests.scheduled_request import ScheduledRequest

PERIOD_S = 0.1
MAX_WATCH_S = 60.0


class StepWatch:
    """The streams whose routers watch, and until when."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._until: dict[int, float] = {}
        """By stream, in seconds of the monotonic clock."""
        self._next = 0.0

    def __bool__(self) -> bool:
        return bool(self._until)

    def begin(self, epoch: int, seconds: float) -> None:
        """A router watches for `seconds` from now."""
        self._until[epoch] = time.monotonic() + min(seconds, MAX_WATCH_S)

    def end(self, epoch: int) -> None:
        """The stream has ended."""
        self._until.pop(epoch, None)

    def describe(self, scheduled: Sequence[ScheduledRequest], waiting: Iterable[Request]) -> None:
        """The step that is about to run, to each stream that watches."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PERIOD_S
        for epoch, until in list(self._until.items()):
            if until < now:
                del self._until[epoch]
                continue
            own = [item for item in scheduled if item.request.key[0] == epoch][:MAX_DETAILS]
            computed = [(item.request.key[1], item.end - item.start, len(item.draft_ids)) for item in own]
            # A request that waits and was admitted before has been preempted.
            preempted = [each.key[1] for each in waiting if each.key[0] == epoch and each.num_cached is not None]
            self._outbox.describe_step(epoch, StepDetail(computed, preempted[:MAX_DETAILS]))
