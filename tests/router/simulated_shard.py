"""A shard without a model, for measuring the router alone: each running request gets one token per step.

Speaks the real wire over a real socket and coalesces as the real outbox does: while the stream is slow, the outputs
of several steps become one message. Knows nothing about text; tokens are drawn from a range of ordinary ids.

    python -m tests.router.simulated_shard unix:/tmp/folder/shard.sock --step-ms 5
"""

import argparse
import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc
from lorikeet.proto.outputs import socket_path
from lorikeet.proto.version import TAKES_COLUMNS, version
from lorikeet.shard.grpc.outputs import OutputConnection, OutputSocket, connection_of

HEARTBEAT_S = 0.25
DETAIL_S, MAX_DETAILS = 0.1, 256
"""How often a step is described to a router that watches, and for how many requests, as by the real shard."""


@dataclass
class SimulatedModel:
    """How the pretended device behaves."""

    step_seconds: float = 0.005
    max_running: int = 512
    kv_tokens: int = 1 << 22
    vocab_size: int = 8192
    token_ids: tuple[int, ...] = tuple(range(300, 1324))
    """What requests emit, by seed and position."""
    coalesce: bool = True
    on_command: Callable[[pb.Command], None] = lambda command: None
    """Called with each message that arrives, for tests that count them."""


@dataclass
class _Running:
    submit: pb.Submit
    num_emitted: int = 0


@dataclass
class _Stream:
    """One router's requests and what it has not been sent yet."""

    running: dict[int, _Running] = field(default_factory=dict)
    arrived: list[pb.Submit] = field(default_factory=list)
    pending: pb.StepOutput | None = None
    takes_columns: bool = False
    num_taken: int = 0
    watched_until: float = 0.0
    described_at: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class SimulatedShard(shard_pb2_grpc.ShardServicer):
    """Serves any number of routers from one step loop."""

    def __init__(self, model: SimulatedModel) -> None:
        self._model = model
        self._streams: list[_Stream] = []
        self._step = 0
        self._work = asyncio.Event()
        self.num_steps = 0
        self.may_end = asyncio.Event()
        """Cleared, it holds the running step for as long as a test wants."""
        self.may_end.set()
        self.health = health.aio.HealthServicer()
        self.output_socket: OutputSocket | None = None
        self.is_held = False
        self.is_mute = False
        """Whether it says nothing any more, as a process that was halted."""
        self.running_ms = 0
        """How long the step is said to have been running."""
        self.aborted_ids: list[int] = []
        self.nums_held: list[int] = []
        """Of all submits: further requests of the caller in the router."""

    @property
    def num_running(self) -> int:
        return sum(len(stream.running) for stream in self._streams)

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.ShardInfo:
        model = self._model
        return pb.ShardInfo(
            token_masks=True,
            version=version(),
            model_id="simulated",
            dtype="torch.bfloat16",
            device="cpu",
            vocab_size=model.vocab_size,
            max_total_tokens=1 << 17,
            page_size=16,
            num_pages=model.kv_tokens // 16,
            max_running=model.max_running,
            grammars=True,
            history=True,
            outputs_socket=self.output_socket is not None,
        )

    async def Serve(
        self, commands: AsyncIterator[pb.Command], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepOutput]:
        stream = _Stream(takes_columns=TAKES_COLUMNS in map(tuple, context.invocation_metadata() or ()))
        outputs = await self._connection(context)
        self._streams.append(stream)
        self._report(stream)
        reader = asyncio.create_task(self._read(stream, commands))
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await stream.wake.wait()
                stream.wake.clear()
                if self.is_mute:
                    continue
                output, stream.pending = stream.pending or pb.StepOutput(step=self._step), None
                output.heartbeat.age_ms = self.running_ms
                if outputs is None:
                    yield output
                else:
                    await outputs.write(output)
        finally:
            if outputs is not None:
                outputs.close()
            reader.cancel()
            self._streams.remove(stream)

    async def _connection(self, context: grpc.aio.ServicerContext) -> OutputConnection | None:
        return await connection_of(context.invocation_metadata(), self.output_socket)

    async def run(self) -> None:
        """The step loop. Nobody can connect once it has ended."""
        try:
            await self._run()
        finally:
            if self.output_socket is not None:
                self.output_socket.close()

    async def _run(self) -> None:
        """Sleeps while there is nothing to do, keeps to the step time otherwise."""
        due = time.monotonic()
        while True:
            if not any(stream.running or stream.arrived for stream in self._streams):
                self._work.clear()
                await self._work.wait()
                due = time.monotonic()
            for stream in self._streams:
                self._admit(stream)
            due = max(due + self._model.step_seconds, time.monotonic())
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.is_held = not self.may_end.is_set()
            await self.may_end.wait()
            self._step += 1
            self.num_steps += 1
            for stream in self._streams:
                self._emit(stream)

    async def _read(self, stream: _Stream, commands: AsyncIterator[pb.Command]) -> None:
        async for command in commands:
            self._model.on_command(command)
            stream.num_taken += len(command.submits)
            stream.arrived.extend(command.submits)
            self.nums_held += [submit.num_held for submit in command.submits]
            for wire_id in command.abort_ids:
                self.aborted_ids.append(wire_id)
                stream.running.pop(wire_id, None)
            if command.watch_ms:
                stream.watched_until = time.monotonic() + command.watch_ms / 1000
            if command.submits:
                self._work.set()

    def _admit(self, stream: _Stream) -> None:
        for submit in stream.arrived:
            stream.running[submit.id] = _Running(submit, submit.num_emitted)
        if stream.arrived:
            self._report(stream)
            assert stream.pending is not None
            stream.pending.step_requests.CopyFrom(pb.StepRequests(ids=stream.running))
        stream.arrived.clear()

    def _emit(self, stream: _Stream) -> None:
        """One token for each running request, merged with what the stream has not taken yet."""
        token_ids = self._model.token_ids
        size = len(token_ids)
        parts, columns = [], {wanted: pb.TokenColumns() for wanted in (False, True)}
        may_use_columns = stream.takes_columns and not (stream.pending is not None and stream.pending.outputs)
        for wire_id, request in list(stream.running.items()):
            submit = request.submit
            token_id = token_ids[(submit.seed * 37 + request.num_emitted) % size]
            is_last = request.num_emitted + 1 >= submit.max_new_tokens
            if may_use_columns and not is_last:
                wanted = columns[submit.logprobs.wanted]
                wanted.ids.append(wire_id)
                wanted.token_ids.append(token_id)
                if submit.logprobs.wanted:
                    wanted.logprobs.append(-0.5)
                request.num_emitted += 1
                continue
            part = pb.RequestOutput(id=wire_id, token_ids=(token_id,), sources=b"\1", step_ends=b"\1")
            if submit.logprobs.wanted:
                part.logprobs.append(-0.5)
            request.num_emitted += 1
            if request.num_emitted >= submit.max_new_tokens:
                part.finish_reason = pb.FINISH_LENGTH
                del stream.running[wire_id]
            parts.append(part)
        self._report(stream, parts, [each for each in columns.values() if each.ids])

    def _report(
        self, stream: _Stream, parts: list[pb.RequestOutput] | None = None, columns: Sequence[pb.TokenColumns] = ()
    ) -> None:
        model = self._model
        earlier = stream.pending
        merged = merge_outputs(earlier, parts or []) if earlier and model.coalesce else parts
        num_running = len(stream.running)
        stream.pending = pb.StepOutput(
            step=self._step,
            credit=pb.Credit(
                num_requests=max(0, model.max_running - num_running - len(stream.arrived)),
                num_kv_tokens=model.kv_tokens,
                acknowledged=stream.num_taken,
            ),
            load=pb.Load(
                num_running=num_running,
                step_ms=round(1000 * model.step_seconds),
                step_tokens=len(parts or ()) + sum(len(part.ids) for part in columns),
                expected_ms=round(1000 * model.step_seconds),
            ),
            columns=[*(earlier.columns if earlier and model.coalesce else ()), *columns],
            outputs=merged or (),
            step_requests=earlier.step_requests if earlier is not None and earlier.HasField("step_requests") else None,
            step_detail=self._detail(stream),
        )
        stream.wake.set()

    @staticmethod
    def _detail(stream: _Stream) -> pb.StepDetail | None:
        """Details of a step that computes one token of each request."""
        now = time.monotonic()
        if now > stream.watched_until or now < stream.described_at + DETAIL_S:
            return None
        stream.described_at = now
        ids = list(stream.running)[:MAX_DETAILS]
        return pb.StepDetail(ids=ids, num_tokens=[1] * len(ids), num_drafts=[0] * len(ids))


def merge_outputs(pending: pb.StepOutput, parts: list[pb.RequestOutput]) -> list[pb.RequestOutput]:
    """Outputs of several steps as one per request."""
    by_id = {part.id: part for part in pending.outputs}
    for part in parts:
        earlier = by_id.get(part.id)
        if earlier is None:
            by_id[part.id] = part
        else:
            sources, step_ends = earlier.sources + part.sources, earlier.step_ends + part.step_ends
            earlier.MergeFrom(part)  # appends repeated fields, but replaces bytes
            earlier.sources, earlier.step_ends = sources, step_ends
    return list(by_id.values())


async def start(
    address: str, model: SimulatedModel, kind: type[SimulatedShard] = SimulatedShard
) -> tuple[grpc.aio.Server, SimulatedShard, "asyncio.Task[None]"]:
    """Serve on `address` from the running loop."""
    server = grpc.aio.server()
    shard = kind(model)
    shard_pb2_grpc.add_ShardServicer_to_server(shard, server)
    health_pb2_grpc.add_HealthServicer_to_server(shard.health, server)
    await shard.health.set("", health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(address)
    if (path := socket_path(address)) is not None:
        shard.output_socket = OutputSocket(path)
        await shard.output_socket.listen()
    await server.start()
    return server, shard, asyncio.create_task(shard.run())


async def _main(addresses: Sequence[str], model: SimulatedModel) -> None:
    started = [await start(address, model) for address in addresses]
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    print("serving", flush=True)
    await ended.wait()
    for server, _, steps in started:
        steps.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await steps
        await server.stop(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("addresses", nargs="+", metavar="address", help="one shard each, all in this process")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--max-running", type=int, default=512)
    arguments = parser.parse_args()
    uvloop.run(_main(arguments.addresses, SimulatedModel(arguments.step_ms / 1000, arguments.max_running)))
