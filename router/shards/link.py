"""One shard as the dispatcher sees it: its stream, the requests that run on it and their messages, its credit, what it
has cached, and when batches are sent to it.

Ids, credit and residency belong to one stream; each new one resets them. Requests that arrive within one step of the
shard travel in at most two messages: during a step a new request could only wait in the shard, so one message gathers
requests until shortly before the step should end, and another follows the step's own output. An idle shard gets the
first request at once. One that has just become idle gets it a moment later: clients whose requests ended together often
send the next ones together, and a request that misses the first message waits a whole step.
"""

import asyncio
import functools
import hashlib
import itertools
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc
from lorikeet.proto.outputs import MAX_MESSAGE_BYTES, socket_path
from lorikeet.proto.version import TAKES_COLUMNS
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ValidationError
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Adapter, GenerationRequest
from lorikeet.router.shards.outputs import Arrivals, OutputConnection

log = structlog.get_logger()

Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ShardAccess:
    """For every shard of one router."""

    secret: str = ""
    credentials: grpc.ChannelCredentials | None = None

    @classmethod
    def of(cls, config: RouterConfig) -> Self:
        """Raises OSError where a file cannot be read."""
        secret = "" if config.shard_secret_path is None else Path(config.shard_secret_path).read_text().strip()
        if config.shard_tls_ca_path is None:
            return cls(secret)
        paths = (config.shard_tls_ca_path, config.shard_tls_key_path, config.shard_tls_cert_path)
        files = [None if path is None else Path(path).read_bytes() for path in paths]
        return cls(secret, grpc.ssl_channel_credentials(*files))

    def channel(self, address: str, name: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """To a shard whose certificate is for `name`; "" for the address's own name."""
        if self.credentials is None or address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, options=options)
        named = [*options, ("grpc.ssl_target_name_override", name)] if name else options
        return grpc.aio.secure_channel(address, self.credentials, options=named)

    def metadata(self, address: str) -> Metadata:
        """Sent with each call."""
        return () if address.startswith("unix:") or not self.secret else (("authorization", f"Bearer {self.secret}"),)


OPEN = ShardAccess()
"""For Unix sockets."""


MAX_COMMAND_BYTES = 3 << 20
"""A Command is closed at this size, so that messages stay below 4 MiB."""
HEARTBEAT_SECONDS, MAX_MISSED = 0.25, 8
"""A shard sends a message at this interval; after so many missed ones its stream is closed."""
FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
"""Seconds before the next connection attempt."""
END_SECONDS = 2.0
"""Between the end of a stream's call and that of its connection for outputs, whichever comes first."""
WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says of a call where a write fails because the shard has ended it, in place of the shard's status."""
EXPLAIN_SECONDS = 5.0
"""How often the reason for a missing connection over TCP is queried."""
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class ShardListener(Protocol):
    """Receives the events of a stream: in the server the dispatcher's `ShardStream`, whose module imports this one."""

    def incompatibility(self, info: pb.ShardInfo) -> str:
        """Why this shard cannot be used, in a sentence; "" if it can."""

    def on_serving_change(self) -> None:
        """The shard has begun or stopped to accept requests."""

    def on_connect(self, info: pb.ShardInfo) -> None:
        """A new stream is open: ids and credit of earlier ones are void."""

    def on_outputs(self, outputs: Sequence[pb.StepOutput]) -> None:
        """Messages that came together, the first one sent first."""

    def on_disconnect(self, reason: str) -> None:
        """The stream has ended, and with it every request on it. Without a reason it was closed by this router."""


class ShardClient:
    """The gRPC client of one shard: a channel, a health watch and one stream, which is open while `run` runs.

    It reconnects with back-off when the shard is gone.
    """

    def __init__(self, address: str, timeout_s: float = 0.0, access: ShardAccess = OPEN, name: str = "") -> None:
        """The stream of a shard whose step takes longer than `timeout_s` is closed; 0 is no limit. `name`: that of
        its certificate, where it is not the address's.
        """
        self.address = address
        self._access = access
        self._name = name
        self._metadata = access.metadata(address)
        self.connected = False
        self.serving = False
        """The last status of the shard's health service."""
        self._has_message = False
        """Whether this connection attempt has received a message."""
        self.is_taken_out = False
        """Whether the last stream was closed because the shard hung."""
        self._step_timeout_s = timeout_s
        self._num_missed = 0
        self._fault: asyncio.Future[str] | None = None
        self._outbox: deque[tuple[pb.Command, int]] = deque()
        """Commands that the stream has not taken yet, with an upper bound of their size in bytes."""
        self._wake = asyncio.Event()
        self._stub: shard_pb2_grpc.ShardStub | None = None
        """Stub of the current connection."""

    async def run(self, listener: ShardListener) -> None:
        """Serve until cancelled. `listener` receives the events of the stream."""
        delay = FIRST_DELAY
        while True:
            self._has_message = False
            reason = await self._one_connection(listener)
            if self._has_message:
                delay = FIRST_DELAY
            log.warning("shard_unreachable", address=self.address, reason=reason, retry_in_s=round(delay, 2))
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            delay = min(2 * delay, LONGEST_DELAY)

    def submit(self, submits: Iterable[pb.Submit]) -> None:
        """Send requests in as few messages as their size allows."""
        command, size = pb.Command(), 0
        for submit in submits:
            added = submit.ByteSize() + 8
            if size and size + added > MAX_COMMAND_BYTES:
                self._put(command, size)
                command, size = pb.Command(), 0
            command.submits.append(submit)
            size += added
        self._put(command, size)

    def abort(self, wire_id: int) -> None:
        """End a request in the shard. Aborts that the stream has not taken yet share a message."""
        if not self.connected:
            return
        if not self._outbox:
            self._put(pb.Command(), 0)
        command, size = self._outbox[-1]
        command.abort_ids.append(wire_id)
        self._outbox[-1] = (command, size + 10)

    def send(self, command: pb.Command) -> None:
        """Send a command about adapters: prefetches, pins, unloads."""
        if self.connected:
            self._put(command, command.ByteSize())

    async def digest(self) -> str:
        """Digest of the files of the shard's model. Raises grpc.aio.AioRpcError, or ConnectionError."""
        if self._stub is None:
            raise ConnectionError("its shard is not connected")
        return str((await self._stub.Digest(pb.DigestRequest(), metadata=self._metadata)).sha256)

    async def learning(self, purge: bool) -> pb.LearningReply:
        """What the shard learns from traffic; with `purge` it deletes that first. Raises as `digest`."""
        if self._stub is None:
            raise ConnectionError("its shard is not connected")
        return await self._stub.Learning(pb.LearningRequest(purge=purge), metadata=self._metadata)

    def _put(self, command: pb.Command, size: int) -> None:
        self._outbox.append((command, size))
        self._wake.set()

    async def _one_connection(self, listener: ShardListener) -> str:
        """Connect and serve until something fails; return the reason."""
        async with self._access.channel(self.address, self._name, _CHANNEL_OPTIONS) as channel:
            watch: asyncio.Task[None] | None = None
            explaining = asyncio.create_task(self._explain(channel))
            try:
                health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                if not await self._until_serving(health):
                    return f"health: {await health.code()}: {await health.details()}"
                watch = asyncio.create_task(self._follow_health(health, listener))
                stub = shard_pb2_grpc.ShardStub(channel)
                info = await stub.Info(pb.InfoRequest(), timeout=10.0, metadata=self._metadata)
                if incompatible := listener.incompatibility(info):
                    return incompatible
                return await self._serve(stub, info, listener)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            except Exception as error:  # the next connection may not raise it
                log.exception("shard_connection_failed", address=self.address)
                return type(error).__name__
            finally:
                self.serving = False
                explaining.cancel()
                if watch is not None:
                    watch.cancel()
                    # not awaited itself: a cancellation of this task would look like that of `watch`
                    (ended,) = await asyncio.gather(watch, return_exceptions=True)
                    if isinstance(ended, Exception) and not isinstance(ended, grpc.aio.AioRpcError):
                        log.error("health_watch_failed", address=self.address, exc_info=ended)

    async def _explain(self, channel: grpc.aio.Channel) -> None:
        """Log why there is no connection, once per reason: a call that waits for a connection never fails. Shards
        behind a Unix socket are children of the launcher, which logs their state.
        """
        logged = ""
        while not self.address.startswith("unix:"):
            await asyncio.sleep(EXPLAIN_SECONDS)
            try:
                stub = health_pb2_grpc.HealthStub(channel)
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=EXPLAIN_SECONDS)
                return
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            if reason != logged:
                log.warning("shard_unreachable", address=self.address, reason=reason)
            logged = reason

    async def _until_serving(self, health: grpc.aio.UnaryStreamCall) -> bool:
        """False when the watch ended first."""
        while not self.serving:
            reply = await health.read()
            if reply is grpc.aio.EOF:
                return False
            self.serving = reply.status == health_pb2.HealthCheckResponse.SERVING
        return True

    async def _follow_health(self, health: grpc.aio.UnaryStreamCall, listener: ShardListener) -> None:
        while (reply := await health.read()) is not grpc.aio.EOF:
            self.serving = reply.status == health_pb2.HealthCheckResponse.SERVING
            log.info("shard_health", address=self.address, serving=self.serving)
            listener.on_serving_change()
        self.serving = False

    async def _serve(self, stub: shard_pb2_grpc.ShardStub, info: pb.ShardInfo, listener: ShardListener) -> str:
        """Run one stream from its first message to its end; return why it ended."""
        self._fault = asyncio.get_running_loop().create_future()
        arrivals = Arrivals(functools.partial(self._deliver, listener))
        try:
            has_socket = info.outputs_socket and socket_path(self.address) is not None
            outputs = await OutputConnection.open(self.address, arrivals) if has_socket else None
        except OSError as error:
            return f"no connection for outputs: {error}"
        self._stub = stub
        call = stub.Serve(metadata=(*self._metadata, TAKES_COLUMNS, *([] if outputs is None else [outputs.metadata])))
        self._outbox.clear()
        self.connected, self.is_taken_out, self._num_missed = True, False, 0
        listener.on_connect(info)
        reader = asyncio.create_task(self._read(call, arrivals))
        others = [asyncio.create_task(self._write(call)), asyncio.create_task(self._check_heartbeat())]
        reason = "the shard closed the stream"
        try:
            reason = await self._until_ended(call, reader, outputs) or reason
        except grpc.aio.AioRpcError as error:
            reason = reason_of(error.code(), error.details()) or reason
        except asyncio.CancelledError:
            reason = ""
            raise
        finally:
            arrivals.flush()
            self.connected, self._stub = False, None
            for task in (reader, *others):
                task.cancel()
            call.cancel()
            if outputs is not None:
                outputs.close()
            listener.on_disconnect(reason)
            await asyncio.gather(reader, *others, return_exceptions=True)
        return reason

    async def _until_ended(
        self, call: grpc.aio.StreamStreamCall, reader: "asyncio.Task[None]", outputs: OutputConnection | None
    ) -> str:
        """Why the stream has ended, "" where the shard says nothing. Raises grpc.aio.AioRpcError, and what the listener
        has raised.
        """
        assert self._fault is not None
        parts: list[asyncio.Future[Any]] = [reader] if outputs is None else [reader, outputs.ended]
        await asyncio.wait((*parts, self._fault), return_when=asyncio.FIRST_COMPLETED)
        if not self._fault.done():
            await asyncio.wait(parts, timeout=END_SECONDS)
        if self._fault.done():
            return self._fault.result()
        if outputs is not None and outputs.ended.done() and (reason := outputs.ended.result()):
            return reason
        if not reader.done():
            return "the shard closed the connection for outputs"
        await reader
        return reason_of(await call.code(), await call.details())

    def _take_out(self, reason: str) -> None:
        if self._fault is not None and not self._fault.done():
            self.is_taken_out = True
            self._fault.set_result(reason)

    async def _check_heartbeat(self) -> None:
        """Counts iterations instead of time: while this process itself is suspended no heartbeat is missed."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._num_missed += 1
            if self._num_missed >= MAX_MISSED:
                self._take_out(f"no heartbeat for {HEARTBEAT_SECONDS * MAX_MISSED:g} s")

    def _deliver(self, listener: ShardListener, outputs: Sequence[pb.StepOutput]) -> None:
        self._has_message, self._num_missed = True, 0
        try:
            for output in outputs:
                if 0 < 1000 * self._step_timeout_s < output.heartbeat.age_ms:
                    step = output.heartbeat.running_step
                    self._take_out(f"step {step} takes longer than {self._step_timeout_s:g} s")
            listener.on_outputs(outputs)
        except Exception as error:  # ends the stream: raised where that is awaited
            if self._fault is not None and not self._fault.done():
                self._fault.set_exception(error)

    async def _read(self, call: grpc.aio.StreamStreamCall, arrivals: Arrivals) -> None:
        """Take the messages that come by gRPC, until the stream ends."""
        while (output := await call.read()) is not grpc.aio.EOF:
            arrivals.add([output])

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                command, _ = self._outbox.popleft()
                try:
                    await call.write(command)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the stream has ended; its reader returns the reason


def reason_of(code: grpc.StatusCode, details: str | None) -> str:
    """Why a call has ended; "" where its status does not say it."""
    is_unknown = code is grpc.StatusCode.INTERNAL and details == WRITE_FAILED
    return "" if code is grpc.StatusCode.OK or is_unknown else f"{code.name}: {details}"


class CreditAccount:
    """Requests and KV tokens that one shard could start within its next few steps."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_kv_tokens = 0
        self.known = False
        """Whether the shard has reported credit on this stream."""
        self._num_acknowledged = 0
        self._unseen: deque[int] = deque()
        """KV tokens of each request that the shard had not counted yet, oldest first."""

    def sent(self, num_tokens: int) -> None:
        """A request with a prompt of `num_tokens` was sent."""
        self._unseen.append(num_tokens)
        self.num_requests -= 1
        self.num_kv_tokens -= num_tokens

    def taken_back(self, num_tokens: int) -> None:
        """A request that has so many tokens was aborted to make room: the next report will say so."""
        self.num_requests += 1
        self.num_kv_tokens += num_tokens

    def update(self, num_requests: int, num_kv_tokens: int, acknowledged: int) -> None:
        """The shard's report, which counts the first `acknowledged` requests of this stream."""
        for _ in range(min(acknowledged - self._num_acknowledged, len(self._unseen))):
            self._unseen.popleft()
        self._num_acknowledged = max(self._num_acknowledged, acknowledged)
        self.num_requests = num_requests - len(self._unseen)
        self.num_kv_tokens = num_kv_tokens - sum(self._unseen)
        self.known = True

    @property
    def num_unseen(self) -> int:
        return len(self._unseen)

    def covers(self, num_tokens: int) -> bool:
        """Whether a request with a prompt of `num_tokens` could start."""
        return self.num_requests > 0 and self.num_kv_tokens >= num_tokens


MARGIN_SECONDS, MARGIN = 0.004, 0.15
"""How long before the end of the step a batch leaves, in seconds and as a fraction of the step: at least the time of a
message to the router and of one back, on a busy machine. Of a short step, half.
"""
SHORTEST_SECONDS = 0.004
"""Of a step during which a batch leaves: timers are not more exact than that."""
RETURNING_SECONDS = 0.05
"""How long after its last request ended clients are expected to send the next ones."""
QUIET_SECONDS = 0.0015
LONGEST_GATHER_SECONDS = 0.005


class SendTiming:
    """Send times of one shard, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._step_began = -math.inf
        self._step_seconds = 0.0
        """The expected duration of the running step."""
        self._sent_at = -math.inf
        self._idle_since = -math.inf
        self._first_arrival = -math.inf
        """Arrival of the first of the queued requests."""
        self._last_arrival = -math.inf

    def on_arrival(self, now: float, is_first: bool) -> None:
        """A request was queued; `is_first` when the queue was empty."""
        self._last_arrival = now
        if is_first:
            self._first_arrival = now

    def on_step(self, now: float) -> None:
        """The shard reported a step and has started the next one."""
        self._step_began = now

    def set_step_time(self, seconds: float) -> None:
        """The shard's estimate for the running step."""
        self._step_seconds = seconds

    def on_idle(self, now: float) -> None:
        """The shard's last request ended."""
        self._idle_since = now

    def send_at(self, now: float, shard_idle: bool) -> float:
        """The time from which requests may be sent; `inf` stands for the shard's next output."""
        if not shard_idle:
            seconds = self._step_seconds
            due = self._step_began + max(seconds / 2, seconds - max(MARGIN_SECONDS, MARGIN * seconds))
            return math.inf if self._sent_at >= due or seconds < SHORTEST_SECONDS else due
        if now - self._idle_since > RETURNING_SECONDS:
            return now
        return min(self._last_arrival + QUIET_SECONDS, self._first_arrival + LONGEST_GATHER_SECONDS)

    def on_send(self, now: float) -> None:
        """Requests were sent during a step, or started one."""
        self._sent_at = now


BLOCK = 32
"""Tokens per key."""
MAX_BLOCKS = 128
"""Maximum blocks of one prompt that get keys: longer common prefixes make no difference."""


class AdapterResidency:
    """Where adapters are, as the shard's AdapterState messages report: resident, loading, or requested."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        """By digest, without absent ones."""
        self.in_host_memory: set[str] = set()
        """Adapters that have left their slot, and are still in the shard's memory."""

    def prefetch(self, digest: str) -> bool:
        """Whether the shard needs a prefetch of `digest`, which counts as loading from now on."""
        if digest in self._states:
            return False
        self._states[digest] = pb.AdapterState.LOADING
        return True

    def update(self, state: pb.AdapterState) -> bool:
        """Take a report; True where it says that a resident adapter was evicted."""
        if state.residency == pb.AdapterState.HOST_MEMORY:
            self.in_host_memory.add(state.digest)
        else:
            self.in_host_memory.discard(state.digest)
        if state.residency in (pb.AdapterState.RESIDENT, pb.AdapterState.LOADING):
            self._states[state.digest] = state.residency
            return False
        return self._states.pop(state.digest, None) == pb.AdapterState.RESIDENT

    def is_resident(self, digest: str) -> bool:
        return self._states.get(digest) == pb.AdapterState.RESIDENT

    def tier(self, digests: Sequence[str], elsewhere: str) -> str:
        """Where all of these adapters are here: `slot` or `host`; `elsewhere` where the shard lacks one."""
        if all(map(self.is_resident, digests)):
            return "slot"
        held = (self.is_resident(digest) or digest in self.in_host_memory for digest in digests)
        return "host" if all(held) else elsewhere

    @property
    def loading(self) -> list[str]:
        """Digests of adapters on their way into a slot."""
        return [digest for digest, state in self._states.items() if state == pb.AdapterState.LOADING]

    @property
    def num_resident(self) -> int:
        return sum(state == pb.AdapterState.RESIDENT for state in self._states.values())


def keys_of(prompt_ids: Sequence[int], content: str, salt: str) -> tuple[int, ...]:
    """One key per full block, of all tokens up to its end, of the adapter's content and of the salt."""
    keys = []
    key = hash((content, salt))
    for start in range(0, min(len(prompt_ids) - BLOCK, MAX_BLOCKS * BLOCK) + 1, BLOCK):
        key = hash((key, *prompt_ids[start : start + BLOCK]))
        keys.append(key)
    return tuple(keys)


class PrefixIndex:
    """Blocks of prompts that should still be in the shard's cache, estimated from what was sent."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: the size of the cache."""
        self._max_keys = num_tokens // BLOCK
        self._keys: OrderedDict[int, None] = OrderedDict()

    def add(self, keys: Sequence[int]) -> None:
        """A prompt with these keys was sent to the shard."""
        for key in reversed(keys):  # the end of a prompt is evicted first
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def num_shared(self, keys: Sequence[int]) -> int:
        """Leading blocks of a prompt that should be in the cache."""
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))


class ShardLink:
    """Keeps one stream to one shard."""

    def __init__(self, index: int, address: str, name: str, access: ShardAccess, config: RouterConfig) -> None:
        """`name` is that of the certificate, where it is not the address's."""
        self.index = index
        self.address = address
        self.client = ShardClient(address, config.step_timeout_s, access, name)
        self.info: pb.ShardInfo | None = None
        """None before the first connection."""
        self.running: dict[int, Generation] = {}
        """Running requests by their id on the wire."""
        self.num_by_affinity: Counter[str] = Counter()
        """Number of running requests by their affinity key."""
        self.num_by_caller: Counter[str] = Counter()
        self._stuck_file = config.stuck_files[index] if index < len(config.stuck_files) else ""
        """Created to ask the process that started the shard to kill it, because it hangs."""
        self._reset(num_cached_tokens=0)

    def _reset(self, num_cached_tokens: int) -> None:
        self.credit = CreditAccount()
        self.send_timing = SendTiming()
        self.residency = AdapterResidency()
        self.prefixes = PrefixIndex(num_cached_tokens)
        self.step_requests: frozenset[int] = frozenset()
        """Wire ids of the requests that the current step computes, as far as was reported."""
        self.load: pb.Load | None = None
        """The last report."""
        self.step_detail: pb.StepDetail | None = None
        """Details of a recent step, while `watch` asks for them."""
        self._wire_ids = itertools.count(1)
        self._last_step = 0
        self._has_steps = True
        self._digest: asyncio.Future[str] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no step runs there, as far as is known: nothing was sent, or all requests wait for adapters or
        grammars.
        """
        return not self.running or not (self._has_steps or self.credit.num_unseen)

    @property
    def ready(self) -> bool:
        """Whether a request could be sent."""
        return self.client.connected and self.client.serving and self.credit.known

    def has_room(self, num_tokens: int) -> bool:
        """An idle shard gets a request whatever its credit is: it either runs it or returns why it cannot."""
        return self.ready and (self.credit.covers(num_tokens) or (not self.running and self.credit.num_unseen == 0))

    def add(self, generation: Generation, now: float) -> None:
        """The request runs here from now on."""
        wire_id = next(self._wire_ids)
        generation.routing.place(self.address, wire_id, now)
        self.running[wire_id] = generation
        self.num_by_affinity[generation.adapters.affinity_key] += 1
        self.num_by_caller[generation.request.caller] += 1
        self.credit.sent(generation.num_known)

    def abort(self, generation: Generation, now: float) -> bool:
        """End a request that runs here; False for one that does not."""
        wire_id = generation.routing.wire_id
        if wire_id not in self.running:
            return False
        self.remove(wire_id, now)
        self.client.abort(wire_id)
        return True

    def remove(self, wire_id: int, now: float) -> None:
        """The request is over."""
        generation = self.running.pop(wire_id)
        _decrement(self.num_by_affinity, generation.adapters.affinity_key)
        _decrement(self.num_by_caller, generation.request.caller)
        if not self.running:
            self.send_timing.on_idle(now)

    def digest(self) -> "asyncio.Future[str]":
        """Digest of the files of the shard's model: requested once per stream, and kept after its end."""
        if self._digest is None:
            self._digest = asyncio.ensure_future(self.client.digest())
            self._digest.add_done_callback(self._on_digest)
        return self._digest

    def _on_digest(self, call: "asyncio.Future[str]") -> None:
        """One that failed is requested again."""
        if (call.cancelled() or call.exception() is not None) and self._digest is call:
            self._digest = None

    @property
    def known_digest(self) -> str:
        """The model's digest, "" before it has arrived."""
        call = self._digest
        if call is None or not call.done() or call.cancelled() or call.exception() is not None:
            return ""
        return call.result()

    def watch(self, milliseconds: int) -> None:
        """Have the shard describe some of its steps for so long."""
        if self.client.connected:
            self.client.send(pb.Command(watch_ms=milliseconds))

    def update(self, output: pb.StepOutput, now: float) -> bool:
        """Take the shard's state from a message; True where a step has ended since the previous message."""
        if output.HasField("credit"):
            credit = output.credit
            self.credit.update(credit.num_requests, credit.num_kv_tokens, credit.acknowledged)
        if output.HasField("load"):
            self.send_timing.set_step_time(output.load.expected_ms / 1000)
            self._has_steps = output.load.num_running > 0 and not output.load.is_stalled
            self.load = output.load
        if output.HasField("step_requests"):
            self.step_requests = frozenset(output.step_requests.ids)
        if output.HasField("step_detail"):
            self.step_detail = output.step_detail
        if output.step <= self._last_step:
            return False
        self._last_step = output.step
        self.send_timing.on_step(now)
        return True

    def connect(self, info: pb.ShardInfo) -> None:
        """A new stream is open: ids and credit of earlier ones are void."""
        self.info = info
        self._reset(info.num_pages * info.page_size if info.prefix_caching else 0)

    def disconnect(self) -> list[Generation]:
        """The stream has ended. Returns the requests that ran on it, the first one sent first."""
        self.credit = CreditAccount()
        self.residency = AdapterResidency()
        if self.client.is_taken_out and self._stuck_file:
            Path(self._stuck_file).touch()
        lost = list(self.running.values())
        self.running.clear()
        self.num_by_affinity.clear()
        self.num_by_caller.clear()
        return lost


def _decrement(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


MAX_SUBMIT_BYTES = 4 << 20
"""The limit of a shard on one message."""
_OTHER_BYTES = 64 << 10
"""Enough for all fields of a Submit but token ids, biases, the salt and a grammar."""
_MAX_SHOWN = 256
"""Characters of names that are for logs."""


def adapter_pin(adapter: Adapter, digest: str) -> pb.AdapterPin:
    """The shard identifies the adapter by its digest; the other fields are for logs."""
    ids = ",".join(pin.id for pin in adapter.pins)[:_MAX_SHOWN]
    return pb.AdapterPin(source=adapter.source, id=ids, revision=adapter.revision[:_MAX_SHOWN], digest=digest)


def opaque(caller: str) -> str:
    """What shards know of a caller: the same one through every router. Empty where a request has none."""
    return hashlib.blake2b(caller.encode(errors="surrogatepass"), digest_size=8).hexdigest() if caller else ""


def check_size(request: GenerationRequest, vocab_size: int) -> None:
    """Raises ValidationError where the Submit message of a request could become larger than a shard accepts.

    After the loss of a shard it contains the output so far.
    """
    bytes_per_id = -(-max(vocab_size - 1, 1).bit_length() // 7)
    num_ids = len(request.prompt_ids) + request.max_new_tokens + len(request.speculation.prediction_ids)
    texts = request.cache_salt + ("" if request.grammar is None else request.grammar.text)
    most = (MAX_SUBMIT_BYTES - _OTHER_BYTES - len(texts.encode())) // bytes_per_id
    most -= 10 * len(request.sampling.logit_bias) + len(request.sampling.allowed_ids) + 2 * len(request.stop_token_ids)
    most -= sum(len(word) + 4 for word in request.sampling.bad_words)
    if num_ids > most:
        raise ValidationError(
            f"prompt, output and `prediction` may have {most} tokens together, which is what fits a message to a "
            f"shard. Given: {num_ids}"
        )


def submit_message(generation: Generation, deadline_ms: int = 0, num_held: int = 0) -> pb.Submit:
    """Message that submits an admitted request; `deadline_ms` from now, 0 for none. num_held: further requests of its
    caller in the queue.
    """
    request, adapters = generation.request, generation.adapters
    adapter, heads = adapters.adapter_pin, adapters.heads_pin
    submit = pb.Submit(
        id=generation.routing.wire_id,
        prompt_ids=generation.known_ids,
        num_emitted=len(generation.emitted_ids),
        max_new_tokens=request.max_new_tokens,
        stop_ids=generation.end_ids,
        deadline_ms=deadline_ms,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        learning_tenant=request.learning_tenant,
        caller=opaque(request.caller),
        share=request.share,
        num_held=num_held,
        adapter=None if adapter is None else adapter_pin(*adapter),
        adapter_start=0 if adapter is None else adapters.start,
        heads=None if heads is None else adapter_pin(*heads),
        isolation_steps=generation.routing.poison_tracker.isolation_steps,
    )
    request.sampling.to_wire(submit)
    request.logprobs.to_wire(submit)
    if generation.emitted_ids:
        submit.logprobs.prefill = False  # they were sent before the first token
    submit.num_virtual = adapters.num_virtual
    if adapters.composition is not None:
        adapters.composition.to_wire(submit)
    if adapters.can_speculate:
        request.speculation.to_wire(submit)
    if request.grammar is not None:
        request.grammar.to_wire(submit)
    if request.pooling is not None:
        request.pooling.to_wire(submit)
    return submit
