"""The gRPC client of one shard: a channel, a health watch and the one stream that carries all requests.

Connects, and reconnects with back-off when the shard is gone. It carries messages; the dispatcher handles their content
and the requests of a stream that ended.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc
from lorikeet.proto.version import TAKES_COLUMNS
from lorikeet.router.config import RouterConfig

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
JOIN_READERS = 64
"""With at least this many readers to wake, a busy process waits for one more message."""
JOIN_LOAD = 0.5
"""A process is busy while its CPU time is more than this fraction of the elapsed time."""
JOIN_SECONDS = 0.002
"""Maximum seconds of one wait (gRPC takes up to a millisecond to deliver what has arrived)."""
MAX_JOINED = 8
"""Maximum number of waits in a row."""
HEARTBEAT_SECONDS, MAX_MISSED = 0.25, 8
"""A shard sends a message at this interval; after so many missed ones its stream is closed."""
FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
"""Seconds before the next connection attempt."""
EXPLAIN_SECONDS = 5.0
"""How often the reason for a missing connection over TCP is queried."""
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),
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

    def on_output(self, output: pb.StepOutput) -> int:
        """One message; returns the number of requests whose readers wait for `on_quiet`."""

    def on_quiet(self) -> None:
        """No further message is at hand: wake the readers."""

    def on_disconnect(self, reason: str) -> None:
        """The stream has ended, and with it every request on it. Without a reason it was closed by this router."""


class ShardClient:
    """Keeps one stream to one shard open while `run` runs."""

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
        self._stub = stub
        call = stub.Serve(metadata=(*self._metadata, TAKES_COLUMNS))
        self._outbox.clear()
        self.connected, self.is_taken_out, self._num_missed = True, False, 0
        self._fault = asyncio.get_running_loop().create_future()
        listener.on_connect(info)
        reader = asyncio.create_task(self._read(call, listener))
        others = [asyncio.create_task(self._write(call)), asyncio.create_task(self._check_heartbeat())]
        reason = "the shard closed the stream"
        try:
            await asyncio.wait((reader, self._fault), return_when=asyncio.FIRST_COMPLETED)
            if self._fault.done():
                return (reason := self._fault.result())
            await reader
            if (code := await call.code()) is not grpc.StatusCode.OK:
                reason = f"{code.name}: {await call.details()}"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            reason = ""
            raise
        finally:
            self.connected, self._stub = False, None
            for task in (reader, *others):
                task.cancel()
            call.cancel()
            listener.on_disconnect(reason)
            await asyncio.gather(reader, *others, return_exceptions=True)
        return reason

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

    def _on_message(self, output: pb.StepOutput) -> None:
        self._has_message, self._num_missed = True, 0
        if 0 < 1000 * self._step_timeout_s < output.heartbeat.age_ms:
            self._take_out(f"step {output.heartbeat.running_step} takes longer than {self._step_timeout_s:g} s")

    async def _read(self, call: grpc.aio.StreamStreamCall, listener: ShardListener) -> None:
        """Take messages until the stream ends.

        Writing to many clients costs far more than reading a message. So while this process is busy and many readers
        wait, it waits a moment for the next message: outputs of several steps reach each client as one write.
        """
        woken_at, woken_cpu = time.monotonic(), time.process_time()
        reading = asyncio.ensure_future(call.read())
        try:
            num_joined = 0
            while (output := await reading) is not grpc.aio.EOF:
                self._on_message(output)
                reading = asyncio.ensure_future(call.read())
                num_readers = listener.on_output(output)
                num_joined += 1
                is_busy = time.process_time() - woken_cpu > JOIN_LOAD * (time.monotonic() - woken_at)
                if is_busy and num_readers >= JOIN_READERS and num_joined < MAX_JOINED:
                    done, _ = await asyncio.wait((reading,), timeout=JOIN_SECONDS)
                    if done:
                        continue
                woken_at, woken_cpu = time.monotonic(), time.process_time()
                listener.on_quiet()
                num_joined = 0
        finally:
            reading.cancel()
            listener.on_quiet()

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
