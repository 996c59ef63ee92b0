"""The stream to one shard: how messages that queue up are joined."""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.process import free_port
from lorikeet.router.shards.link import ShardClient, reason_of
from lorikeet.shard.grpc.outputs import OutputConnection
from tests.router import simulated_shard
from tests.router.simulated_shard import SimulatedModel, SimulatedShard

NUM_TOKENS = 200


class Listener:
    """Takes messages of requests with `NUM_TOKENS` tokens, and computes for `seconds` on each message."""

    def __init__(self, seconds: float) -> None:
        self.client: ShardClient
        self._seconds = seconds
        self.num_outputs = 0
        self.num_calls = 0
        self.num_tokens = 0
        self.ended = asyncio.Event()

    def incompatibility(self, info: pb.ShardInfo) -> str:
        return ""

    def on_serving_change(self) -> None:
        """It always serves."""

    def on_connect(self, info: pb.ShardInfo) -> None:
        submit = pb.Submit(id=1, prompt_ids=[1], max_new_tokens=NUM_TOKENS)
        asyncio.get_running_loop().call_soon(self.client.submit, [submit])

    def on_outputs(self, outputs: Sequence[pb.StepOutput]) -> None:
        self.num_outputs += len(outputs)
        self.num_calls += 1
        until = time.process_time() + self._seconds
        while time.process_time() < until:
            pass
        for output in outputs:
            self.num_tokens += sum(len(columns.token_ids) for columns in output.columns)
            for part in output.outputs:
                self.num_tokens += len(part.token_ids)
                if part.finish_reason:
                    self.ended.set()

    def on_disconnect(self, reason: str) -> None:
        self.ended.set()


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(0.0, id="keeps up"), pytest.param(0.02, id="falls behind", marks=pytest.mark.long)],
)
async def test_only_a_process_that_cannot_keep_up_waits_for_one_more_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A process that keeps up may fall behind on a busy machine: one of three attempts is enough."""
    monkeypatch.setattr("lorikeet.router.shards.outputs.JOIN_REQUESTS", 1)
    for attempt in range(3):
        listener = await listened(f"unix:{tmp_path}/shard-{attempt}.sock", seconds)
        assert listener.num_tokens == NUM_TOKENS
        joined = listener.num_outputs - listener.num_calls
        if (joined > listener.num_outputs / 4) == (seconds > 0):
            return
    raise AssertionError(f"{joined} of {listener.num_outputs} messages waited for one more")


async def listened(address: str, seconds: float) -> Listener:
    """All messages of a request have arrived."""
    # Another process: in this one no step could run while the listener computes.
    command = [sys.executable, "-m", "tests.router.simulated_shard", address, "--step-ms", "2" if seconds else "10"]
    shard = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    listener = Listener(seconds)
    listener.client = ShardClient(address)
    running = asyncio.create_task(listener.client.run(listener))
    try:
        async with asyncio.timeout(60):
            await listener.ended.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        shard.terminate()
        await shard.wait()
    return listener


async def test_the_reason_for_no_connection_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lorikeet.router.shards.link.EXPLAIN_SECONDS", 0.1)
    with socket.socket() as bound:  # without listening
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        running = asyncio.create_task(ShardClient(address).run(Listener(0.0)))
        await asyncio.sleep(1.0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    printed = capfd.readouterr()
    (line,) = [line for line in (printed.out + printed.err).splitlines() if "shard_unreachable" in line]
    assert address in line and "Connection refused" in line


async def test_an_error_of_the_health_watch_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def follow(self: ShardClient, health: object, listener: Listener) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(ShardClient, "_follow_health", follow)
    listener, address = Listener(0), f"unix:{tmp_path}/shard.sock"
    server, _, steps = await simulated_shard.start(address, SimulatedModel(0.005, 4))
    listener.client = ShardClient(address)
    running = asyncio.create_task(listener.client.run(listener))
    try:
        async with asyncio.timeout(20):
            await listener.ended.wait()
            steps.cancel()
            await server.stop(0)
            printed = ""
            while "health_watch_failed" not in printed:
                await asyncio.sleep(0.01)
                output = capfd.readouterr()
                printed += output.out + output.err
        assert address in printed
    finally:
        running.cancel()
        await asyncio.wait((running,))


async def test_a_cancelled_client_ends_even_while_it_ends_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it connects again, to a shard that may never come, and whoever cancelled it waits."""
    is_ending = asyncio.Event()

    async def follow(self: ShardClient, health: object, listener: Listener) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await asyncio.sleep(60)

    monkeypatch.setattr(ShardClient, "_follow_health", follow)
    listener, address = Listener(0), f"unix:{tmp_path}/shard.sock"
    server, _, steps = await simulated_shard.start(address, SimulatedModel(0.005, 4))
    listener.client = ShardClient(address)
    running = asyncio.create_task(listener.client.run(listener))
    try:
        async with asyncio.timeout(20):
            await listener.ended.wait()
            steps.cancel()
            await server.stop(0)
            await is_ending.wait()
        running.cancel()
        await asyncio.wait((running,), timeout=10)
        assert running.cancelled()
    finally:
        running.cancel()


class Ended(Listener):
    """Keeps why its stream ended, and what had come until then."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.reasons: list[tuple[str, int]] = []

    def on_disconnect(self, reason: str) -> None:
        self.reasons.append((reason, self.num_tokens))
        super().on_disconnect(reason)


@asynccontextmanager
async def streaming(address: str, kind: type[SimulatedShard]) -> AsyncIterator[tuple[Ended, SimulatedShard]]:
    """A client whose request runs in a shard."""
    server, shard, steps = await simulated_shard.start(address, SimulatedModel(0.002), kind)
    listener = Ended()
    listener.client = ShardClient(address)
    running = asyncio.create_task(listener.client.run(listener))
    try:
        async with asyncio.timeout(30):
            yield listener, shard
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        steps.cancel()
        await server.stop(0)


class Watched(SimulatedShard):
    """Keeps the connections for outputs of its streams."""

    connections: list[OutputConnection | None]

    async def _connection(self, context: grpc.aio.ServicerContext) -> OutputConnection | None:
        found = await super()._connection(context)
        self.connections = [*getattr(self, "connections", []), found]
        return found


class Older(Watched):
    """Does not know the connection for outputs."""

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.ShardInfo:
        info = await super().Info(request, context)
        info.ClearField("outputs_socket")
        return info


@pytest.mark.parametrize("kind", [Watched, Older])
async def test_outputs_come_over_their_connection_where_the_shard_has_one(tmp_path: Path, kind: type[Watched]) -> None:
    async with streaming(f"unix:{tmp_path}/shard.sock", kind) as (listener, shard):
        await listener.ended.wait()
        assert (listener.num_tokens, listener.reasons) == (NUM_TOKENS, [])
        assert isinstance(shard, Watched)
        assert [connection is None for connection in shard.connections] == [kind is Older]


class Forwarded(Watched):
    """Listens on a Unix socket, and is reached over TCP."""

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.ShardInfo:
        info = await super().Info(request, context)
        info.outputs_socket = True
        return info


@pytest.mark.parametrize("kind", [Watched, Forwarded])
async def test_outputs_come_by_grpc_over_tcp(kind: type[Watched]) -> None:
    async with streaming(f"127.0.0.1:{free_port()}", kind) as (listener, shard):
        await listener.ended.wait()
        assert (listener.num_tokens, listener.reasons) == (NUM_TOKENS, [])
        assert isinstance(shard, Watched) and shard.connections == [None]


async def test_a_connection_for_outputs_that_breaks_ends_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorikeet.router.shards.link.END_SECONDS", 0.1)
    async with streaming(f"unix:{tmp_path}/shard.sock", Watched) as (listener, shard):
        while listener.num_tokens < 10:  # noqa: ASYNC110 - the listener only counts
            await asyncio.sleep(0.001)
        assert isinstance(shard, Watched)
        (connection,) = shard.connections
        assert connection is not None
        shard.is_mute = True  # the call goes on
        connection.close()
        await listener.ended.wait()
        assert listener.reasons == [("the shard closed the connection for outputs", listener.num_tokens)]
        assert not listener.client.is_taken_out, "a shard that did not hang is not killed"
        shard.is_mute = False
        listener.ended.clear()
        await listener.ended.wait()  # the next stream of the same client
        assert len(listener.reasons) == 1


class LastWords(Watched):
    """Ends a stream while three messages are still on their way."""

    async def Serve(
        self, commands: AsyncIterator[pb.Command], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepOutput]:
        outputs = await self._connection(context)
        assert outputs is not None
        self.writing = asyncio.create_task(self._write(outputs))
        return
        yield

    async def _write(self, outputs: OutputConnection) -> None:
        await asyncio.sleep(0.2)
        for _ in range(3):
            await outputs.write(pb.StepOutput(outputs=[pb.RequestOutput(id=1, token_ids=[5] * 100)]))
        outputs.close()


async def test_all_outputs_come_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.router.shards.outputs.JOIN_LOAD", -1.0)
    monkeypatch.setattr("lorikeet.router.shards.outputs.JOIN_REQUESTS", 0)
    monkeypatch.setattr("lorikeet.router.shards.outputs.JOIN_SECONDS", 60.0)
    async with streaming(f"unix:{tmp_path}/shard.sock", LastWords) as (listener, _):
        await listener.ended.wait()
        assert listener.reasons == [("the shard closed the stream", 300)]


def test_a_write_that_comes_too_late_is_no_reason() -> None:
    assert reason_of(grpc.StatusCode.OK, "") == ""
    assert reason_of(grpc.StatusCode.INTERNAL, "Internal error from Core") == ""
    assert reason_of(grpc.StatusCode.INTERNAL, "broken") == "INTERNAL: broken"
    assert reason_of(grpc.StatusCode.UNAVAILABLE, "gone") == "UNAVAILABLE: gone"


class WithoutSocket(Watched):
    """Says that it has a socket for outputs, and has none."""

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.ShardInfo:
        assert self.output_socket is not None
        self.output_socket.close()
        return await super().Info(request, context)


async def test_a_missing_socket_for_outputs_is_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed = ""
    async with streaming(f"unix:{tmp_path}/shard.sock", WithoutSocket) as (listener, _):
        while "no connection for outputs: [Errno 2]" not in printed:
            await asyncio.sleep(0.01)
            output = capfd.readouterr()
            printed += output.out + output.err
        assert not listener.client.connected and not listener.reasons
