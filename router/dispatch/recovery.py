"""What becomes of requests whose shard is gone or could not go on with them, and how long they wait for another.

Knows generations and links; the queue that they go back to is the dispatcher's.
"""

import asyncio
from collections.abc import Callable

import structlog

from lorikeet.router.errors import GenerationFailed, PoisonRequest, RouterError
from lorikeet.router.requests.crash_suspect import PoisonRequestTracker
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.connection import ShardLink

log = structlog.get_logger()

MOST_MOVES = 64
"""A request that was refused or failed with others so often gets the shard's own word for it."""


class Recovery:
    """Of one dispatcher, whose `put_back` queues a request again, and whose `give_up` fails those that still wait."""

    def __init__(self, timeout_s: float, put_back: Callable[[Generation], None], give_up: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._put_back = put_back
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether there was a shard, there is none now, and one should be back soon."""
        return self._timer is not None

    def on_all_down(self) -> None:
        """The last shard has gone."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end)

    def on_ready(self) -> None:
        """A shard takes requests."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        self._give_up()

    def lost(self, link: ShardLink, generations: list[Generation]) -> None:
        """A shard has gone while these ran there, the first to leave the queue first."""
        for generation in reversed(generations):
            self._move(link, generation)

    def failed(self, generation: Generation, error: str, in_step: bool) -> None:
        """A shard could not go on with a request; another may, or the same one without those beside it."""
        log.warning("request_moves", request_id=generation.request.request_id, reason=error[:512])
        if in_step:
            self._convict(generation, GenerationFailed(error))
        else:
            self._again(generation)

    def _move(self, link: ShardLink, generation: Generation) -> None:
        if generation.wire_id in link.step_requests:
            self._convict(generation, PoisonRequest())
            return
        if not generation.is_heard:
            generation.poison_tracker = generation.poison_tracker or PoisonRequestTracker()
            generation.poison_tracker.suspected()
        self._again(generation)

    def _convict(self, generation: Generation, error: RouterError) -> None:
        """It was computed by a step that went wrong. Fails with `error` where the request must have been the reason."""
        poison_tracker = generation.poison_tracker = generation.poison_tracker or PoisonRequestTracker()
        if poison_tracker.convicted():
            log.error("request_refused", request_id=generation.request.request_id, num_ends=poison_tracker.num_ends)
            generation.fail(error)
        else:
            self._again(generation)

    def _again(self, generation: Generation) -> None:
        generation.lost()
        if generation.is_over:
            generation.wake()
        else:
            self._put_back(generation)
