"""The cost of one router process: streamed tokens per second over one shard and over four, and its part of the time to
first token.

A simulated shard and the load generator share one core, the router has the other. The real gRPC stream, detokenization
and HTTP are in the path; the shard gives every request one token per step.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load.servers import cpu_seconds
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc
from lorikeet.proto.process import free_port

CORES = sorted(os.sched_getaffinity(0))
NUM_STREAMS = 256
STEP_MS = 4.0
NEW_TOKENS = 256
ROUND_S = 3.0
ROUNDS = 8
"""Chosen by a pilot: rounds of three seconds differ by less than five percent."""

FIRST_TOKEN_CLIENTS = 64
FIRST_TOKEN_STEP_MS = 10.0
FIRST_TOKEN_LENGTHS = range(16, 16 + FIRST_TOKEN_CLIENTS)
"""Clients ask for different lengths, or they would all come back at the same moment."""

PROMPT = "The parrot said a word, and then it said"
EVENT = b"data: {"


@dataclass
class SimulatedServers:
    """Simulated shards and a router in front of them, as processes."""

    port: int
    shard_address: str
    router_pid: int


def write_model(folder: Path) -> None:
    """A byte-level tokenizer of 4 000 tokens, trained on a little source code; the router needs nothing else."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator((path.read_text() for path in sources), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')


@contextlib.asynccontextmanager
async def servers(step_ms: float, num_shards: int = 1, max_running: int = 512) -> AsyncIterator[SimulatedServers]:
    """Start both, the router on the last core and everything else on the first. All shards are one process."""
    earlier = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {CORES[0]})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        addresses = [f"unix:{folder}/shard-{index}.sock" for index in range(num_shards)]
        port = free_port()
        written = {
            "model_id": "simulated",
            "model_path": name,
            "shard_addresses": addresses,
            "hostname": "127.0.0.1",
            "port": port,
            "log_level": "error",
        }
        (folder / "router.json").write_text(json.dumps(written))
        shard_command = ["tests.router.simulated_shard", *addresses, "--step-ms", str(step_ms)]
        shard_command += ["--max-running", str(max_running)]
        shard = _start(shard_command, CORES[0])
        started = _start(["lorikeet.router", str(folder / "router.json")], CORES[-1])
        try:
            await _until_ready(port)
            yield SimulatedServers(port, addresses[0], started.pid)
        finally:
            for process in (started, shard):
                process.send_signal(signal.SIGTERM)
                process.wait()
            os.sched_setaffinity(0, earlier)


def _start(command: list[str], core: int) -> "subprocess.Popen[bytes]":
    """`python -m` with these words, on one core."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)
    os.sched_setaffinity(process.pid, {core})
    return process


async def _until_ready(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if b" 200 " in answer.split(b"\r\n", 1)[0]:
                return
        await asyncio.sleep(0.05)
    raise RuntimeError("the router did not become ready")


class StreamClient(asyncio.Protocol):
    """One connection that asks for a stream, counts its events, and asks again."""

    def __init__(self, new_tokens: int) -> None:
        parameters = {"max_new_tokens": new_tokens, "ignore_eos_token": True}
        body = json.dumps({"inputs": PROMPT, "parameters": parameters}).encode()
        head = (
            "POST /generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._new_tokens = new_tokens
        self._transport: asyncio.WriteTransport | None = None
        self._started = 0.0
        self._seen = 0
        self._tail = b""
        self.num_events = 0
        self.first_token_seconds: list[float] = []
        self.num_requests = 0
        self.failure = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        self._seen = 0
        self._started = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        # An event's start may lie across two reads.
        text = self._tail + data
        num_events = text.count(EVENT)
        self._tail = text[-len(EVENT) + 1 :]
        if num_events:
            if self._seen == 0:
                self.first_token_seconds.append(time.perf_counter() - self._started)
            self._seen += num_events
            self.num_events += num_events
        if text.endswith(b"0\r\n\r\n"):
            self.num_requests += 1
            if self._seen != self._new_tokens or b'{"error":' in text:
                self.failure = f"{self._seen} events instead of {self._new_tokens}: {text[-200:]!r}"
            self._tail = b""
            self._ask()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@contextlib.asynccontextmanager
async def clients(port: int, lengths: Sequence[int]) -> AsyncIterator[list[StreamClient]]:
    """One closed-loop client for each length of stream; they run until the block ends.

    Raises RuntimeError if one of them saw a wrong stream.
    """
    loop = asyncio.get_running_loop()
    streams = [StreamClient(new_tokens) for new_tokens in lengths]
    for client in streams:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    try:
        yield streams
    finally:
        for client in streams:
            client.close()
    failures = [client.failure for client in streams if client.failure]
    if failures:
        raise RuntimeError(failures[0])


async def throughput(rounds: int = ROUNDS) -> list[tuple[float, float]]:
    """(streamed tokens per second, the router's processor seconds per token) in each round after a warm-up."""
    results = []
    async with servers(STEP_MS) as started, clients(started.port, [NEW_TOKENS] * NUM_STREAMS) as running:
        for number in range(rounds + 1):
            num_tokens, seconds, cpu_s = await counted(started, running)
            if number:
                results.append((num_tokens / seconds, cpu_s / num_tokens))
    return results


async def first_token(rounds: int = ROUNDS) -> list[tuple[float, float]]:
    """(median through the router, median straight from the shard) in seconds, for each pair of rounds."""
    pairs = []
    async with servers(FIRST_TOKEN_STEP_MS) as started:
        for number in range(rounds + 1):
            async with clients(started.port, FIRST_TOKEN_LENGTHS) as running:
                await asyncio.sleep(ROUND_S)
            routed = [seconds for client in running for seconds in client.first_token_seconds]
            straight = await _straight_first_tokens(started.shard_address)
            if not routed or not straight:
                raise RuntimeError("a round saw no first token: something else holds the processors")
            if number:
                pairs.append((statistics.median(routed), statistics.median(straight)))
    return pairs


async def _straight_first_tokens(address: str) -> list[float]:
    """First tokens of the same closed loop straight from the shard, which gets one message per request."""
    seconds: list[float] = []
    started: dict[int, float] = {}
    length_of: dict[int, int] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        call = shard_pb2_grpc.ShardStub(channel).Serve()
        await call.read()
        next_id = 0

        async def ask(length: int) -> None:
            nonlocal next_id
            next_id += 1
            length_of[next_id] = length
            started[next_id] = time.perf_counter()
            submit = pb.Submit(id=next_id, prompt_ids=range(300, 312), max_new_tokens=length)
            await call.write(pb.Command(submits=[submit]))

        for length in FIRST_TOKEN_LENGTHS:
            await ask(length)
        end = time.perf_counter() + ROUND_S
        while time.perf_counter() < end:
            output = await call.read()
            now = time.perf_counter()
            for part in output.outputs:
                if part.id in started:
                    seconds.append(now - started.pop(part.id))
                if part.finish_reason:
                    await ask(length_of.pop(part.id))
        call.cancel()
    return seconds


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per round: tokens per second of all streams, and both times to first token."""
    pairs = zip(uvloop.run(throughput(rounds)), uvloop.run(first_token(rounds)), strict=True)
    for number, ((rate, cost), (routed, straight)) in enumerate(pairs):
        raw = {"tokens_per_second": rate, "router_us_per_token": 1e6 * cost}
        raw |= {"first_token_s": routed, "first_token_without_router_s": straight}
        yield Case(f"round {number}", raw)


def added_first_token_ms(raw: Raw) -> float:
    return float(1000 * (raw["first_token_s"] - raw["first_token_without_router_s"]))


WARM_UP_S = 1.0
SHARDS = 4
SHARD_STREAMS, SHARD_STEP_MS = 64, 8.0
"""Streams, and milliseconds of a step, of each shard."""


async def loaded(servers: SimulatedServers, num_shards: int) -> dict[str, float]:
    """Tokens per second of as many streams as the shards take at once, and the router's time for each."""
    async with clients(servers.port, [NEW_TOKENS] * SHARD_STREAMS * num_shards) as running:
        await asyncio.sleep(WARM_UP_S)
        num_tokens, seconds, cpu_s = await counted(servers, running)
    return {"tokens_per_s": round(num_tokens / seconds, 1), "router_us_per_token": round(1e6 * cpu_s / num_tokens, 2)}


def measure_shards(rounds: int = ROUNDS) -> Cases:
    """One case per round: one shard, then four."""
    values = shard_rounds(rounds)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            for number in range(rounds):
                yield Case(f"round {number}", runner.run(anext(values)))
        finally:
            runner.run(values.aclose())


async def counted(servers: SimulatedServers, running: Sequence[StreamClient]) -> tuple[int, float, float]:
    """Tokens that clients get in a round, its seconds, and the router's processor time."""
    num_earlier, start = sum(client.num_events for client in running), time.perf_counter()
    cpu_earlier = cpu_seconds(servers.router_pid)
    await asyncio.sleep(ROUND_S)
    seconds = time.perf_counter() - start
    num_tokens = sum(client.num_events for client in running) - num_earlier
    return num_tokens, seconds, cpu_seconds(servers.router_pid) - cpu_earlier


async def shard_rounds(rounds: int) -> AsyncGenerator[Raw, None]:
    """The raw values of each round."""
    async with (
        servers(SHARD_STEP_MS, max_running=SHARD_STREAMS) as one,
        servers(SHARD_STEP_MS, num_shards=SHARDS, max_running=SHARD_STREAMS) as four,
    ):
        for _ in range(rounds):
            yield {"one": await loaded(one, 1), "four": await loaded(four, SHARDS)}


def share(raw: Raw) -> float:
    """Tokens per second of four shards as a share of four times one."""
    return float(raw["four"]["tokens_per_s"] / (SHARDS * raw["one"]["tokens_per_s"]))
