"""The stream to one shard: how messages that queue up are joined."""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.shards.link import ShardClient
from tests.router import simulated_shard
from tests.router.simulated_shard import SimulatedModel

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
    monkeypatch.setattr("lorikeet.router.shards.link.JOIN_REQUESTS", 1)
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


class BrokenCall:
    """Gives messages, then fails."""

    def __init__(self, *messages: pb.StepOutput) -> None:
        self._messages = list(messages)

    async def read(self) -> pb.StepOutput:
        if not self._messages:
            raise ConnectionResetError("the shard is gone")
        return self._messages.pop(0)


async def test_what_came_before_a_stream_failed_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorikeet.router.shards.link.JOIN_LOAD", -1.0)
    monkeypatch.setattr("lorikeet.router.shards.link.JOIN_REQUESTS", 0)
    listener = Listener(0.0)
    parts = [pb.RequestOutput(id=1, token_ids=[number]) for number in range(3)]
    client = ShardClient("unix:/nowhere")
    with pytest.raises(ConnectionResetError):
        await client._read(BrokenCall(*(pb.StepOutput(outputs=[part]) for part in parts)), listener)  # type: ignore[arg-type]
    assert (listener.num_tokens, listener.num_calls) == (3, 1)
