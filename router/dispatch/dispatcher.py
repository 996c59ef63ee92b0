"""From a route's request to a shard and back: admission, the fair queue, batches within the shards' credit.

The router owns a request until its last byte is sent; after dispatch it never reorders. All of it runs in the thread of
the event loop, so nothing here locks.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.adapters.loading import AdapterAdmission, LoaderClient
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.fair_queue import FairQueue, InFlight, QueuedRequests, QueueFull
from lorikeet.router.errors import (
    AdapterUnavailable,
    DeadlineExceeded,
    GenerationFailed,
    ModelLoading,
    NoShard,
    Overloaded,
    PoisonRequest,
    QueueTimeout,
    RouterError,
    ShuttingDown,
)
from lorikeet.router.metrics.groups import caller_label
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.receipts import Receipts
from lorikeet.router.requests.generation import SMALL_BYTES, Generation, OutputMemory, Timeline
from lorikeet.router.requests.request import ColumnRows, GenerationRequest, Loaded, ShardOutput
from lorikeet.router.shards import members
from lorikeet.router.shards.link import ShardLink, check_size, submit_message
from lorikeet.router.shards.members import Choice, Placement, ShardMembers
from lorikeet.router.text.tokenizer import Tokenizer

log = structlog.get_logger()

MAX_RETRIES = 64
"""A request that was retried so often fails with the shard's own error."""
MAX_RELOADS = 3
"""A request whose adapter was loaded again so often, and still cannot be read by shards, fails."""
EXTRA_PART = 8
"""A server whose requests all run accepts this part of its limit in addition, from callers that have few of them."""


class Dispatcher:
    """All generations of one router process and the shards they go to."""

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
        self.members = ShardMembers(config)
        self.links = self.members.links
        self._streams: dict[ShardLink, asyncio.Task[None]] = {}
        """The tasks that keep the shards' streams."""
        self.receipts = Receipts(config, tokenizer.digest, self.links)
        self._placement = Placement(self.links)
        self.queue = FairQueue(max_waiting=config.max_concurrent_requests)
        self.in_flight = InFlight(self.links, self.queue)
        self.memory = OutputMemory()
        self._numbers = itertools.count(1)
        self._queued = QueuedRequests()
        self._loading: dict[int, asyncio.Task[None]] = {}
        """By number: requests that wait for adapters."""
        self.recovery = Recovery(config.recovery_timeout_s, self)
        self.delivery = Delivery(self)
        self._send_loop = SendLoop(self)
        self._empty = asyncio.Event()
        self._empty.set()
        self._replaces = config.ready_file is not None and Path(config.ready_file).exists()
        """Whether another router was ready here before this one."""
        self._is_known = asyncio.Event()
        """Set once a shard has been connected, or is not waited for any more."""
        self._queue_seconds = 0.0
        """Moving average of the queue time of recent requests."""
        self._loader = None if config.loader_address is None else LoaderClient(config.loader_address)
        self.admission: AdapterAdmission | None = None
        """Admission of requests with adapters; None where only the base model is served."""
        if self._loader is not None:
            self.admission = AdapterAdmission(self._loader, self.links, self._placement, self.metrics.adapters)
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    async def start(self) -> None:
        """Begin to connect; returns at once. A router that replaces one begins in recovery: its requests wait."""
        if self._replaces:
            self.recovery.on_all_down()
        for link in self.links:
            self._open_stream(link)
        if not self.members.is_fixed:
            self._tasks.append(asyncio.create_task(self._follow_members(), name="members"))
        if self._loader is not None:
            self._tasks.append(asyncio.create_task(self._loader.run(), name="loader"))

    async def stop(self) -> None:
        """End every request and every stream."""
        self._fail_all(ShuttingDown)
        self.draining = True
        for task in (*self._streams.values(), *self._tasks):
            task.cancel()
        await asyncio.gather(*self._streams.values(), return_exceptions=True)
        for error in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    async def drain(self, timeout: float) -> bool:
        """Reject new requests and wait for the running ones. False where some had to be failed after `timeout`."""
        self.draining = True
        if not self.ready:
            self.fail_queued()
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
        return self.ready or (self.recovery.is_active and not self.draining)

    async def known(self) -> None:
        """Wait for the first shard, as long as one should be back soon: it determines what requests may ask for."""
        if self.recovery.is_active and self.info is None:
            await self._is_known.wait()

    @property
    def info(self) -> pb.ShardInfo | None:
        """Information on the first shard that has ever been connected."""
        for link in self.links:
            if link.info is not None:
                return link.info
        return None

    @property
    def num_active(self) -> int:
        """Requests inside the router, queued or running."""
        return len(self._queued) + sum([len(link.running) for link in self.links])

    @property
    def queued(self) -> Collection[Generation]:
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
        if self.num_active >= self._config.max_concurrent_requests and (
            newest := self.in_flight.displaced_by(request.caller, self._queued)
        ):
            self.fail(newest, Overloaded(self._retry_after()))
        self.in_flight.arrived(request.caller, request.share, time.monotonic())
        tokenizer, number = request.tokenizer or self._tokenizer, next(self._numbers)
        generation = Generation(number, request, tokenizer, timeline, on_cancel=self._on_cancel, memory=self.memory)
        if generation.is_admitted:
            generation.adapters.check()
            self._enqueue(generation)
        else:
            self._await_adapters(generation)
        self._queued.add(generation)
        self._empty.clear()
        self.update_gauges()
        self._set_deadlines(generation, deadline)
        return generation

    def check_room(self, num_coming: int = 0, caller: str = "") -> None:
        """Whether another request is accepted in addition to `num_coming` being read. Raises a leaf of Refused."""
        if self.draining:
            raise ShuttingDown
        if not self.healthy:
            raise ModelLoading if self.info is None else NoShard
        self.check_load(num_coming, caller)

    def check_load(self, num_coming: int = 0, caller: str = "") -> None:
        """Whether the limit of concurrent requests leaves room. Where shards have them all, nothing can be displaced:
        then callers with few requests have some room beyond it. Raises Overloaded.
        """
        limit, num_active = self._config.max_concurrent_requests, self.num_active + num_coming
        if num_active < limit or self.in_flight.displaced_by(caller, self._queued) is not None:
            return
        has_room = num_active < limit + max(1, limit // EXTRA_PART)
        if not (has_room and self.in_flight.has_fewer(caller, self._queued)):
            raise Overloaded(self._retry_after())

    def _enqueue(self, generation: Generation) -> None:
        """Queue a request whose adapters are loaded. Raises Overloaded."""
        for link in self.links:
            link.send_timing.on_arrival(time.monotonic(), is_first=not len(self.queue))
        request, routing = generation.request, generation.routing
        weight = 1.0 if request.adapter is None else request.adapter.weight
        try:
            num_tokens = len(request.prompt_ids)
            self.queue.push(
                routing.flow, routing.number, num_tokens, weight, request.priority, request.caller, request.share
            )
        except QueueFull:
            raise Overloaded(self._retry_after()) from None
        if generation.timeline is not None:
            generation.timeline.enter("queue")
        self._send_loop.schedule()

    def _await_adapters(self, generation: Generation) -> None:
        """Raises ValidationError, or Overloaded where too many requests wait for that adapter."""
        assert self.admission is not None
        flow = generation.routing.flow
        num_waiting = self.admission.loading.num_waiting(flow) + self.queue.num_waiting(flow)
        if generation.request.adapter is not None and num_waiting >= self._config.most_queued_per_adapter:
            raise Overloaded(self._retry_after())
        if generation.timeline is not None:
            generation.timeline.enter("adapter_load")
        if (awaited := self.admission.admit(generation)) is None:
            self._enqueue(generation)
            return
        self._loading[generation.routing.number] = asyncio.create_task(self._load_adapters(generation, awaited))

    async def _load_adapters(self, generation: Generation, awaited: "asyncio.Future[Loaded]") -> None:
        """Queue a request once its adapters are loaded."""
        assert self.admission is not None
        try:
            await self.admission.load(generation, awaited)
            del self._loading[generation.routing.number]
            self._enqueue(generation)
        except RouterError as error:
            self._loading.pop(generation.routing.number, None)
            self.fail(generation, error)
        else:
            generation.wake()

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
            if not only_queued or (generation.routing.is_queued and generation.routing.sent_at is None):
                self.fail(generation, error())

        generation.timers.append(asyncio.get_running_loop().call_later(max(0.0, seconds), expire))

    def fail(self, generation: Generation, error: RouterError) -> None:
        """Remove a request that cannot continue, and end it with an error."""
        self.metrics.generation_lost("error")
        self._remove(generation)
        generation.fail(error)

    def _on_cancel(self, generation: Generation) -> None:
        """The reader of a request that is not over has gone."""
        self.metrics.generation_lost("abort")
        self._remove(generation)

    def _remove(self, generation: Generation) -> None:
        """Remove a request that is not over: from the queue, or by an abort from its shard."""
        number, address = generation.routing.number, generation.routing.shard_address
        if self._queued.take(number) is not None:
            if not self.queue.remove(number) and self.admission is not None:
                self.admission.loading.leave(generation)
                if (loading := self._loading.pop(number, None)) is not None:
                    loading.cancel()
        elif (link := next((link for link in self.links if link.address == address), None)) is not None:
            self.metrics.aborts.add(link.abort(generation, time.monotonic()))
        self.update_gauges()

    def _retry_after(self) -> float:
        """Seconds after which there should be room, estimated from recent queue times."""
        return min(60.0, max(1.0, self._queue_seconds))

    def _fail_all(self, error: Callable[[], RouterError]) -> None:
        running = [generation for link in self.links for generation in link.running.values()]
        for generation in [*self._queued.values(), *running]:
            self.fail(generation, error())

    def update_gauges(self) -> None:
        """The number of requests has changed."""
        gauges, num_active = self.metrics.gauges, self.num_active
        gauges["lorax_queue_length"] = len(self._queued)
        gauges["lorikeet_active_requests"] = num_active
        gauges["lorikeet_active_callers"] = self.in_flight.num_active
        if not num_active:
            self.queue.forget_idle()
            self._empty.set()

    # Sending

    def send(self, now: float, open_links: set[ShardLink]) -> None:
        """Send one batch to each of the shards, as large as its credit allows.

        The first request of the callers that have a share left waits for a shard that may not be sent requests yet, and
        no other one overtakes it.
        """
        batches: dict[ShardLink, list[pb.Submit]] = {}
        blocked = self._share_out(now)
        while (number := self.queue.first(blocked)) is not None:
            generation = self._queued[number]
            choice = self._placement.choose(generation) or self._choose_with_room(generation, now)
            if choice is None or choice[0] not in open_links:
                break
            self.queue.take(number)
            link, reason = choice
            self._queued.take(number)
            batches.setdefault(link, []).append(self._dispatch(generation, link, now))
            if generation.request.caller in self.in_flight.limits:
                blocked = self.in_flight.blocked()
            self._placement.record_sent(generation, link)
            self.metrics.routing_decisions.add(1, reason)
        for link, batch in batches.items():
            link.send_timing.on_send(now)
            link.client.submit(batch)
            self.metrics.batch_left(len(batch), len(link.running) - len(batch))
        if batches:
            self.update_gauges()
            self._note_credit()

    def _share_out(self, now: float) -> set[str]:
        """Take back what callers have beyond their shares. Returns the callers that get nothing more now."""
        self.in_flight.update(now)
        for link, generation in list(self.in_flight.excess()):
            self._take_back(link, generation, now)
        return self.in_flight.blocked()

    def _choose_with_room(self, generation: Generation, now: float) -> Choice | None:
        """A shard for a request that finds no room: what others have several of may be taken back for it."""
        for link, other in self.in_flight.room_for(generation.request.caller):
            self._take_back(link, other, now)
            if (choice := self._placement.choose(generation)) is not None:
                return choice
        return None

    def _take_back(self, link: ShardLink, generation: Generation, now: float) -> None:
        """End a request in its shard, and queue it again."""
        link.abort(generation, now)
        link.credit.taken_back(generation.num_known)
        self.metrics.requests_taken_back.add(1, caller_label(generation.request.caller))
        self.recovery.requeue(generation, self.retry)
        self.update_gauges()

    def hold(self, link: ShardLink, generation: Generation, now: float) -> None:
        """End a request in its shard, and queue it again once its reader has taken what has come of it."""
        link.abort(generation, now)
        self.metrics.requests_held.add()
        self.recovery.requeue(generation, self._await_reader)
        self.update_gauges()

    def _await_reader(self, generation: Generation) -> None:
        self._queued.add(generation)
        generation.on_read = lambda: None if generation.is_over else self.retry(generation)

    def _dispatch(self, generation: Generation, link: ShardLink, now: float) -> pb.Submit:
        request, routing = generation.request, generation.routing
        if is_first := routing.sent_at is None:
            self.metrics.caller_worked(request.caller, len(request.prompt_ids))
        link.add(generation, now)
        if generation.digest and not routing.num_retries:
            routing.adapter_tier = link.residency.tier(generation.adapters.adapter_digests, generation.adapters.tier)
        if generation.timeline is not None:
            generation.timeline.dispatched(routing)
        waited = now - routing.queued_at
        self._queue_seconds += 0.1 * (waited - self._queue_seconds)
        if is_first:
            routing.waited_s = waited
            self.metrics.request_sent(waited, len(request.prompt_ids))
        if request.adapter is not None and self.admission is not None:
            self.admission.record_sent(request.adapter, generation, link)
        deadline_ms = 0 if routing.deadline is None else max(1, round(1000 * (routing.deadline - now)))
        return submit_message(generation, deadline_ms, self.queue.num_by_caller[generation.request.caller])

    # Shards

    def _open_stream(self, link: ShardLink) -> None:
        run = link.client.run(ShardStream(self, link))
        self._streams[link] = asyncio.create_task(run, name=f"shard {link.index}")

    async def _follow_members(self) -> None:
        """Keep a stream to every shard that is listed."""
        while True:
            joined, left = await self.members.poll()
            for link in joined:
                self._open_stream(link)
            for link in left:
                task = self._streams.pop(link)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                log.info("shard_left", address=link.address)
            if joined or left:
                self._placement.on_membership_change()
                self._send_loop.schedule()
            await asyncio.sleep(members.POLL_SECONDS)

    def on_serving_change(self) -> None:
        """A shard that shuts down accepts nothing new; without another one, requests wait."""
        if not self.ready:
            self.recovery.on_all_down()

    def on_connect(self, link: ShardLink) -> None:
        """A new stream to a shard is open."""
        assert link.info is not None
        shards = (link.info for link in self.links if link.info is not None)
        self.config = self._config.within(min(shard.max_total_tokens for shard in shards))
        if self.admission is not None:
            self.admission.on_connect(link)
        self._is_known.set()
        self.metrics.set_info(link.info, link.index)
        log.info("shard_connected", address=link.address, model=link.info.model_id, num_pages=link.info.num_pages)

    def on_disconnect(self, link: ShardLink, lost: list[Generation], reason: str) -> None:
        """A stream has ended, and with it the requests in `lost`, the first one sent first."""
        if self.admission is not None:
            self.admission.on_disconnect(link)
        self.metrics.shard_gone(link.index)
        self.recovery.on_disconnect(link, lost)
        if not self.ready:
            if self.draining:
                self.fail_queued()
            else:
                self.recovery.on_all_down()
        self.update_gauges()
        self._note_credit()
        if reason:
            self.metrics.shard_reconnects.add()
            log.warning("shard_lost", address=link.address, reason=reason, num_requests=len(lost))

    def retry(self, generation: Generation) -> None:
        """Queue a request again: its prompt and output so far go ahead of the other requests of its flow."""
        routing = generation.routing
        self._queued.add(generation)
        if generation.timeline is not None:
            generation.timeline.leave("retried")
        if self.admission is not None and not self.admission.is_current(generation):
            self._reload(generation)
            return
        if generation.timeline is not None:
            generation.timeline.enter("queue")
        self.queue.requeue(routing.flow, routing.number, generation.num_known, generation.request.caller)
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
            self.fail(generation, error)

    def is_used(self, digest: str) -> bool:
        """Whether a request that has not ended uses the content."""
        running = (generation for link in self.links for generation in link.running.values())
        return any(digest in generation.adapters.digests for generation in (*self._queued.values(), *running))

    def fail_queued(self) -> None:
        """No shard has come back in time."""
        self._is_known.set()
        for generation in list(self._queued.values()):
            self.fail(generation, NoShard())

    def on_output(self, link: ShardLink, output: pb.StepOutput) -> None:
        """Deliver the tokens, then use the room that this step has freed."""
        now = time.monotonic()
        # first: a request that the shard returns because of its adapter needs another content
        if output.adapters and self.admission is not None:
            self.admission.update(link, output.adapters)
        num_tokens = self.delivery.deliver(link, output, now)
        has_stepped = link.update(output, now)
        if output.HasField("credit"):
            self._note_credit()
            if link.ready:
                self.recovery.on_ready()
        self.metrics.record_output(output, num_tokens, link.index)
        if len(self.queue):
            if has_stepped:
                self.send(now, {link})
            self._send_loop.schedule()

    def _note_credit(self) -> None:
        gauges = self.metrics.gauges
        gauges["lorikeet_credit_requests"] = sum(link.credit.num_requests for link in self.links)
        gauges["lorikeet_credit_kv_tokens"] = sum(link.credit.num_kv_tokens for link in self.links)
        gauges["lorikeet_shard_ready"] = float(self.ready)


class ShardStream:
    """Passes the events of one shard's stream to the dispatcher. Implements ShardListener."""

    def __init__(self, dispatcher: Dispatcher, link: ShardLink) -> None:
        self._dispatcher = dispatcher
        self._link = link

    def incompatibility(self, info: pb.ShardInfo) -> str:
        return self._dispatcher.members.incompatibility(info)

    def on_serving_change(self) -> None:
        self._dispatcher.on_serving_change()

    def on_connect(self, info: pb.ShardInfo) -> None:
        self._link.connect(info)
        self._dispatcher.on_connect(self._link)

    def on_outputs(self, outputs: Sequence[pb.StepOutput]) -> None:
        for output in outputs:
            self._dispatcher.on_output(self._link, output)
        self._dispatcher.delivery.wake_readers()

    def on_disconnect(self, reason: str) -> None:
        self._dispatcher.delivery.wake_readers()
        self._dispatcher.on_disconnect(self._link, self._link.disconnect(), reason)


class SendLoop:
    """Decides when batches are sent: at the end of an iteration of the event loop, and when a shard's timing allows it.
    Times are of time.monotonic().
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
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
        if not len(self._dispatcher.queue):
            return
        now = time.monotonic()
        times = {link: link.send_timing.send_at(now, shard_idle=link.is_idle) for link in self._dispatcher.links}
        self._dispatcher.send(now, {link for link, at in times.items() if at <= now})
        later = min((at for at in times.values() if now < at), default=math.inf)
        if later < math.inf and len(self._dispatcher.queue):
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


_Work = dict[tuple[str, str, str], tuple[Generation, int]]
"""Tokens that came, with one of their requests, by `Generation.charged_to`."""


def _add(work: _Work, generation: Generation, num_tokens: int) -> None:
    key = generation.charged_to
    first, num_earlier = work.get(key) or (generation, 0)
    work[key] = first, num_earlier + num_tokens


class Delivery:
    """Gives each request its part of a shard's message. Readers are woken after the last one of those read together."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._metrics = dispatcher.metrics
        self.updated: list[Generation] = []
        """Requests whose readers have not been woken for their last output."""

    def deliver(self, link: ShardLink, output: pb.StepOutput, now: float) -> int:
        """Take a message of a shard; return the number of its tokens that count."""
        work: _Work = {}
        for columns in output.columns:
            try:
                rows = ColumnRows(columns)
            except ValueError as error:
                for wire_id in set(columns.ids) & link.running.keys():
                    self._dispatcher.fail(link.running[wire_id], self._malformed(link.running[wire_id], error))
            else:
                self._deliver_rows(link, output, rows, now, work)
        for part in output.outputs:
            if (receiver := link.running.get(part.id)) is not None:
                _add(work, receiver, self._feed(link, receiver, output, part, now))
                self._check_memory(link, receiver, now)
        return sum(self._charge(generation, num_tokens) for generation, num_tokens in work.values())

    def _deliver_rows(self, link: ShardLink, output: pb.StepOutput, rows: ColumnRows, now: float, work: _Work) -> None:
        """Every row is a step's output of one request. Runs for every token, so it does little for each."""
        running, updated, since = link.running, self.updated, dict[float, int]()
        for index, (wire_id, token_id, logprob) in enumerate(rows):
            if (receiver := running.get(wire_id)) is None:
                continue
            previous = receiver.last_token_at or now
            is_apart = rows.has_drafts or receiver.routing.poison_tracker.isolation_steps
            if is_apart or not receiver.feed_token(token_id, logprob, now):
                _add(work, receiver, self._feed(link, receiver, output, rows.token(index), now))
            else:
                since[previous] = since.get(previous, 0) + 1
                _add(work, receiver, 1)
                if not receiver.charge.num_unread:  # its token is written
                    continue
                updated.append(receiver)
            if receiver.charge.num_bytes > SMALL_BYTES:
                self._check_memory(link, receiver, now)
        for previous, count in since.items():
            self._metrics.tokens_arrived(now - previous, 1, count)

    def _check_memory(self, link: ShardLink, generation: Generation, now: float) -> None:
        """A request whose output takes too much memory fails, or waits for its reader."""
        if generation.is_over or generation.routing.is_queued:
            return
        if (failure := generation.charge.failure()) is not None:
            self._dispatcher.fail(generation, failure)
        elif generation.is_behind:
            self._dispatcher.hold(link, generation, now)

    def _charge(self, generation: Generation, num_tokens: int) -> int:
        """Charge the tokens that came for the caller and the adapter of a request; returns their number."""
        request = generation.request
        self._dispatcher.queue.charge(generation.routing.flow, num_tokens, request.caller)
        self._metrics.caller_worked(request.caller, num_tokens)
        if request.adapter is not None and num_tokens:
            self._metrics.adapters.received(request.adapter, generation.digest, num_tokens)
        return num_tokens

    def _malformed(self, generation: Generation, error: Exception) -> GenerationFailed:
        """What one request fails with. Neither the error's text nor its locals are logged: both may hold a prompt."""
        log.error("output_malformed", kind=type(error).__name__, request_id=generation.request.request_id)
        return GenerationFailed("the router could not read the shard's output")

    def wake_readers(self) -> None:
        updated, self.updated = self.updated, []
        for generation in updated:
            generation.wake()

    def _feed(
        self, link: ShardLink, generation: Generation, output: pb.StepOutput, part: ShardOutput, now: float
    ) -> int:
        metrics, routing, previous = self._metrics, generation.routing, generation.last_token_at
        may_retry = part.retryable and part.finish_reason == pb.FINISH_ERROR and routing.num_retries < MAX_RETRIES
        error = part.error if may_retry else ""
        if part.retryable and part.in_step:
            metrics.steps.has_failed = True
        if error and isinstance(part, pb.RequestOutput):
            part.finish_reason = pb.FINISH_NONE
        self.updated.append(generation)
        routing.has_output = True
        if routing.poison_tracker.isolation_steps:
            routing.poison_tracker.record_steps(sum(part.step_ends))
        try:
            num_tokens = generation.feed(part, now)
        except Exception as exception:
            generation.fail(self._malformed(generation, exception))
            num_tokens = 0
        if generation.finish_reason is not None:
            self._dispatcher.receipts.finished(generation)
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
            self._dispatcher.recovery.on_error(generation, error, part.in_step)
            self._dispatcher.update_gauges()
        return num_tokens

    def _end(self, link: ShardLink, generation: Generation, part: ShardOutput, now: float) -> None:
        if part.finish_reason:
            link.remove(part.id, now)
        elif link.abort(generation, now):  # complete at a stop string, which the shard does not know
            self._metrics.aborts.add()
        self._dispatcher.in_flight.arrived(generation.request.caller, generation.request.share, now)
        self._dispatcher.update_gauges()
        if generation.finish_reason is None:
            self._metrics.generation_lost("error")
        if generation.pooled and generation.finish_reason is not None and generation.routing.sent_at is not None:
            self._metrics.pooled_ended(generation, now - generation.routing.sent_at)
        if generation.num_generated and generation.routing.sent_at is not None:
            self._metrics.generation_ended(generation, now - generation.routing.sent_at)


class Recovery:
    """Retries requests whose shard is gone or could not continue them, and limits how long they wait for a shard."""

    def __init__(self, timeout_s: float, dispatcher: Dispatcher) -> None:
        self._timeout_s = timeout_s
        self._dispatcher = dispatcher
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
        self._dispatcher.fail_queued()

    def on_disconnect(self, link: ShardLink, lost: list[Generation]) -> None:
        """A shard is gone, and with it the requests in `lost`, the first one sent first."""
        for generation in reversed(lost):
            routing = generation.routing
            if routing.wire_id in link.step_requests:
                self._record_crash(generation, PoisonRequest())
                continue
            if not routing.has_output:
                routing.poison_tracker.suspect()
            self.requeue(generation, self._dispatcher.retry, is_retry=True)

    def on_error(self, generation: Generation, error: str, in_step: bool) -> None:
        """A shard could not continue a request; another may, or the same one in another batch."""
        log.warning("request_retried", request_id=generation.request.request_id, reason=error[:512])
        generation.routing.last_error = error[:512]
        if in_step:
            self._record_crash(generation, GenerationFailed(error))
        else:
            self.requeue(generation, self._dispatcher.retry, is_retry=True)

    def _record_crash(self, generation: Generation, error: RouterError) -> None:
        """A step that computed the request failed. Fail with `error` where the request must be the cause."""
        tracker = generation.routing.poison_tracker
        if tracker.record_crash():
            request_id = generation.request.request_id
            log.error("request_failed_poison", request_id=request_id, num_crashes=tracker.num_crashes)
            self._dispatcher.metrics.generation_lost("error")
            generation.fail(error)
        else:
            self.requeue(generation, self._dispatcher.retry, is_retry=True)

    def requeue(self, generation: Generation, queue: Callable[[Generation], None], *, is_retry: bool = False) -> None:
        """Queue it again by `queue`, unless its output is complete."""
        generation.requeue(is_retry=is_retry)
        if generation.finish_reason is not None:
            self._dispatcher.receipts.finished(generation)
        if generation.is_over:
            generation.wake()
        else:
            self._dispatcher.metrics.requests_retried.add(is_retry)
            queue(generation)
