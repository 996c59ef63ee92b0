"""Decides when batches are sent: at the end of an iteration of the event loop, and when a shard's timing allows it."""

import asyncio
import math
import time
from collections.abc import Sequence

from lorikeet.router.dispatch.fair_queue import FairQueue
from lorikeet.router.shards.connection import RouterEvents, ShardLink


class SendLoop:
    """Send loop of one dispatcher. Times are of time.monotonic()."""

    def __init__(self, links: Sequence[ShardLink], queue: FairQueue, events: RouterEvents) -> None:
        self._links = links
        self._queue = queue
        self._events = events
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """When the timer fires, in the loop's time: uvloop's timers do not always report it."""

    def schedule(self) -> None:
        """Send what may be sent at the end of this iteration of the loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._is_scheduled = False
        if not len(self._queue):
            return
        now = time.monotonic()
        times = {link: link.send_timing.send_at(now, shard_idle=link.is_idle) for link in self._links}
        self._events.on_send_time(now, {link for link, at in times.items() if at <= now})
        later = min((at for at in times.values() if now < at), default=math.inf)
        if later < math.inf and len(self._queue):
            self._send_at(later)

    def _send_at(self, moment: float) -> None:
        """Set the timer, or bring it forward."""
        loop = asyncio.get_running_loop()
        when = loop.time() + moment - time.monotonic()
        if self._timer is not None:
            if self._due <= when:
                return
            self._timer.cancel()
        self._timer, self._due = loop.call_at(when, self._on_timer), when

    def _on_timer(self) -> None:
        self._timer = None
        self._send()
