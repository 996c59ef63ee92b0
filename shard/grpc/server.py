"""The shard's gRPC server, in its own thread: it moves messages between streams, inbox and outbox.

It listens from the start, so that a router need not poll; calls wait until the model is loaded.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
import structlog
import uvloop
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc
from lorikeet.proto.outputs import socket_path
from lorikeet.proto.version import TAKES_COLUMNS
from lorikeet.shard.grpc.auth import Access
from lorikeet.shard.grpc.codec import Bounds, read_command, write_update
from lorikeet.shard.grpc.outputs import OutputConnection, OutputSocket, connection_of, private_sockets
from lorikeet.shard.grpc.streams import Inbox, LearningAsked, Outbox, StreamEnded, StreamOpened, StreamTooSlow

log = structlog.get_logger()

HEARTBEAT_S = 0.25
END_GRACE_S = 2.0
MANY_SUBMITS = 256
"""Requests of a stream after which the next are read once the step loop has taken these."""
AT_ONCE, PAUSE_S = 32, 0.004
"""Requests of a larger message that are read at once, about 2 ms, and the time until the next: this thread and the step
loop share the interpreter's lock.
"""
POLL_S = 0.005
OPTIONS = [("grpc.max_send_message_length", 4 << 20), ("grpc.max_receive_message_length", 4 << 20)]


@dataclass(frozen=True)
class Facts:
    """Description of a shard that is ready."""

    info: pb.ShardInfo
    bounds: Bounds
    progress: Callable[[], tuple[int, float]]
    """Number and start of the running step, (0, …) while idle."""
    digest: Callable[[], Future[str]]
    """Digest of the files that the model was loaded from."""


class ShardService(shard_pb2_grpc.ShardServicer):
    """The rpcs. Runs in the server's event loop."""

    def __init__(self, inbox: Inbox, outbox: Outbox) -> None:
        self.facts: asyncio.Future[Facts] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.output_socket: OutputSocket | None = None
        """Of a shard that listens on a Unix socket."""
        self._inbox = inbox
        self._outbox = outbox
        self._epochs = count(1)
        self._reads_many = asyncio.Lock()
        """Held while some requests of a large message are read: one stream at a time."""

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.ShardInfo:
        return (await asyncio.shield(self.facts)).info

    async def Digest(self, request: pb.DigestRequest, context: Any) -> pb.DigestReply:
        facts = await asyncio.shield(self.facts)
        try:
            found = await asyncio.shield(asyncio.wrap_future(facts.digest()))
        except (OSError, ValueError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.DigestReply(sha256=found)

    async def Learning(self, request: pb.LearningRequest, context: Any) -> pb.LearningReply:
        facts = await asyncio.shield(self.facts)
        if not facts.info.learning:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this shard learns no heads")
        asked = LearningAsked(request.purge)
        self._inbox.put(asked)
        return await asyncio.wrap_future(asked.answer)

    async def Serve(self, commands: AsyncIterator[pb.Command], context: Any) -> None:
        facts = await asyncio.shield(self.facts)
        try:
            outputs = await connection_of(context.invocation_metadata(), self.output_socket)
        except LookupError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        epoch, loop = next(self._epochs), asyncio.get_running_loop()
        called, slow = asyncio.Event(), _Interruption()
        self._outbox.open(
            epoch,
            wake=lambda: loop.call_soon_threadsafe(called.set),
            end=lambda: loop.call_soon_threadsafe(slow.interrupt),
        )
        self._inbox.put(StreamOpened(epoch))
        log.info("stream_opened", stream=epoch)
        reader = asyncio.create_task(self._read(epoch, commands, facts.bounds, called))
        try:
            await self._write(epoch, context, outputs, facts, reader, called)
        except (StreamTooSlow, asyncio.CancelledError) as error:
            if not (slow.is_over or isinstance(error, StreamTooSlow)):
                raise
            slow.is_over = True
        except ConnectionError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            reader.cancel()
            self._outbox.close(epoch)
            self._inbox.put(StreamEnded(epoch))
            if outputs is not None:
                outputs.close()
            log.info("stream_ended", stream=epoch, is_slow=slow.is_over)
        if slow.is_over:  # the router gets this once it reads again
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the router did not read its stream: more output was waiting than a shard keeps",
            )
        if reader.done() and not reader.cancelled() and isinstance(reader.exception(), DecodeError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a message is no Command")

    async def _write(
        self,
        epoch: int,
        context: Any,
        outputs: OutputConnection | None,
        facts: Facts,
        reader: "asyncio.Task[None]",
        called: asyncio.Event,
    ) -> None:
        """Send updates until the router sends nothing more, or the shard ends. Raises StreamTooSlow."""
        takes_columns = TAKES_COLUMNS in map(tuple, context.invocation_metadata() or ())
        send = context.write if outputs is None else outputs.write
        is_last = False
        while not (is_last or reader.done()):
            is_last = self.ended.is_set()
            await wait_for_event(called, 0 if is_last else HEARTBEAT_S)
            called.clear()
            update = self._outbox.take(epoch)
            for message in write_update(update, heartbeat(facts), takes_columns):
                await send(message)
            self._outbox.sent(epoch, update)

    async def _read(
        self, epoch: int, commands: AsyncIterator[pb.Command], bounds: Bounds, ended: asyncio.Event
    ) -> None:
        try:
            num_submits = 0
            async for command in commands:
                for part in divided(command):
                    if part is command:
                        self._inbox.put(read_command(epoch, part, bounds))
                    else:
                        async with self._reads_many:
                            self._inbox.put(read_command(epoch, part, bounds))
                            await asyncio.sleep(PAUSE_S)
                    num_submits += len(part.submits)
                    if num_submits >= MANY_SUBMITS:
                        num_submits = 0
                        await self._taken(epoch)
        finally:
            ended.set()
            self._inbox.forget(epoch)

    async def _taken(self, epoch: int) -> None:
        """Wait until the step loop has taken what was read, and longer where the stream sends more than its credit."""
        while not self._inbox.is_empty:  # noqa: ASYNC110 - the step loop is another thread
            await asyncio.sleep(POLL_S)
        while (pause_s := self._inbox.pause_of(epoch)) > 0:  # noqa: ASYNC110 - it may be paused again
            await asyncio.sleep(pause_s)


class _Interruption:
    """Ends once what the current task waits for."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self.is_over = False
        """Whether it was interrupted, or need not be any more."""

    def interrupt(self) -> None:
        if self._task is not None and not self.is_over:
            self.is_over = True
            self._task.cancel()


def divided(command: pb.Command) -> list[pb.Command]:
    """Messages with the same effect, of AT_ONCE requests at most. The last one has everything else."""
    num_submits = len(command.submits)
    if num_submits <= AT_ONCE:
        return [command]
    parts = [pb.Command(submits=command.submits[first : first + AT_ONCE]) for first in range(0, num_submits, AT_ONCE)]
    last = pb.Command()
    last.CopyFrom(command)
    del last.submits[:]
    parts[-1].MergeFrom(last)
    return parts


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set; after `timeout_s` set it."""
    timer = asyncio.get_running_loop().call_later(timeout_s, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


def heartbeat(facts: Facts) -> pb.Heartbeat:
    """Number and age of the running step."""
    number, started = facts.progress()
    if not number:
        return pb.Heartbeat()
    return pb.Heartbeat(running_step=number, age_ms=max(0, round((time.monotonic() - started) * 1000)))


class Server:
    """The gRPC server and its thread."""

    def __init__(self, listen: str, inbox: Inbox, outbox: Outbox, access: Access | None = None) -> None:
        self._listen = listen
        self._access = access or Access()
        self._started: Future[str] = Future()
        self._loop = uvloop.new_event_loop()
        self._service: ShardService
        self._health: health.aio.HealthServicer
        self._thread = threading.Thread(target=self._run, args=(inbox, outbox), name="grpc", daemon=True)

    def start(self) -> str:
        """Listen. Returns the address, with the port that was bound for 0. Raises OSError if it cannot be bound."""
        self._thread.start()
        return self._started.result()

    def ready(self, facts: Facts) -> None:
        """Start to answer calls."""
        asyncio.run_coroutine_threadsafe(self._ready(facts), self._loop).result()

    def closing(self) -> None:
        """Report that the shard accepts no new requests, so that routers use other shards."""
        asyncio.run_coroutine_threadsafe(self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING), self._loop)

    def stop(self) -> None:
        """Send the remaining updates, then end."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._service.ended.set)
            self._thread.join()

    def _run(self, inbox: Inbox, outbox: Outbox) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(inbox, outbox))
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self, inbox: Inbox, outbox: Outbox) -> None:
        self._service = ShardService(inbox, outbox)
        self._health = health.aio.HealthServicer()
        server = grpc.aio.server(options=OPTIONS, interceptors=self._access.interceptors)
        shard_pb2_grpc.add_ShardServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        address = bind(server, self._listen, self._access)
        if (path := socket_path(self._listen)) is not None:
            self._service.output_socket = OutputSocket(path)
            await self._service.output_socket.listen()
        await server.start()
        self._started.set_result(address)
        await self._service.ended.wait()
        await self._health.enter_graceful_shutdown()
        await server.stop(END_GRACE_S)
        if self._service.output_socket is not None:
            self._service.output_socket.close()

    async def _ready(self, facts: Facts) -> None:
        facts.info.outputs_socket = self._service.output_socket is not None
        self._service.facts.set_result(facts)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def _set_health(self, status: Any) -> None:
        for name in ("", "lorikeet.shard.v1.Shard"):
            await self._health.set(name, status)


def bind(server: Any, listen: str, access: Access) -> str:
    """Bind the address: a Unix socket that only its owner can open, or host and port. Raises OSError."""
    is_private = listen.startswith("unix:")
    try:
        with private_sockets():
            if is_private or access.credentials is None:
                port = server.add_insecure_port(listen)
            else:
                port = server.add_secure_port(listen, access.credentials)
    except RuntimeError as error:
        raise OSError(f"cannot listen at {listen}") from error
    if not is_private:
        return f"{listen.rpartition(':')[0]}:{port}"
    os.chmod(listen.removeprefix("unix:"), 0o600)
    return listen
