"""What becomes of requests whose shard is gone or could not go on with them, and how long they wait for another.

Knows generations and links; the queue that they go back to is the dispatcher's.
"""

import asyncio
from collections.abc import Callable

import structlog

from lorikeet.router.errors import EndsShards, GenerationFailed, RouterError
from lorikeet.router.requests.crash_suspect import Suspicion
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

    def none_is_left(self) -> None:
        """The last shard has gone."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end)

    def one_is_there(self) -> None:
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
            self._blame(generation, GenerationFailed(error))
        else:
            self._again(generation)

    def _move(self, link: ShardLink, generation: Generation) -> None:
        if generation.wire_id in link.computing:
            self._blame(generation, EndsShards())
            return
        if not generation.is_heard:
            generation.suspicion = generation.suspicion or Suspicion()
            generation.suspicion.doubted()
        self._again(generation)

    def _blame(self, generation: Generation, error: RouterError) -> None:
        """It was computed by a step that went wrong. Fails with `error` where the request must have been the reason."""
        suspicion = generation.suspicion = generation.suspicion or Suspicion()
        if suspicion.blamed():
            log.error("request_refused", request_id=generation.request.request_id, num_ends=suspicion.num_ends)
            generation.fail(error)
        else:
            self._again(generation)

    def _again(self, generation: Generation) -> None:
        generation.lost()
        if generation.is_over:
            generation.wake()
        else:
            self._put_back(generation)
