"""From a route's request to a shard and back: admission, the fair queue, batches within the shards' credit.

The router owns a request until its last byte is sent; after dispatch it never reorders. All of it runs in the thread of
the event loop, so nothing here locks.
"""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.adapters.admission import Admission
from lorikeet.router.adapters.loader_client import LoaderClient
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.delivery import Delivery
from lorikeet.router.dispatch.fair_queue import FairQueue, QueueFull
from lorikeet.router.dispatch.recovery import Recovery
from lorikeet.router.dispatch.send_loop import SendLoop
from lorikeet.router.errors import (
    AdapterUnavailable,
    DeadlineExceeded,
    NoShard,
    Overloaded,
    QueueTimeout,
    RouterError,
    ShuttingDown,
)
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.receipts.receipts import Receipts
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.timeline import Timeline
from lorikeet.router.requests.types import GenerationRequest
from lorikeet.router.shards.codec import check_size, submit_message
from lorikeet.router.shards.connection import ShardLink
from lorikeet.router.shards.discovery import Members
from lorikeet.router.shards.placement import Choice, Placement
from lorikeet.router.text.tokenizer import Tokenizer

log = structlog.get_logger()

MAX_RELOADS = 3
"""A request whose adapter was loaded again so often, and still cannot be read by shards, fails."""


class Dispatcher:
    """All generations of one router process and the shards they go to. Implements RouterEvents."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, metrics: Metrics | None = None) -> None:
        if not config.shard_addresses:
            raise ValueError("no shard address is given")
        self.metrics = metrics or Metrics.configured(config)
        self.draining = False
        self.is_leaving = False
        """Whether another router accepts new connections: requests on existing ones are still served."""
        self.config = self._config = config
        """With the lengths that all shards take."""
        self._tokenizer = tokenizer
        self._members = Members(config, self)
        self.links = self._members.links
        self.receipts = Receipts(config, tokenizer.digest, self.links)
        self._placement = Placement(self.links)
        self._chosen: Choice | None = None
        """By `_fits`, for the next request."""
        self._open: set[ShardLink] = set()
        """Shards that may be sent requests now."""
        self._queue = FairQueue(max_waiting=config.max_concurrent_requests)
        self._numbers = itertools.count(1)
        self._queued: dict[int, Generation] = {}
        """By number: in the queue, or waiting for adapters."""
        self._recovery = Recovery(config.recovery_timeout_s, self)
        self._delivery = Delivery(self.metrics, self._queue, self._recovery, self)
        self._send_loop = SendLoop(self.links, self._queue, self)
        self._empty = asyncio.Event()
        self._empty.set()
        self._replaces = config.ready_file is not None and Path(config.ready_file).exists()
        """Whether another router was ready here before this one."""
        self._is_known = asyncio.Event()
        """Set once a shard has been connected, or is not waited for any more."""
        self._queue_seconds = 0.0
        """Moving average of the queue time of recent requests."""
        self._loader = None if config.loader_address is None else LoaderClient(config.loader_address)
        self.admission: Admission | None = None
        """Admission of requests with adapters; None where only the base model is served."""
        if self._loader is not None:
            self.admission = Admission(self._loader, self.links, self._placement, self.metrics.adapters, self)
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    async def start(self) -> None:
        """Begin to connect; returns at once. A router that replaces one begins in recovery: its requests wait."""
        if self._replaces:
            self._recovery.on_all_down()
        self._members.start()
        if self._loader is not None:
            self._tasks.append(asyncio.create_task(self._loader.run(), name="loader"))

    async def stop(self) -> None:
        """End every request and every stream."""
        self._fail_all(ShuttingDown)
        self.draining = True
        await self._members.stop()
        for task in self._tasks:
            task.cancel()
        for error in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    async def drain(self, timeout: float) -> bool:
        """Reject new requests and wait for the running ones. False where some had to be failed after `timeout`."""
        self.draining = True
        if not self.ready:
            self.on_recovery_timeout()
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
        """Whether requests are answered, possibly after a recovery."""
        return self.ready or (self._recovery.is_active and not self.draining)

    async def known(self) -> None:
        """Wait for the first shard, as long as one should be back soon: it determines what requests may ask for."""
        if self._recovery.is_active and self.info is None:
            await self._is_known.wait()

    @property
    def info(self) -> pb.ShardInfo | None:
        """Information on the first shard that has ever been connected."""
        return next((link.info for link in self.links if link.info is not None), None)

    @property
    def num_active(self) -> int:
        """Requests inside the router, queued or running."""
        return len(self._queued) + sum(len(link.running) for link in self.links)

    @property
    def queued(self) -> Iterable[Generation]:
        """Requests that no shard has."""
        return self._queued.values()

    # Requests

    def submit(
        self, request: GenerationRequest, *, deadline: float | None = None, timeline: Timeline | None = None
    ) -> Generation:
        """Queue a request; `deadline` in time.monotonic()'s seconds. `timeline` is filled where one is given.

        Raises ValidationError, a leaf of Refused, or DeadlineExceeded.
        """
        self.check_room(caller=request.caller)
        check_size(request, self.info.vocab_size if self.info is not None else 1 << 31)
        if deadline is not None and deadline <= time.monotonic():
            raise DeadlineExceeded
        if self.num_active >= self._config.max_concurrent_requests and (newest := self._displaced_by(request.caller)):
            self.on_failure(newest, Overloaded(self._retry_after()))
        generation = Generation(next(self._numbers), request, self._tokenizer, self, timeline)
        if generation.is_admitted:
            generation.adapters.check()
            self.on_admit(generation)
        else:
            self._await_adapters(generation)
        self._queued[generation.routing.number] = generation
        self._empty.clear()
        self.on_end()
        self._set_deadlines(generation, deadline)
        return generation

    def check_room(self, num_coming: int = 0, caller: str = "") -> None:
        """Whether another request is accepted in addition to `num_coming` being read. Raises a leaf of Refused."""
        if self.draining:
            raise ShuttingDown
        if not self.healthy:
            raise NoShard
        self.check_load(num_coming, caller)

    def check_load(self, num_coming: int = 0, caller: str = "") -> None:
        """The limit of concurrent requests alone. Raises Overloaded."""
        is_full = self.num_active + num_coming >= self._config.max_concurrent_requests
        if is_full and self._displaced_by(caller) is None:
            raise Overloaded(self._retry_after())

    def _displaced_by(self, caller: str) -> Generation | None:
        """In a full server, the request that makes room for one of `caller`: the newest one that no shard has had, of
        the caller that has the most requests. None where that one has hardly more than `caller`.
        """
        waiting = [each for each in self._queued.values() if each.routing.sent_at is None]
        running = [each for link in self.links for each in link.running.values()]
        numbers = Counter(each.request.caller for each in [*self._queued.values(), *running])
        newest = max(waiting, key=lambda each: (numbers[each.request.caller], each.routing.number), default=None)
        return newest if newest is not None and numbers[newest.request.caller] > numbers[caller] + 1 else None

    def on_admit(self, generation: Generation) -> None:
        for link in self.links:
            link.send_timing.on_arrival(time.monotonic(), is_first=not len(self._queue))
        request, routing = generation.request, generation.routing
        weight = 1.0 if request.adapter is None else request.adapter.weight
        try:
            num_tokens = len(request.prompt_ids)
            self._queue.push(routing.flow, routing.number, num_tokens, weight, request.priority, request.caller)
        except QueueFull:
            raise Overloaded(self._retry_after()) from None
        if generation.timeline is not None:
            generation.timeline.enter("queue")
        self._send_loop.schedule()

    def _await_adapters(self, generation: Generation) -> None:
        """Raises ValidationError, or Overloaded where too many requests wait for that adapter."""
        assert self.admission is not None
        flow = generation.routing.flow
        num_waiting = self.admission.loading.num_waiting(flow) + self._queue.num_waiting(flow)
        if generation.request.adapter is not None and num_waiting >= self._config.most_queued_per_adapter:
            raise Overloaded(self._retry_after())
        if generation.timeline is not None:
            generation.timeline.enter("adapter_load")
        self.admission.admit(generation)

    def _set_deadlines(self, generation: Generation, deadline: float | None) -> None:
        """Fail it at its own time limit, at the server's, and at that of the queue."""
        now, config = time.monotonic(), self._config
        if config.request_timeout_s is not None:
            deadline = min(deadline or math.inf, now + config.request_timeout_s)
        if deadline is not None:
            generation.routing.deadline = deadline
            self._fail_after(generation, deadline - now, DeadlineExceeded)
        if config.max_queue_seconds is not None:
            self._fail_after(generation, config.max_queue_seconds, lambda: QueueTimeout(self._retry_after()), True)

    def _fail_after(
        self, generation: Generation, seconds: float, error: Callable[[], RouterError], only_queued: bool = False
    ) -> None:
        def expire() -> None:
            if not only_queued or (generation.routing.is_queued and not generation.routing.num_retries):
                self.on_failure(generation, error())

        generation.timers.append(asyncio.get_running_loop().call_later(max(0.0, seconds), expire))

    def on_failure(self, generation: Generation, error: RouterError) -> None:
        self.metrics.generation_lost("error")
        self._remove(generation)
        generation.fail(error)

    def on_cancel(self, generation: Generation) -> None:
        self.metrics.generation_lost("abort")
        self._remove(generation)

    def on_complete(self, generation: Generation) -> None:
        self.receipts.finished(generation)

    def _remove(self, generation: Generation) -> None:
        """Remove a request that is not over: from the queue, or by an abort from its shard."""
        number, address = generation.routing.number, generation.routing.shard_address
        if self._queued.pop(number, None) is not None:
            if not self._queue.remove(number) and self.admission is not None:
                self.admission.loading.leave(generation)
        elif (link := next((link for link in self.links if link.address == address), None)) is not None:
            self.metrics.aborts.add(link.abort(generation, time.monotonic()))
        self.on_end()

    def _retry_after(self) -> float:
        """Seconds after which there should be room, estimated from recent queue times."""
        return min(60.0, max(1.0, self._queue_seconds))

    def _fail_all(self, error: Callable[[], RouterError]) -> None:
        running = [generation for link in self.links for generation in link.running.values()]
        for generation in [*self._queued.values(), *running]:
            self.on_failure(generation, error())

    def on_end(self) -> None:
        """The number of requests has changed."""
        gauges = self.metrics.gauges
        gauges["lorax_queue_length"] = len(self._queued)
        gauges["lorikeet_active_requests"] = self.num_active
        if not self.num_active:
            self._queue.forget_idle()
            self._empty.set()

    # Sending

    def on_send_time(self, now: float, open_links: set[ShardLink]) -> None:
        """Send one batch to each of the shards, as large as its credit allows."""
        self._open = open_links
        batches: dict[ShardLink, list[pb.Submit]] = {}
        while (number := self._queue.pop(self._fits)) is not None:
            assert self._chosen is not None
            link, reason = self._chosen
            generation = self._queued.pop(number)
            batches.setdefault(link, []).append(self._dispatch(generation, link, now))
            self._placement.record_sent(generation, link)
            self.metrics.routing_decisions.add(1, reason)
        for link, batch in batches.items():
            link.send_timing.on_send()
            link.client.submit(batch)
            self.metrics.batch_left(len(batch), len(link.running) - len(batch))
        if batches:
            self.on_end()
            self._note_credit()

    def _fits(self, number: int) -> bool:
        """Whether there is a shard for the request now. It waits for one that may not be sent requests yet."""
        choice = self._placement.choose(self._queued[number])
        if choice is None or choice[0] not in self._open:
            return False
        self._chosen = choice
        return True

    def _dispatch(self, generation: Generation, link: ShardLink, now: float) -> pb.Submit:
        request, routing = generation.request, generation.routing
        link.add(generation, now)
        if generation.digest and not routing.num_retries:
            routing.adapter_tier = link.residency.tier(generation.digest, generation.adapters.tier)
        if generation.timeline is not None:
            self._note_dispatch(generation.timeline, generation, link)
        waited = now - routing.queued_at
        self._queue_seconds += 0.1 * (waited - self._queue_seconds)
        if not routing.num_retries:
            routing.waited_s = waited
            self.metrics.request_sent(waited, len(request.prompt_ids))
        if request.adapter is not None and self.admission is not None:
            self.admission.record_sent(request.adapter, generation, link)
        deadline_ms = 0 if routing.deadline is None else max(1, round(1000 * (routing.deadline - now)))
        return submit_message(generation, deadline_ms)

    @staticmethod
    def _note_dispatch(timeline: Timeline, generation: Generation, link: ShardLink) -> None:
        fields: dict[str, str | int] = {"shard": link.address, "attempt": generation.routing.num_retries + 1}
        if generation.routing.adapter_tier:
            fields["tier"] = generation.routing.adapter_tier
        timeline.enter("dispatch", **fields)

    # Shards

    def incompatibility(self, info: pb.ShardInfo) -> str:
        return self._members.incompatibility(info)

    def on_membership_change(self) -> None:
        self._placement.on_membership_change()
        self._send_loop.schedule()

    def on_serving_change(self) -> None:
        """A shard that shuts down accepts nothing new; without another one, requests wait."""
        if not self.ready:
            self._recovery.on_all_down()

    def on_connect(self, link: ShardLink) -> None:
        assert link.info is not None
        self.config = self._config.within(
            min(each.info.max_total_tokens for each in self.links if each.info is not None)
        )
        if self.admission is not None:
            self.admission.on_connect(link)
        self._is_known.set()
        self.metrics.set_info(link.info, link.index)
        log.info("shard_connected", address=link.address, model=link.info.model_id, num_pages=link.info.num_pages)

    def on_disconnect(self, link: ShardLink, lost: list[Generation], reason: str) -> None:
        if self.admission is not None:
            self.admission.on_disconnect(link)
        self.metrics.shard_gone(link.index)
        self._recovery.on_disconnect(link, lost)
        if not self.ready:
            if self.draining:
                self.on_recovery_timeout()
            else:
                self._recovery.on_all_down()
        self.on_end()
        self._note_credit()
        if reason:
            self.metrics.shard_reconnects.add()
            log.warning("shard_lost", address=link.address, reason=reason, num_requests=len(lost))

    def on_retry(self, generation: Generation) -> None:
        """Its prompt and output so far go ahead of the other requests of its flow."""
        routing = generation.routing
        self.metrics.requests_retried.add()
        self._queued[routing.number] = generation
        if generation.timeline is not None:
            generation.timeline.leave("retried")
        if self.admission is not None and not self.admission.is_current(generation):
            self._reload(generation)
            return
        if generation.timeline is not None:
            generation.timeline.enter("queue")
        self._queue.requeue(routing.flow, routing.number, generation.num_known, generation.request.caller)
        self._send_loop.schedule()

    def _reload(self, generation: Generation) -> None:
        """A shard could not read the file of its adapter: have it loaded again."""
        generation.routing.num_reloads += 1
        try:
            if generation.routing.num_reloads > MAX_RELOADS:
                reason = generation.routing.last_error
                raise AdapterUnavailable(f"the adapter was loaded {MAX_RELOADS} times, and is not readable: {reason}")
            generation.reload()
            self._await_adapters(generation)
        except RouterError as error:
            self.on_failure(generation, error)

    def is_used(self, digest: str) -> bool:
        """Whether a request that has not ended uses the content."""
        running = (generation for link in self.links for generation in link.running.values())
        return any(digest in generation.adapters.digests for generation in (*self._queued.values(), *running))

    def on_recovery_timeout(self) -> None:
        self._is_known.set()
        for generation in list(self._queued.values()):
            self.on_failure(generation, NoShard())

    def on_output(self, link: ShardLink, output: pb.StepOutput) -> int:
        """Deliver the tokens, then use the room that this step has freed."""
        now = time.monotonic()
        # first: a request that the shard returns because of its adapter needs another content
        if output.adapters and self.admission is not None:
            self.admission.update(link, output.adapters)
        num_tokens = self._delivery.deliver(link, output, now)
        has_stepped = link.update(output, now)
        if output.HasField("credit"):
            self._note_credit()
            if link.ready:
                self._recovery.on_ready()
        self.metrics.record_output(output, num_tokens, link.index)
        if len(self._queue):
            if has_stepped:
                self.on_send_time(now, {link})
            self._send_loop.schedule()
        return self._delivery.num_updated

    def on_quiet(self) -> None:
        self._delivery.wake_readers()

    def _note_credit(self) -> None:
        gauges = self.metrics.gauges
        gauges["lorikeet_credit_requests"] = sum(link.credit.num_requests for link in self.links)
        gauges["lorikeet_credit_kv_tokens"] = sum(link.credit.num_kv_tokens for link in self.links)
        gauges["lorikeet_shard_ready"] = float(self.ready)
