"""From a route's request to a shard and back: admission, the fair queue, batches within the shard's credit.

The router owns a request until its last byte is sent; after dispatch it never reorders. All of it runs in the event
loop's thread, so nothing here locks.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.adapters.admission import Admission
from lorikeet.router.adapters.loader_client import LoaderClient
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.delivery import BASE_KEY, Delivery
from lorikeet.router.dispatch.fair_queue import FairQueue, QueueFull
from lorikeet.router.dispatch.recovery import Recovery
from lorikeet.router.dispatch.send_loop import SendLoop
from lorikeet.router.errors import DeadlineExceeded, NoShard, Overloaded, RouterError, ShuttingDown
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.deadlines import Deadlines
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import GenerationRequest
from lorikeet.router.shards.codec import submit_message
from lorikeet.router.shards.compatibility import incompatible
from lorikeet.router.shards.connection import ShardLink
from lorikeet.router.shards.credentials import ShardAccess
from lorikeet.router.shards.discovery import Members
from lorikeet.router.shards.placement import Choice, Placement
from lorikeet.router.text.tokenizer import Tokenizer

log = structlog.get_logger()


class Dispatcher:
    """All generations of one router process and the shards they go to."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, metrics: Metrics | None = None) -> None:
        if not config.shard_addresses:
            raise ValueError("no shard address is given")
        self.metrics = metrics or Metrics(config.max_input_length, config.max_total_tokens)
        self.draining = False
        self.is_leaving = False
        """Whether another router takes new connections: what comes on old ones is still served."""
        self.when_finished: Callable[[Generation], None] = lambda generation: None
        """Told of each text that is complete."""
        self._config = config
        self._tokenizer = tokenizer
        self._access = ShardAccess.of(config)
        self._members = Members(config.shard_addresses, self._make_link, self._members_changed)
        self.links = self._members.links
        self._placement = Placement(self.links)
        self._chosen: Choice | None = None
        """By `_fits`, for the request that is about to leave."""
        self._open: set[ShardLink] = set()
        """Shards that may be sent requests in this turn."""
        self._queue = FairQueue(max_waiting=config.max_concurrent_requests)
        self._numbers = itertools.count(1)
        self._queued: dict[int, Generation] = {}
        self._recovery = Recovery(config.recovery_timeout_s, self._put_back, self._give_up)
        self._delivery = Delivery(self.metrics, self._queue.charge, self._recovery, self._note_active)
        self._deadlines = Deadlines(config, self._fail, self._retry_after)
        self._send_loop = SendLoop(self.links, self._queue.__len__, self._send)
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
        self._members.start()
        if self._loader is not None:
            self._tasks.append(asyncio.create_task(self._loader.run(), name="loader"))

    async def stop(self) -> None:
        """End every request and the stream."""
        self._fail_all(ShuttingDown)
        self.draining = True
        await self._members.stop()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def drain(self, timeout: float) -> bool:
        """Take no new request and wait for the running ones; the rest get an error. True when nothing was cut."""
        self.draining = True
        if not self.ready:
            self._give_up()
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
    def recovers(self) -> bool:
        """Whether requests wait for a shard that should be back soon."""
        return self._recovery.is_under_way and not self.draining

    @property
    def healthy(self) -> bool:
        """Whether requests are answered, if not at once."""
        return self.ready or self.recovers

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

    def _make_link(self, index: int, address: str, name: str) -> ShardLink:
        marks, timeout_s = self._config.stuck_files, self._config.step_timeout_s
        return ShardLink(
            index, address, self, timeout_s, marks[index] if index < len(marks) else "", self._access, name
        )

    def _members_changed(self) -> None:
        self._placement.changed()
        self._send_loop.soon()

    # Requests

    def submit(self, request: GenerationRequest, *, deadline: float | None = None) -> Generation:
        """Queue a request; `deadline` in time.monotonic()'s seconds. Raises ValidationError, a leaf of Refused, or
        DeadlineExceeded.
        """
        self.check_room()
        if deadline is not None and deadline <= time.monotonic():
            raise DeadlineExceeded
        generation = Generation(next(self._numbers), request, self._tokenizer, self._release, self.when_finished)
        if generation.is_admitted:
            generation.contents.check()
            self._enqueue(generation, BASE_KEY)
        else:
            self._admit(generation)
        self._queued[generation.number] = generation
        self._empty.clear()
        self._note_active()
        self._deadlines.set(generation, deadline)
        return generation

    def check_room(self, num_coming: int = 0) -> None:
        """Whether another request can be taken beside `num_coming` that are being read. Raises a leaf of Refused."""
        if self.draining:
            raise ShuttingDown
        if not self.healthy:
            raise NoShard
        if self.num_active + num_coming >= self._config.max_concurrent_requests:
            raise Overloaded(self._retry_after())

    def _enqueue(self, generation: Generation, key: str, weight: float = 1.0) -> None:
        """From here on it may be sent."""
        for link in self.links:
            link.pacing.arrived(time.monotonic(), is_first=not len(self._queue))
        try:
            self._queue.push(key, generation.number, len(generation.request.prompt_ids), weight)
        except QueueFull:
            raise Overloaded(self._retry_after()) from None
        self._send_loop.soon()

    def _admit(self, generation: Generation) -> None:
        """Raises ValidationError, or Overloaded where too many wait for that adapter."""
        assert self.admission is not None
        flow = generation.flow
        num_waiting = self.admission.loading.num_waiting(flow) + self._queue.num_waiting(flow)
        if generation.request.adapter is not None and num_waiting >= self._config.most_queued_per_adapter:
            raise Overloaded(self._retry_after())
        self.admission.admit(generation)

    def _fail(self, generation: Generation, error: RouterError) -> None:
        self._release(generation)
        generation.fail(error)

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

    def _send(self, now: float, open_links: set[ShardLink]) -> None:
        """One batch for each of the shards, as large as its credit allows."""
        self._open = open_links
        batches: dict[ShardLink, list[pb.Submit]] = {}
        while (number := self._queue.pop(self._fits)) is not None:
            assert self._chosen is not None
            link, reason = self._chosen
            generation = self._queued.pop(number)
            batches.setdefault(link, []).append(self._dispatch(generation, link, now))
            self._placement.sent(generation, link)
            self.metrics.placements.add(1, reason)
        for link, batch in batches.items():
            link.pacing.sent()
            link.client.submit(batch)
            self.metrics.batch_left(len(batch))
        if batches:
            self._note_active()
            self._note_credit()

    def _fits(self, number: int) -> bool:
        """Whether there is a shard for the request now. One whose turn has yet to come is waited for."""
        choice = self._placement.choose(self._queued[number])
        if choice is None or choice[0] not in self._open:
            return False
        self._chosen = choice
        return True

    def _dispatch(self, generation: Generation, link: ShardLink, now: float) -> pb.Submit:
        request = generation.request
        link.take(generation, now)
        waited = now - generation.queued_at
        self._queue_seconds += 0.1 * (waited - self._queue_seconds)
        if not generation.num_moves:
            generation.waited_s = waited
            self.metrics.request_sent(waited, len(request.prompt_ids))
        if request.adapter is not None and self.admission is not None:
            self.admission.sent(request.adapter, generation, link)
        deadline_ms = 0 if generation.deadline is None else max(1, round(1000 * (generation.deadline - now)))
        return submit_message(generation, self._tokenizer.eos_ids, deadline_ms)

    # What shards say (LinkOwner)

    def link_incompatible(self, info: pb.ShardInfo) -> str:
        return incompatible(info, next((link.info for link in self.links if link.client.connected), None))

    def link_serving(self) -> None:
        """A shard that ends takes nothing new; where it is the only one for now, requests wait."""
        if not self.ready:
            self._recovery.on_all_down()

    def link_up(self, link: ShardLink) -> None:
        assert link.info is not None
        if self.admission is not None:
            self.admission.link_up(link)
        self.metrics.set_info(link.info, link.index)
        log.info("shard_connected", address=link.address, model=link.info.model_id, num_pages=link.info.num_pages)

    def link_down(self, link: ShardLink, lost: list[Generation], reason: str) -> None:
        if self.admission is not None:
            self.admission.link_down(link)
        self.metrics.shard_gone(link.index)
        self._recovery.lost(link, lost)
        if not self.ready:
            if self.draining:
                self._give_up()
            else:
                self._recovery.on_all_down()
        self._note_active()
        self._note_credit()
        if reason:
            self.metrics.shard_reconnects.add()
            log.warning("shard_lost", address=link.address, reason=reason, num_requests=len(lost))

    def _put_back(self, generation: Generation) -> None:
        """It goes on as prompt and output so far, before others of its queue."""
        self.metrics.requests_moved.add()
        self._queued[generation.number] = generation
        self._queue.put_back(generation.flow or BASE_KEY, generation.number, generation.num_known)
        self._send_loop.soon()

    def _give_up(self) -> None:
        """No shard has come back."""
        for generation in list(self._queued.values()):
            self._fail(generation, NoShard())

    def link_output(self, link: ShardLink, output: pb.StepOutput) -> int:
        """Give every request its tokens, then use the room that this step made.

        Returns the number of requests whose readers wait for `flush` to be told.
        """
        now = time.monotonic()
        num_tokens = self._delivery.take(link, output, now)
        if output.adapters and self.admission is not None:
            self.admission.moved(link, output.adapters)
        has_stepped = link.stepped(output, now)
        if output.HasField("credit"):
            self._note_credit()
            if link.ready:
                self._recovery.on_ready()
        self.metrics.record_output(output, num_tokens, link.index)
        if len(self._queue):
            if has_stepped:
                self._send(now, {link})
            self._send_loop.soon()
        return self._delivery.num_untold

    def flush(self) -> None:
        """Nothing more is at hand: let readers see what their requests got."""
        self._delivery.wake_readers()

    def _note_credit(self) -> None:
        gauges = self.metrics.gauges
        gauges["lorikeet_credit_requests"] = sum(link.credit.num_requests for link in self.links)
        gauges["lorikeet_credit_kv_tokens"] = sum(link.credit.num_kv_tokens for link in self.links)
        gauges["lorikeet_shard_ready"] = float(self.ready)
