"""What shards computed on its way to who asked for it: each request gets its part of a message, and is counted.

Knows generations, links and metrics. Readers are told when no further message is at hand, not before.
"""

from collections.abc import Callable

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.dispatch.recovery import MOST_MOVES, Recovery
from lorikeet.router.errors import GenerationFailed
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.generation import Generation
from lorikeet.router.shards.connection import ShardLink

log = structlog.get_logger()

BASE_KEY = ""
"""Queue key of requests for the bare base model."""


class Delivery:
    """Of one dispatcher, whose queue is charged for tokens, and which is told when a request has ended."""

    def __init__(
        self,
        metrics: Metrics,
        charge: Callable[[str, int], None],
        recovery: Recovery,
        ended: Callable[[], None],
    ) -> None:
        self._metrics = metrics
        self._charge = charge
        self._recovery = recovery
        self._ended = ended
        self._untold: list[Generation] = []
        """Requests with news that their readers don't know of."""

    @property
    def num_untold(self) -> int:
        return len(self._untold)

    def take(self, link: ShardLink, output: pb.StepOutput, now: float) -> int:
        """A message of a shard; the number of its tokens that count."""
        num_tokens = num_adapted = 0
        running = link.running
        for part in output.outputs:
            generation = running.get(part.id)
            if generation is not None:
                num_fed = self._feed(link, generation, part, now)
                num_tokens += num_fed
                if generation.digest and num_fed:
                    num_adapted += num_fed
                    self._charge(generation.flow, num_fed)
                    self._received(generation, num_fed)
        if num_tokens > num_adapted:
            self._charge(BASE_KEY, num_tokens - num_adapted)
        return num_tokens

    def wake_readers(self) -> None:
        """Let readers see what their requests got."""
        untold, self._untold = self._untold, []
        for generation in untold:
            generation.wake()

    def _received(self, generation: Generation, num_tokens: int) -> None:
        if generation.request.adapter is not None:
            self._metrics.adapters.received(generation.request.adapter, generation.digest, num_tokens)

    def _feed(self, link: ShardLink, generation: Generation, part: pb.RequestOutput, now: float) -> int:
        metrics, previous = self._metrics, generation.last_token_at
        may_move = part.retryable and part.finish_reason == pb.FINISH_ERROR
        failed = part.error if may_move and generation.num_moves < MOST_MOVES else ""
        if failed:
            part.finish_reason = pb.FINISH_NONE
        self._untold.append(generation)
        try:
            num_tokens = generation.feed(part, now)
        except Exception as error:
            # One request fails alone. Neither the exception's text nor its locals: both may hold a prompt.
            log.error("output_not_understood", kind=type(error).__name__, request_id=generation.request.request_id)
            generation.fail(GenerationFailed("the router could not read the shard's output"))
            num_tokens = 0
        if num_tokens:
            if previous is not None:
                metrics.inter_token_latency.observe((now - previous) / num_tokens, num_tokens)
            else:
                metrics.first_token(now - generation.queued_at, generation.num_cached)
        if part.num_drafted:
            metrics.speculation_stats(part, num_tokens, generation.request.adapter, generation.digest)
        if generation.is_over:
            self._end(link, generation, part, now)
        elif failed:
            link.ended(part.id, now)
            self._recovery.failed(generation, failed, part.in_step)
        return num_tokens

    def _end(self, link: ShardLink, generation: Generation, part: pb.RequestOutput, now: float) -> None:
        if part.finish_reason:
            link.ended(part.id, now)
        elif link.abort(generation, now):  # complete at a stop string: the shard does not know
            self._metrics.aborts.add()
        self._ended()
        if generation.num_generated and generation.sent_at is not None:
            request = generation.request
            self._metrics.generation_ended(
                now - generation.sent_at,
                generation.num_generated,
                generation.num_skipped,
                len(request.prompt_ids),
                request.max_new_tokens,
            )
