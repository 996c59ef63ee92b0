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
from router.adapter import Adapter
from router.admission import Admission
from router.config import RouterConfig
from router.credit import CreditAccount
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
from router.pacing import Pacing
from router.queue import FairQueue, QueueFull
from router.shard_client import ShardClient
from router.text.tokenizer import Tokenizer
from router.wire import submit_message

log = structlog.get_logger()

BASE_KEY = ""
"""Queue key of requests for the bare base model."""


class Dispatcher:
    """All generations of one router process and the shard they go to."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, metrics: Metrics | None = None) -> None:
        if len(config.shard_addresses) != 1:
            raise ValueError(f"one shard address is needed, got {len(config.shard_addresses)}")
        self.metrics = metrics or Metrics(config.max_input_length, config.max_total_tokens)
        self.info: pb.ShardInfo | None = None
        """What the shard said about itself; None before the first connection."""
        self.draining = False
        self._config = config
        self._tokenizer = tokenizer
        self._shard = ShardClient(config.shard_addresses[0], self)
        self._credit = CreditAccount()
        self._pacing = Pacing()
        self._queue = FairQueue(max_waiting=config.max_concurrent_requests)
        self._numbers = itertools.count(1)
        self._wire_ids = itertools.count(1)
        self._queued: dict[int, Generation] = {}
        self._running: dict[int, Generation] = {}
        """By the id on the wire."""
        self._last_step = 0
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
            self.admission = Admission(self._loader, self._enqueue, self._fail, self._shard.tell, self.metrics.adapters)
        self._tasks: list[asyncio.Task[None]] = []

    # Life

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        self._tasks.append(asyncio.create_task(self._shard.run(), name="shard"))
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
            await asyncio.wait_for(self._empty.wait(), timeout)
        except TimeoutError:
            self._fail_all(ShuttingDown)
            return False
        return True

    @property
    def ready(self) -> bool:
        """Whether a request could be sent."""
        return self._shard.connected and self._shard.serving and self._credit.known

    @property
    def healthy(self) -> bool:
        """Whether the shard is there and, while it owes answers, was heard lately (it has a heartbeat)."""
        return self.ready and (not self._running or time.monotonic() - self._shard.last_heard < 5.0)

    @property
    def queue_length(self) -> int:
        return len(self._queue)

    @property
    def num_active(self) -> int:
        """Requests inside the router, queued or running."""
        return len(self._queued) + len(self._running)

    # Requests

    def submit(self, request: GenerationRequest, *, deadline: float | None = None) -> Generation:
        """Queue a request; `deadline` in time.monotonic()'s seconds. Raises ShuttingDown, NoShard or Overloaded."""
        if self.draining:
            raise ShuttingDown
        if not self.ready:
            raise NoShard
        if self.num_active >= self._config.max_concurrent_requests:
            raise Overloaded(self._retry_after())
        generation = Generation(next(self._numbers), request, self._tokenizer, self._release)
        if request.adapter is None:
            self._enqueue(generation, BASE_KEY)
        else:
            self._admit(generation, request.adapter)
        self._queued[generation.number] = generation
        self._empty.clear()
        self._note_active()
        self._set_timers(generation, deadline)
        return generation

    def _enqueue(self, generation: Generation, key: str, weight: float = 1.0) -> None:
        """From here on it may be sent."""
        self._pacing.arrived(time.monotonic(), is_first=not len(self._queue))
        try:
            self._queue.push(key, generation.number, len(generation.request.prompt_ids), weight)
        except QueueFull:
            raise Overloaded(self._retry_after()) from None
        self._pump_later()

    def _admit(self, generation: Generation, adapter: Adapter) -> None:
        """Raises Overloaded where too many wait for that adapter."""
        assert self.admission is not None
        num_waiting = self.admission.loading.num_waiting(adapter.lane) + self._queue.num_waiting(adapter.lane)
        if num_waiting >= self._config.most_queued_per_adapter:
            raise Overloaded(self._retry_after())
        self.admission.admit(generation, adapter)

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
        elif self._running.pop(generation.wire_id, None) is not None:
            self._shard.abort(generation.wire_id)
            self.metrics.aborts.add()
        if not self._running:
            self._pacing.became_idle(time.monotonic())
        self._note_active()

    def _retry_after(self) -> float:
        """Seconds until a place should be free, from how long requests waited lately."""
        return min(60.0, max(1.0, self._queue_seconds))

    def _fail_all(self, error: Callable[[], RouterError]) -> None:
        for generation in [*self._queued.values(), *self._running.values()]:
            self._fail(generation, error())

    def _note_active(self) -> None:
        gauges = self.metrics.gauges
        gauges["lorax_queue_length"] = len(self._queued)
        gauges["lorikeet_active_requests"] = self.num_active
        if not self._queued and not self._running:
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
        if not self._queued:
            return
        now = time.monotonic()
        at = self._pacing.send_at(now, shard_idle=not self._running)
        if at <= now:
            self._send(now)
        elif at < math.inf and self._pump_timer is None:
            self._pump_timer = asyncio.get_running_loop().call_later(at - now, self._pump_on_time)

    def _pump_on_time(self) -> None:
        self._pump_timer = None
        self._pump()

    def _send(self, now: float) -> None:
        """One batch, as large as the credit allows."""
        if not self.ready:
            return
        batch: list[pb.Submit] = []
        while (number := self._queue.pop(self._fits)) is not None:
            batch.append(self._dispatch(self._queued.pop(number), now))
        if not batch:
            return
        self._pacing.sent()
        self._shard.submit(batch)
        self.metrics.batch_left(len(batch))
        self._note_active()
        self._note_credit()

    def _fits(self, number: int) -> bool:
        """An idle shard gets the request whatever it says: it either runs it or says why it can't."""
        num_tokens = len(self._queued[number].request.prompt_ids)
        return self._credit.covers(num_tokens) or (not self._running and self._credit.num_unseen == 0)

    def _dispatch(self, generation: Generation, now: float) -> pb.Submit:
        request = generation.request
        generation.wire_id = next(self._wire_ids)
        generation.state = State.RUNNING
        generation.sent_at = now
        self._running[generation.wire_id] = generation
        self._credit.sent(len(request.prompt_ids))
        waited = now - generation.queued_at
        self._queue_seconds += 0.1 * (waited - self._queue_seconds)
        self.metrics.request_sent(waited, len(request.prompt_ids))
        if request.adapter is not None and self.admission is not None:
            self.admission.sent(request.adapter, generation)
        deadline_ms = 0 if generation.deadline is None else max(1, round(1000 * (generation.deadline - now)))
        return submit_message(generation.wire_id, request, self._tokenizer.eos_ids, deadline_ms, generation.digest)

    # What the shard says (ShardListener)

    def shard_up(self, info: pb.ShardInfo) -> None:
        self.info = info
        self._credit = CreditAccount()
        self._pacing = Pacing()
        self._wire_ids = itertools.count(1)
        self._last_step = 0
        if self.admission is not None:
            self.admission.shard_up()
        self.metrics.shard_is(info)
        log.info("shard_connected", address=self._shard.address, model=info.model_id, num_pages=info.num_pages)

    def shard_down(self, reason: str) -> None:
        self._credit = CreditAccount()
        self.metrics.gauges["lorikeet_shard_ready"] = 0
        if self.admission is not None:
            self.admission.shard_down()
        self.shard_quiet()
        lost = list(self._running.values())
        self._running.clear()
        for generation in lost:
            generation.fail(GenerationFailed(f"the connection to the shard was lost ({reason})"))
        for generation in list(self._queued.values()):
            self._fail(generation, NoShard())
        self._note_active()
        if reason:
            self.metrics.shard_reconnects.add()
            log.warning("shard_lost", address=self._shard.address, reason=reason, num_requests=len(lost))

    def shard_output(self, output: pb.StepOutput) -> int:
        """Give every request its tokens, then use the room that this step made.

        Returns the number of requests whose readers wait for `shard_quiet` to be told.
        """
        now = time.monotonic()
        num_tokens = num_adapted = 0
        running = self._running
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
            self.admission.moved(output.adapters)
        if output.HasField("credit"):
            credit = output.credit
            self._credit.update(credit.num_requests, credit.num_kv_tokens, credit.acknowledged)
            self._note_credit()
        self.metrics.shard_spoke(output, num_tokens)
        if output.step > self._last_step:
            self._last_step = output.step
            self._pacing.step_began(now, output.load.step_ms / 1000)
            if self._queued:
                self._send(now)
        if self._queued:
            self._pump_later()
        return len(self._untold)

    def _received(self, generation: Generation, num_tokens: int) -> None:
        if generation.request.adapter is not None:
            self.metrics.adapters.received(generation.request.adapter, generation.digest, num_tokens)

    def shard_quiet(self) -> None:
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
            metrics.drafted_tokens.add(part.num_drafted)
            metrics.accepted_tokens.add(part.num_accepted)
        if generation.state is State.DONE:
            self._end(generation, part, now)
        return num_tokens

    def _end(self, generation: Generation, part: pb.RequestOutput, now: float) -> None:
        del self._running[part.id]
        if not self._running:
            self._pacing.became_idle(now)
        if not part.finish_reason:  # complete at a stop string: the shard does not know
            self._shard.abort(part.id)
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
        gauges["lorikeet_credit_requests"] = self._credit.num_requests
        gauges["lorikeet_credit_kv_tokens"] = self._credit.num_kv_tokens
        gauges["lorikeet_shard_ready"] = float(self.ready)
