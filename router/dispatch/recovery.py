"""Retries requests whose shard is gone or could not continue them, and limits how long they wait for another shard."""

import asyncio

import structlog

from lorikeet.router.errors import GenerationFailed, PoisonRequest, RouterError
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.connection import RouterEvents, ShardLink

log = structlog.get_logger()

MAX_RETRIES = 64
"""A request that was retried so often fails with the shard's own error."""


class Recovery:
    """Recovery of the requests of one dispatcher."""

    def __init__(self, timeout_s: float, events: RouterEvents) -> None:
        self._timeout_s = timeout_s
        self._events = events
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_active(self) -> bool:
        """Whether there was a shard, there is none now, and one should be back soon."""
        return self._timer is not None

    def on_all_down(self) -> None:
        """No shard accepts requests any more."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._on_timeout)

    def on_ready(self) -> None:
        """A shard accepts requests."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        self._events.on_recovery_timeout()

    def on_disconnect(self, link: ShardLink, lost: list[Generation]) -> None:
        """A shard is gone, and with it the requests in `lost`, the first one sent first."""
        for generation in reversed(lost):
            routing = generation.routing
            if routing.wire_id in link.step_requests:
                self._record_crash(generation, PoisonRequest())
                continue
            if not routing.has_output:
                routing.poison_tracker.suspect()
            self._retry(generation)

    def on_error(self, generation: Generation, error: str, in_step: bool) -> None:
        """A shard could not continue a request; another may, or the same one in another batch."""
        log.warning("request_retried", request_id=generation.request.request_id, reason=error[:512])
        generation.routing.last_error = error[:512]
        if in_step:
            self._record_crash(generation, GenerationFailed(error))
        else:
            self._retry(generation)

    def _record_crash(self, generation: Generation, error: RouterError) -> None:
        """A step that computed the request failed. Fail with `error` where the request must be the cause."""
        tracker = generation.routing.poison_tracker
        if tracker.record_crash():
            request_id = generation.request.request_id
            log.error("request_failed_poison", request_id=request_id, num_crashes=tracker.num_crashes)
            generation.fail(error)
        else:
            self._retry(generation)

    def _retry(self, generation: Generation) -> None:
        generation.requeue()
        if generation.is_over:
            generation.wake()
        else:
            self._events.on_retry(generation)
