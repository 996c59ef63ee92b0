"""One shard as the router sees it: a channel, a health watch and the one stream that carries all requests.

Connects, and connects again with back-off when the shard is gone. Moves messages; what is in them, and what becomes
of requests whose stream ended, is the dispatcher's matter.
"""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc
from lorikeet.router.shards.credentials import OPEN, ShardAccess

log = structlog.get_logger()

MAX_COMMAND_BYTES = 3 << 20
"""Messages stay below 4 MiB; a Command is closed before it could get there."""
MANY_WAITING = 64
"""Requests with news from which on a busy process waits for one more message …"""
BUSY = 0.5
"""… while it spends so much of its time computing …"""
JOIN_SECONDS = 0.002
"""… for so long (gRPC takes up to a millisecond to hand over what has arrived) …"""
MOST_JOINED = 8
"""… and so many times in a row at most."""
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


BEAT_SECONDS, QUIET_BEATS = 0.25, 8
"""A shard says something so often; after so many times without a word it is taken out."""
FIRST_DELAY, LONGEST_DELAY = 0.1, 2.0
"""Seconds before another connection is tried."""
EXPLAIN_SECONDS = 5.0
"""So long after the first attempt, and as often from then on, it is asked why there is no connection over TCP."""


class ShardListener(Protocol):
    """Who is told what happens on the stream."""

    def shard_incompatible(self, info: pb.ShardInfo) -> str:
        """Why this shard cannot be used, in a sentence; empty if it can."""

    def shard_serving(self) -> None:
        """What the shard says of whether it takes requests has changed."""

    def shard_up(self, info: pb.ShardInfo) -> None:
        """A new stream is open: no id and no credit of an earlier one means anything on it."""

    def shard_output(self, output: pb.StepOutput) -> int:
        """One message; returns the number of requests with news to pass on."""

    def shard_quiet(self) -> None:
        """No further message is at hand: pass the news on."""

    def shard_down(self, reason: str) -> None:
        """The stream is gone, and with it every request on it. Without a reason it was closed here."""


class ShardClient:
    """Keeps one stream to one shard alive for as long as `run` runs."""

    def __init__(
        self,
        address: str,
        listener: ShardListener,
        step_timeout_s: float = 0.0,
        access: ShardAccess = OPEN,
        name: str = "",
    ) -> None:
        """A shard whose step takes longer than `step_timeout_s` is taken out; 0 waits for ever. `name`: that of its
        certificate, where it is not the address's.
        """
        self.address = address
        self._access = access
        self._name = name
        self._metadata = access.metadata(address)
        self.connected = False
        self.serving = False
        """What the shard's health service said last."""
        self.last_heard = 0.0
        """time.monotonic() of the last message."""
        self.is_taken_out = False
        """Whether the last stream was ended here, since the shard hung."""
        self._step_timeout_s = step_timeout_s
        self._num_quiet = 0
        self._fault: asyncio.Future[str] | None = None
        self._listener = listener
        self._outbox: deque[tuple[pb.Command, int]] = deque()
        """Commands not taken by the stream yet, with an upper bound of their size in bytes."""
        self._wake = asyncio.Event()
        self._stub: shard_pb2_grpc.ShardStub | None = None
        """Of the connection at hand."""

    async def run(self) -> None:
        """Serve until cancelled."""
        delay = FIRST_DELAY
        while True:
            self.last_heard = 0.0
            reason = await self._one_connection()
            if self.last_heard:
                delay = FIRST_DELAY
            log.warning("shard_unreachable", address=self.address, reason=reason, retry_in_s=round(delay, 2))
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            delay = min(2 * delay, LONGEST_DELAY)

    def submit(self, submits: Iterable[pb.Submit]) -> int:
        """Send requests in as few messages as their size allows; return the number of messages."""
        command, size, num_commands = pb.Command(), 0, 1
        for submit in submits:
            added = submit.ByteSize() + 8
            if size and size + added > MAX_COMMAND_BYTES:
                self._put(command, size)
                command, size, num_commands = pb.Command(), 0, num_commands + 1
            command.submits.append(submit)
            size += added
        self._put(command, size)
        return num_commands

    def abort(self, wire_id: int) -> None:
        """End a request in the shard. Aborts that meet before the stream takes them share a message."""
        if not self.connected:
            return
        if not self._outbox:
            self._put(pb.Command(), 0)
        command, size = self._outbox[-1]
        command.abort_ids.append(wire_id)
        self._outbox[-1] = (command, size + 10)

    def tell(self, command: pb.Command) -> None:
        """Send what concerns no request: prefetches, pins, unloads."""
        if self.connected:
            self._put(command, command.ByteSize())

    async def digest(self) -> str:
        """Of the files that the shard's model was loaded from. Raises grpc.aio.AioRpcError, or ConnectionError."""
        if self._stub is None:
            raise ConnectionError("its shard is not connected")
        return str((await self._stub.Digest(pb.DigestRequest(), metadata=self._metadata)).sha256)

    def _put(self, command: pb.Command, size: int) -> None:
        self._outbox.append((command, size))
        self._wake.set()

    async def _one_connection(self) -> str:
        """Connect and serve until something breaks; say what."""
        async with self._access.channel(self.address, self._name, _CHANNEL_OPTIONS) as channel:
            watch: asyncio.Task[None] | None = None
            doubt = asyncio.create_task(self._explain(channel))
            try:
                health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                if not await self._until_serving(health):
                    return f"health: {await health.code()}: {await health.details()}"
                watch = asyncio.create_task(self._follow_health(health))
                stub = shard_pb2_grpc.ShardStub(channel)
                info = await stub.Info(pb.InfoRequest(), timeout=10.0, metadata=self._metadata)
                if incompatible := self._listener.shard_incompatible(info):
                    return incompatible
                return await self._serve(stub, info)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            except Exception as error:  # whatever it was, the next connection may do without
                log.exception("shard_connection_broke", address=self.address)
                return type(error).__name__
            finally:
                self.serving = False
                doubt.cancel()
                if watch is not None:
                    watch.cancel()
                    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                        await watch

    async def _explain(self, channel: grpc.aio.Channel) -> None:
        """Say why there is no connection, once for each reason: a call that waits for one never does. Shards behind a
        Unix socket are children of the launcher, which tells of them.
        """
        said = ""
        while not self.address.startswith("unix:"):
            await asyncio.sleep(EXPLAIN_SECONDS)
            try:
                stub = health_pb2_grpc.HealthStub(channel)
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=EXPLAIN_SECONDS)
                return
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            if reason != said:
                log.warning("shard_unreachable", address=self.address, reason=reason)
            said = reason

    async def _until_serving(self, health: grpc.aio.UnaryStreamCall) -> bool:
        """False when the shard went away first."""
        while not self.serving:
            reply = await health.read()
            if reply is grpc.aio.EOF:
                return False
            self.serving = reply.status == health_pb2.HealthCheckResponse.SERVING
        return True

    async def _follow_health(self, health: grpc.aio.UnaryStreamCall) -> None:
        while (reply := await health.read()) is not grpc.aio.EOF:
            self.serving = reply.status == health_pb2.HealthCheckResponse.SERVING
            log.info("shard_health", address=self.address, serving=self.serving)
            self._listener.shard_serving()
        self.serving = False

    async def _serve(self, stub: shard_pb2_grpc.ShardStub, info: pb.ShardInfo) -> str:
        """One stream from its first message to its end; why it ended."""
        self._stub = stub
        call = stub.Serve(metadata=self._metadata)
        self._outbox.clear()
        self.connected, self.is_taken_out, self._num_quiet = True, False, 0
        self._fault = asyncio.get_running_loop().create_future()
        self._listener.shard_up(info)
        reader = asyncio.create_task(self._read(call))
        others = [asyncio.create_task(self._write(call)), asyncio.create_task(self._count_beats())]
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
            self._listener.shard_down(reason)
            await asyncio.gather(reader, *others, return_exceptions=True)
        return reason

    def _take_out(self, reason: str) -> None:
        if self._fault is not None and not self._fault.done():
            self.is_taken_out = True
            self._fault.set_result(reason)

    async def _count_beats(self) -> None:
        """Counts turns of this loop rather than time: a process that was halted itself has not missed a word."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._num_quiet += 1
            if self._num_quiet >= QUIET_BEATS:
                self._take_out(f"no heartbeat for {BEAT_SECONDS * QUIET_BEATS:g} s")

    def _heard(self, output: pb.StepOutput) -> None:
        self.last_heard = time.monotonic()
        self._num_quiet = 0
        if 0 < 1000 * self._step_timeout_s < output.heartbeat.age_ms:
            self._take_out(f"step {output.heartbeat.running_step} takes longer than {self._step_timeout_s:g} s")

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        """Take messages until the stream ends.

        Writing to many clients costs far more than reading a message. So while this process is busy and news for many
        is at hand, the next message gets a moment to arrive first: steps that have piled up reach each client as one
        write.
        """
        listener = self._listener
        told_at, told_cpu = time.monotonic(), time.process_time()
        reading = asyncio.ensure_future(call.read())
        try:
            num_joined = 0
            while (output := await reading) is not grpc.aio.EOF:
                self._heard(output)
                reading = asyncio.ensure_future(call.read())
                num_waiting = listener.shard_output(output)
                num_joined += 1
                cpu = time.process_time()
                is_busy = cpu - told_cpu > BUSY * (time.monotonic() - told_at)
                if is_busy and num_waiting >= MANY_WAITING and num_joined < MOST_JOINED:
                    done, _ = await asyncio.wait((reading,), timeout=JOIN_SECONDS)
                    if done:
                        continue
                told_at, told_cpu = time.monotonic(), time.process_time()
                listener.shard_quiet()
                num_joined = 0
        finally:
            reading.cancel()
            listener.shard_quiet()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                command, _ = self._outbox.popleft()
                try:
                    await call.write(command)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the stream is over; who reads it says why
