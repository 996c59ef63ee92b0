"""Delivers the outputs of shards: each request gets its part of a message, and is counted.

Readers are woken once no further message is at hand.
"""

from collections import Counter

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.dispatch.fair_queue import FairQueue
from lorikeet.router.dispatch.recovery import MAX_RETRIES, Recovery
from lorikeet.router.errors import GenerationFailed
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.connection import RouterEvents, ShardLink

log = structlog.get_logger()


class Delivery:
    """Delivery for one dispatcher, whose queue is charged for output tokens."""

    def __init__(self, metrics: Metrics, queue: FairQueue, recovery: Recovery, events: RouterEvents) -> None:
        self._metrics = metrics
        self._queue = queue
        self._recovery = recovery
        self._events = events
        self._updated: list[Generation] = []
        """Requests whose readers have not been woken for their last output."""

    @property
    def num_updated(self) -> int:
        return len(self._updated)

    def deliver(self, link: ShardLink, output: pb.StepOutput, now: float) -> int:
        """Take a message of a shard; return the number of its tokens that count."""
        num_tokens = 0
        charged: Counter[tuple[str, str]] = Counter()
        """By flow and caller."""
        for part in output.outputs:
            generation = link.running.get(part.id)
            if generation is None:
                continue
            num_fed = self._feed(link, generation, output, part, now)
            num_tokens += num_fed
            request = generation.request
            charged[generation.routing.flow, request.caller] += num_fed
            if request.adapter is not None and num_fed:
                self._metrics.adapters.received(request.adapter, generation.digest, num_fed)
        for (flow, caller), num_charged in charged.items():
            self._queue.charge(flow, num_charged, caller)
        return num_tokens

    def wake_readers(self) -> None:
        updated, self._updated = self._updated, []
        for generation in updated:
            generation.wake()

    def _feed(
        self, link: ShardLink, generation: Generation, output: pb.StepOutput, part: pb.RequestOutput, now: float
    ) -> int:
        metrics, routing, previous = self._metrics, generation.routing, generation.last_token_at
        may_retry = part.retryable and part.finish_reason == pb.FINISH_ERROR and routing.num_retries < MAX_RETRIES
        error = part.error if may_retry else ""
        if part.retryable and part.in_step:
            metrics.steps.has_failed = True
        if error:
            part.finish_reason = pb.FINISH_NONE
        self._updated.append(generation)
        routing.has_output = True
        if routing.poison_tracker.isolation_steps:
            routing.poison_tracker.record_steps(sum(part.step_ends))
        try:
            num_tokens = generation.feed(part, now)
        except Exception as exception:
            # One request fails alone. Neither the exception's text nor its locals: both may hold a prompt.
            kind, request_id = type(exception).__name__, generation.request.request_id
            log.error("output_malformed", kind=kind, request_id=request_id)
            generation.fail(GenerationFailed("the router could not read the shard's output"))
            num_tokens = 0
        if generation.timeline is not None:
            generation.timeline.step(output, part, num_tokens, now)
        if num_tokens:
            if previous is not None:
                metrics.tokens_arrived(now - previous, num_tokens)
            else:
                metrics.first_token(now - routing.queued_at, generation.num_cached)
        if part.num_drafted:
            metrics.speculation_stats(part, num_tokens, generation.request.adapter, generation.digest)
        if generation.is_over:
            self._end(link, generation, part, now)
        elif error:
            link.remove(part.id, now)
            self._recovery.on_error(generation, error, part.in_step)
        return num_tokens

    def _end(self, link: ShardLink, generation: Generation, part: pb.RequestOutput, now: float) -> None:
        if part.finish_reason:
            link.remove(part.id, now)
        elif link.abort(generation, now):  # complete at a stop string, which the shard does not know
            self._metrics.aborts.add()
        self._events.on_end()
        if generation.finish_reason is None:
            self._metrics.generation_lost("error")
        if generation.pooled and generation.finish_reason is not None and generation.routing.sent_at is not None:
            self._metrics.pooled_ended(generation, now - generation.routing.sent_at)
        if generation.num_generated and generation.routing.sent_at is not None:
            self._metrics.generation_ended(generation, now - generation.routing.sent_at)
