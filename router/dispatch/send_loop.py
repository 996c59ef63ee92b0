"""When batches leave: once the requests of a turn of the loop are all in, and when a shard's pacing says so.

Knows links' pacing and the loop's clock; what is sent is the dispatcher's.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from lorikeet.router.shards.connection import ShardLink


class SendLoop:
    """Of one dispatcher, whose `send` sends a batch to each of the shards given, as of a moment.

    `num_waiting` is the number of requests that could be sent. Moments are of time.monotonic().
    """

    def __init__(
        self,
        links: Sequence[ShardLink],
        num_waiting: Callable[[], int],
        send: Callable[[float, set[ShardLink]], None],
    ) -> None:
        self._links = links
        self._num_waiting = num_waiting
        self._send = send
        self._is_soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """Of the loop's time: when the timer calls. uvloop's do not always know."""

    def soon(self) -> None:
        """Send what may be sent, at the end of this turn of the loop."""
        if not self._is_soon:
            self._is_soon = True
            asyncio.get_running_loop().call_soon(self._now)

    def _now(self) -> None:
        self._is_soon = False
        if not self._num_waiting():
            return
        now = time.monotonic()
        times = {link: link.pacing.send_at(now, shard_idle=link.is_idle) for link in self._links}
        self._send(now, {link for link, at in times.items() if at <= now})
        later = min((at for at in times.values() if now < at), default=math.inf)
        if later < math.inf and self._num_waiting():
            self._at(later)

    def _at(self, moment: float) -> None:
        """At a moment, which may be before one that was asked for earlier."""
        loop = asyncio.get_running_loop()
        when = loop.time() + moment - time.monotonic()
        if self._timer is not None:
            if self._due <= when:
                return
            self._timer.cancel()
        self._timer, self._due = loop.call_at(when, self._on_time), when

    def _on_time(self) -> None:
        self._timer = None
        self._now()
