"""The router's load generator notices what a stream lacks, and the pretended shard merges as the real one does."""

import asyncio
import time
from pathlib import Path
from typing import cast

import pytest

from benchmarks.router import observed
from benchmarks.router.accounted import Account, Steps, install
from benchmarks.router.throughput import Client
from lorikeet.proto import shard_pb2 as pb
from tests.router.conftest import anyio_backend, one_loop  # noqa: F401
from tests.router.serving import serving
from tests.router.simulated_shard import merge_outputs


class Transport:
    """Remembers what was written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def stream(num_events: int) -> bytes:
    event = b'data: {"token":{"text":"error","logprob":-1}}\n\n'
    events = event * num_events
    return b"HTTP/1.1 200 OK\r\n\r\n" + events + b"0\r\n\r\n"


def fed(client: Client, data: bytes, size: int) -> Transport:
    transport = Transport()
    client.connection_made(cast(asyncio.Transport, transport))
    for start in range(0, len(data), size):
        client.data_received(data[start : start + size])
    return transport


@pytest.mark.parametrize("size", [1, 3, 7, 100_000])
def test_events_are_counted_wherever_reads_end(size: int) -> None:
    client = Client(5)
    transport = fed(client, stream(5), size)
    assert (client.num_events, client.num_requests, client.failure) == (5, 1, "")
    assert len(transport.written) == 2  # it asks again
    assert len(client.first_token_seconds) == 1


def test_missing_events_and_errors_are_failures() -> None:
    short = Client(5)
    fed(short, stream(4), 1000)
    assert "4 events instead of 5" in short.failure
    broken = Client(1)
    fed(broken, b'data: {"error":"x"}\n\n0\r\n\r\n', 1000)
    assert broken.failure


def test_coalesced_steps_lose_nothing() -> None:
    def part(wire_id: int, token_id: int, finish: pb.FinishReason = pb.FINISH_NONE) -> pb.RequestOutput:
        return pb.RequestOutput(
            id=wire_id, token_ids=[token_id], sources=b"\1", step_ends=b"\1", logprobs=[-0.5], finish_reason=finish
        )

    earlier = pb.StepOutput(outputs=[part(1, 10), part(2, 20)])
    merged = {each.id: each for each in merge_outputs(earlier, [part(1, 11, pb.FINISH_LENGTH), part(3, 30)])}
    assert list(merged[1].token_ids) == [10, 11]
    assert (merged[1].sources, merged[1].step_ends) == (b"\1\1", b"\1\1")
    assert len(merged[1].logprobs) == 2
    assert merged[1].finish_reason == pb.FINISH_LENGTH
    assert list(merged[2].token_ids) == [20]
    assert list(merged[3].token_ids) == [30]


def test_the_cost_of_being_observed_is_a_share_of_the_router_s() -> None:
    raw = {"live_s": 0.012, "traces_s": 0.004, "router_cpu_s": 4.0}
    assert (observed.cost_of_viewers(raw), observed.cost_of_traces(raw)) == (0.003, 0.001)


@pytest.mark.anyio
async def test_steps_count_what_a_coroutine_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(time, "thread_time", lambda: float(clock[0]))
    account = Account(tmp_path / "account")

    def spend(seconds: int) -> None:
        clock[0] += seconds

    async def work() -> str:
        spend(2)
        asyncio.get_running_loop().call_soon(spend, 100)  # by somebody else
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            spend(3)
        return "done"

    assert await Steps(work(), account, "live_s") == "done"
    assert (Account(tmp_path / "account").read()["live_s"], clock) == (5.0, [105])


@pytest.mark.anyio
async def test_steps_pass_errors_and_cancellation(tmp_path: Path) -> None:
    account = Account(tmp_path / "account")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await Steps(fails(), account, "live_s")

    async def waits() -> None:
        await Steps(asyncio.Event().wait(), account, "live_s")

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.anyio
async def test_a_router_accounts_for_its_viewers_and_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(tmp_path / "account")
    write = install(account, monkeypatch.setattr)
    async with serving(tmp_path / "server", otlp_endpoint="http://127.0.0.1:9", otlp_sample_ratio=0.0) as server:
        port = int(server.url.rpartition(":")[2])
        async with observed.viewers(port, 3):
            await server.shard.until(lambda: account.read()["snapshots"] >= 2)
            assert (await server.client.post("/generate", json={"inputs": "Hi"})).status_code == 200
    write.close()
    found = account.read()
    assert found["decisions"] == 1 and 0 < found["traces_s"] < found["live_s"]
    assert found["snapshots"] < found["viewer_snapshots"] <= 3 * found["snapshots"]
