"""From a route's request to a shard and back: admission, the fair queue, batches within the shard's credit.

The router owns a request until its last byte is sent; after dispatch it never reorders. All of it runs in the event
loop's thread, so nothing here locks.
"""

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable

import structlog

from proto import shard_pb2 as pb
from router.admission import Admission
from router.config import RouterConfig
from router.errors import (
    DeadlineExceeded,
    GenerationFailed,
    NoShard,
    Overloaded,
    QueueTimeout,
    RouterError,
    ShuttingDown,
)
from router.generation import GenerationRequest
from router.inflight import Generation, State
from router.loader_client import LoaderClient
from router.metrics import Metrics
from router.placement import Placement
from router.queue import FairQueue, QueueFull
from router.shard_link import ShardLink
from router.text.tokenizer import Tokenizer
from router.wire import submit_message

log = structlog.get_logger()

BASE_KEY = ""
"""Queue key of requests for the bare base model."""


class Dispatcher:
    """All generations of one router process and the shards they go to."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, metrics: Metrics | None = None) -> None:
        if not config.shard_addresses:
            raise ValueError("no shard address is given")
        self.metrics = metrics or Metrics(config.max_input_length, config.max_total_tokens)
        self.draining = False
        self._config = config
        self._tokenizer = tokenizer
        self.links = [ShardLink(index, address, self) for index, address in enumerate(config.shard_addresses)]
        self._placement = Placement(self.links)
        self._chosen = self.links[0]
        """By `_fits`, for the request that is about to leave."""
        self._open: set[ShardLink] = set()
        """Shards that may be sent requests in this turn."""
        self._queue = FairQueue(max_waiting=config.max_concurrent_requests)
        self._numbers = itertools.count(1)
        self._queued: dict[int, Generation] = {}
        self._untold: list[Generation] = []
        """Requests with news that their readers don't know of."""
        self._pump_soon = False
        self._pump_timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._queue_seconds = 0.0
        """Moving mean of the time that requests waited lately."""
        self._loader = None if config.loader_address is None else LoaderClient(config.loader_address)
        self.admission = None
        """Of requests with adapters; None where the base model is served alone."""
        if self._loader is not None:
            self.admission = Admission(
                self._loader, self.links, self._placement, self._enqueue, self._fail, self.metrics.adapters
            )
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        for link in self.links:
            self._tasks.append(asyncio.create_task(link.client.run(), name=f"shard {link.index}"))
        if self._loader is not None:
            self._tasks.append(asyncio.create_task(self._loader.run(), name="loader"))

    async def stop(self) -> None:
        """End every request and the stream."""
        self._fail_all(ShuttingDown)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def drain(self, timeout: float) -> bool:
        """Take no new request and wait for the running ones; the rest get an error. True when nothing was cut."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            self._fail_all(ShuttingDown)
            return False
        return True

    @property
    def ready(self) -> bool:
        """Whether a request could be sent."""
        return any(link.ready for link in self.links)

    @property
    def healthy(self) -> bool:
        """Whether a shard is there and, while it owes answers, was heard lately."""
        return any(link.healthy for link in self.links)

    @property
    def info(self) -> pb.ShardInfo | None:
        """What the first shard that was ever there said about itself."""
        return next((link.info for link in self.links if link.info is not None), None)

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    @property
    def num_active(self) -> int:
        """Requests inside the router, queued or running."""
        return len(self._queued) + sum(len(link.running) for link in self.links)

    # Requests

    def submit(self, request: GenerationRequest, *, deadline: float | None = None) -> Generation:
        """Queue a request; `deadline` in time.monotonic()'s seconds. Raises ValidationError or a leaf of Refused."""
        if self.draining:
            raise ShuttingDown
        if not self.ready:
            raise NoShard
        if self.num_active >= self._config.max_concurrent_requests:
            raise Overloaded(self._retry_after())
        generation = Generation(next(self._numbers), request, self._tokenizer, self._release)
        if generation.is_admitted:
            generation.contents.check()
            self._enqueue(generation, BASE_KEY)
        else:
            self._admit(generation)
        self._queued[generation.number] = generation
        self._empty.clear()
        self._note_active()
        self._set_timers(generation, deadline)
        return generation

    def _enqueue(self, generation: Generation, key: str, weight: float = 1.0) -> None:
        """From here on it may be sent."""
        for link in self.links:
            link.pacing.arrived(time.monotonic(), is_first=not len(self._queue))
        try:
            self._queue.push(key, generation.number, len(generation.request.prompt_ids), weight)
        except QueueFull:
            raise Overloaded(self._retry_after()) from None
        self._pump_later()

    def _admit(self, generation: Generation) -> None:
        """Raises ValidationError, or Overloaded where too many wait for that adapter."""
        assert self.admission is not None
        lane = generation.lane
        num_waiting = self.admission.loading.num_waiting(lane) + self._queue.num_waiting(lane)
        if generation.request.adapter is not None and num_waiting >= self._config.most_queued_per_adapter:
            raise Overloaded(self._retry_after())
        self.admission.admit(generation)

    def _fail(self, generation: Generation, error: RouterError) -> None:
        self._release(generation)
        generation.fail(error)

    def _set_timers(self, generation: Generation, deadline: float | None) -> None:
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
            if not only_queued or generation.state is State.QUEUED:
                self._fail(generation, error())

        generation.timers.append(asyncio.get_running_loop().call_later(max(0.0, seconds), expired))

    def _release(self, generation: Generation) -> None:
        """Forget a request that is not over: out of the queue, or an Abort to the shard."""
        if self._queued.pop(generation.number, None) is not None:
            if not self._queue.remove(generation.number) and self.admission is not None:
                self.admission.leave(generation)
        elif generation.link is not None and generation.link.abort(generation, time.monotonic()):
            self.metrics.aborts.add()
        self._note_active()

    def _retry_after(self) -> float:
        """Seconds until a place should be free, from how long requests waited lately."""
        return min(60.0, max(1.0, self._queue_seconds))

    def _fail_all(self, error: Callable[[], RouterError]) -> None:
        running = [generation for link in self.links for generation in link.running.values()]
        for generation in [*self._queued.values(), *running]:
            self._fail(generation, error())

    def _note_active(self) -> None:
        gauges = self.metrics.gauges
        gauges["lorax_queue_length"] = len(self._queued)
        gauges["lorikeet_active_requests"] = self.num_active
        if not self.num_active:
            self._queue.forget_idle()
            self._empty.set()

    # Sending

    def _pump_later(self) -> None:
        """Send what may be sent once the requests of this turn of the loop are all in."""
        if not self._pump_soon:
            self._pump_soon = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_soon = False
        if not len(self._queue):
            return
        now = time.monotonic()
        times = {link: link.pacing.send_at(now, shard_idle=not link.running) for link in self.links}
        self._send(now, {link for link, at in times.items() if at <= now})
        later = min((at for at in times.values() if now < at), default=math.inf)
        if later < math.inf and len(self._queue):
            self._pump_at(later)

    def _pump_at(self, moment: float) -> None:
        """At a moment, of time.monotonic(), which may be before one that was asked for earlier."""
        loop = asyncio.get_running_loop()
        when = loop.time() + moment - time.monotonic()
        if self._pump_timer is not None:
            if self._pump_timer.when() <= when:
                return
            self._pump_timer.cancel()
        self._pump_timer = loop.call_at(when, self._pump_on_time)

    def _pump_on_time(self) -> None:
        self._pump_timer = None
        self._pump()

    def _send(self, now: float, open_links: set[ShardLink]) -> None:
        """One batch for each of the shards, as large as its credit allows."""
        self._open = open_links
        batches: dict[ShardLink, list[pb.Submit]] = {}
        while (number := self._queue.pop(self._fits)) is not None:
            submit = self._dispatch(self._queued.pop(number), self._chosen, now)
            batches.setdefault(self._chosen, []).append(submit)
        for link, batch in batches.items():
            link.pacing.sent()
            link.client.submit(batch)
            self.metrics.batch_left(len(batch))
        if batches:
            self._note_active()
            self._note_credit()

    def _fits(self, number: int) -> bool:
        """Whether there is a shard for the request now. One whose turn has yet to come is waited for."""
        generation = self._queued[number]
        link = self._placement.choose(generation.contents.home, len(generation.request.prompt_ids))
        if link is None or link not in self._open:
            return False
        self._chosen = link
        return True

    def _dispatch(self, generation: Generation, link: ShardLink, now: float) -> pb.Submit:
        request = generation.request
        link.take(generation, now)
        waited = now - generation.queued_at
        self._queue_seconds += 0.1 * (waited - self._queue_seconds)
        self.metrics.request_sent(waited, len(request.prompt_ids))
        if request.adapter is not None and self.admission is not None:
            self.admission.sent(request.adapter, generation, link)
        deadline_ms = 0 if generation.deadline is None else max(1, round(1000 * (generation.deadline - now)))
        return submit_message(generation, self._tokenizer.eos_ids, deadline_ms)

    # What shards say (LinkOwner)

    def link_up(self, link: ShardLink) -> None:
        assert link.info is not None
        if self.admission is not None:
            self.admission.link_up(link)
        self.metrics.shard_is(link.info, link.index)
        log.info("shard_connected", address=link.address, model=link.info.model_id, num_pages=link.info.num_pages)

    def link_down(self, link: ShardLink, lost: list[Generation], reason: str) -> None:
        if self.admission is not None:
            self.admission.link_down(link)
        for generation in lost:
            generation.fail(GenerationFailed(f"the connection to the shard was lost ({reason})"))
        if not self.ready:
            for generation in list(self._queued.values()):
                self._fail(generation, NoShard())
        self._note_active()
        self._note_credit()
        if reason:
            self.metrics.shard_reconnects.add()
            log.warning("shard_lost", address=link.address, reason=reason, num_requests=len(lost))

    def link_output(self, link: ShardLink, output: pb.StepOutput) -> int:
        """Give every request its tokens, then use the room that this step made.

        Returns the number of requests whose readers wait for `link_quiet` to be told.
        """
        now = time.monotonic()
        num_tokens = num_adapted = 0
        running = link.running
        for part in output.outputs:
            generation = running.get(part.id)
            if generation is not None:
                num_fed = self._feed(generation, part, now)
                num_tokens += num_fed
                if generation.digest and num_fed:
                    num_adapted += num_fed
                    self._queue.charge(generation.lane, num_fed)
                    self._received(generation, num_fed)
        if num_tokens > num_adapted:
            self._queue.charge(BASE_KEY, num_tokens - num_adapted)
        if output.adapters and self.admission is not None:
            self.admission.moved(link, output.adapters)
        has_stepped = link.stepped(output, now)
        if output.HasField("credit"):
            self._note_credit()
        self.metrics.shard_spoke(output, num_tokens, link.index)
        if len(self._queue):
            if has_stepped:
                self._send(now, {link})
            self._pump_later()
        return len(self._untold)

    def _received(self, generation: Generation, num_tokens: int) -> None:
        if generation.request.adapter is not None:
            self.metrics.adapters.received(generation.request.adapter, generation.digest, num_tokens)

    def link_quiet(self) -> None:
        """Nothing more is at hand: let readers see what their requests got."""
        untold, self._untold = self._untold, []
        for generation in untold:
            generation.wake()

    def _feed(self, generation: Generation, part: pb.RequestOutput, now: float) -> int:
        metrics, previous = self.metrics, generation.last_token_at
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
            metrics.guessed(part, num_tokens, generation.request.adapter, generation.digest)
        if generation.state is State.DONE:
            self._end(generation, part, now)
        return num_tokens

    def _end(self, generation: Generation, part: pb.RequestOutput, now: float) -> None:
        link = generation.link
        assert link is not None
        if part.finish_reason:
            link.ended(part.id, now)
        elif link.abort(generation, now):  # complete at a stop string: the shard does not know
            self.metrics.aborts.add()
        self._note_active()
        if generation.num_generated and generation.sent_at is not None:
            request = generation.request
            self.metrics.generation_ended(
                now - generation.sent_at,
                generation.num_generated,
                generation.num_skipped,
                len(request.prompt_ids),
                request.max_new_tokens,
            )

    def _note_credit(self) -> None:
        gauges = self.metrics.gauges
        gauges["lorikeet_credit_requests"] = sum(link.credit.num_requests for link in self.links)
        gauges["lorikeet_credit_kv_tokens"] = sum(link.credit.num_kv_tokens for link in self.links)
        gauges["lorikeet_shard_ready"] = float(self.ready)
