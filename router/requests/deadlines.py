"""When a request ends although nothing is wrong with it: its own time limit, the server's, and that of the queue."""

import asyncio
import math
import time
from collections.abc import Callable

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import DeadlineExceeded, QueueTimeout, RouterError
from lorikeet.router.requests.generation import Generation, State


class Deadlines:
    """Of one dispatcher, whose `fail` ends a request, and whose `retry_after` says when another try makes sense."""

    def __init__(
        self, config: RouterConfig, fail: Callable[[Generation, RouterError], None], retry_after: Callable[[], float]
    ) -> None:
        self._config = config
        self._fail = fail
        self._retry_after = retry_after

    def set(self, generation: Generation, deadline: float | None) -> None:
        """`deadline` is the request's own, in time.monotonic()'s seconds."""
        now = time.monotonic()
        if self._config.request_timeout_s is not None:
            deadline = min(deadline or math.inf, now + self._config.request_timeout_s)
        if deadline is not None:
            generation.deadline = deadline
            self._expire(generation, deadline - now, DeadlineExceeded)
        if self._config.max_queue_seconds is not None:
            self._expire(generation, self._config.max_queue_seconds, lambda: QueueTimeout(self._retry_after()), True)

    def _expire(
        self, generation: Generation, seconds: float, error: Callable[[], RouterError], only_queued: bool = False
    ) -> None:
        def expired() -> None:
            if not only_queued or (generation.state is State.QUEUED and not generation.num_moves):
                self._fail(generation, error())

        generation.timers.append(asyncio.get_running_loop().call_later(max(0.0, seconds), expired))
