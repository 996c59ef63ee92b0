"""The cost of one router process: streamed tokens per second, and what it adds to the time to first token.

A simulated shard and the load generator share one core, the router has the other. The real gRPC stream, detokenization
and HTTP are in the path; the shard gives every request one token per step.

    python -m benchmarks.router.throughput [--rounds N] [--profile FILE]
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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw, raw_value
from benchmarks.load.servers import cpu_seconds, free_port
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc

CORES = sorted(os.sched_getaffinity(0))
NUM_STREAMS = 256
STEP_MS = 4.0
NEW_TOKENS = 256
ROUND_SECONDS = 3.0
NUM_ROUNDS = 8
"""Chosen by a pilot: rounds of three seconds differ by less than five percent."""

FIRST_TOKEN_CLIENTS = 64
FIRST_TOKEN_STEP_MS = 10.0
FIRST_TOKEN_LENGTHS = range(16, 16 + FIRST_TOKEN_CLIENTS)
"""Clients ask for different lengths, or they would all come back at the same moment."""

PROMPT = "The parrot said a word, and then it said"
EVENT = b"data: {"


@dataclass
class Servers:
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
async def servers(
    step_ms: float,
    profile: str | None = None,
    num_shards: int = 1,
    max_running: int = 512,
    settings: Mapping[str, Any] | None = None,
    router: Sequence[str] = ("lorikeet.router",),
) -> AsyncIterator[Servers]:
    """Start both, the router on the last core and everything else on the first. All shards are one process.

    `settings` are further ones of the router; `router` is its module, and what follows the configuration.
    """
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
            **(settings or {}),
        }
        (folder / "router.json").write_text(json.dumps(written))
        shard_command = ["tests.router.simulated_shard", *addresses, "--step-ms", str(step_ms)]
        shard_command += ["--max-running", str(max_running)]
        router_command = [router[0], str(folder / "router.json"), *router[1:]]
        if profile is not None:
            router_command = ["cProfile", "-o", profile, "-m", *router_command]
        shard = _start(shard_command, CORES[0])
        started = _start(router_command, CORES[-1])
        try:
            await _until_ready(port)
            yield Servers(port, addresses[0], started.pid)
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


class Client(asyncio.Protocol):
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
        found = text.count(EVENT)
        self._tail = text[-len(EVENT) + 1 :]
        if found:
            if self._seen == 0:
                self.first_token_seconds.append(time.perf_counter() - self._started)
            self._seen += found
            self.num_events += found
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
async def clients(port: int, lengths: Sequence[int]) -> AsyncIterator[list[Client]]:
    """One closed-loop client for each length of stream; they run until the block ends.

    Raises RuntimeError when one of them saw a wrong stream.
    """
    loop = asyncio.get_running_loop()
    made = [Client(new_tokens) for new_tokens in lengths]
    for client in made:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
    try:
        yield made
    finally:
        for client in made:
            client.close()
    failures = [client.failure for client in made if client.failure]
    if failures:
        raise RuntimeError(failures[0])


async def throughput(rounds: int = NUM_ROUNDS, profile: str | None = None) -> list[tuple[float, float]]:
    """(streamed tokens per second, the router's processor seconds per token) in each round after a warm-up."""
    results = []
    async with servers(STEP_MS, profile) as started, clients(started.port, [NEW_TOKENS] * NUM_STREAMS) as running:
        for number in range(rounds + 1):
            before, begin = sum(client.num_events for client in running), time.perf_counter()
            cpu_before = cpu_seconds(started.router_pid)
            await asyncio.sleep(ROUND_SECONDS)
            num_tokens = sum(client.num_events for client in running) - before
            if number:
                cpu = cpu_seconds(started.router_pid) - cpu_before
                results.append((num_tokens / (time.perf_counter() - begin), cpu / num_tokens))
    return results


async def first_token(rounds: int = NUM_ROUNDS) -> list[tuple[float, float]]:
    """(median through the router, median straight from the shard) in seconds, for each pair of rounds."""
    pairs = []
    async with servers(FIRST_TOKEN_STEP_MS) as started:
        for number in range(rounds + 1):
            async with clients(started.port, FIRST_TOKEN_LENGTHS) as running:
                await asyncio.sleep(ROUND_SECONDS)
            routed = [seconds for client in running for seconds in client.first_token_seconds]
            straight = await _straight_first_tokens(started.shard_address)
            if not routed or not straight:
                raise RuntimeError("a round saw no first token: something else holds the processors")
            if number:
                pairs.append((statistics.median(routed), statistics.median(straight)))
    return pairs


async def _straight_first_tokens(address: str) -> list[float]:
    """The same closed loop spoken to the shard itself, one message per request at once: what the router adds to."""
    seconds: list[float] = []
    asked: dict[int, float] = {}
    length_of: dict[int, int] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        call = shard_pb2_grpc.ShardStub(channel).Serve()
        await call.read()
        next_id = 0

        async def ask(length: int) -> None:
            nonlocal next_id
            next_id += 1
            length_of[next_id] = length
            asked[next_id] = time.perf_counter()
            submit = pb.Submit(id=next_id, prompt_ids=range(300, 312), max_new_tokens=length)
            await call.write(pb.Command(submits=[submit]))

        for length in FIRST_TOKEN_LENGTHS:
            await ask(length)
        end = time.perf_counter() + ROUND_SECONDS
        while time.perf_counter() < end:
            output = await call.read()
            now = time.perf_counter()
            for part in output.outputs:
                if part.id in asked:
                    seconds.append(now - asked.pop(part.id))
                if part.finish_reason:
                    await ask(length_of.pop(part.id))
        call.cancel()
    return seconds


def measure(rounds: int = NUM_ROUNDS) -> Cases:
    """One case per round: tokens per second of all streams, and both times to first token."""
    pairs = zip(uvloop.run(throughput(rounds)), uvloop.run(first_token(rounds)), strict=True)
    for number, ((rate, cost), (routed, straight)) in enumerate(pairs):
        raw = {"tokens_per_second": rate, "router_us_per_token": 1e6 * cost}
        raw |= {"first_token_s": routed, "first_token_without_router_s": straight}
        yield Case(f"round {number}", raw)


def added_first_token_ms(raw: Raw) -> float:
    return float(1000 * (raw["first_token_s"] - raw["first_token_without_router_s"]))


def main() -> int:
    parser = arguments.parser(__doc__, rounds=NUM_ROUNDS)
    parser.add_argument("--profile", metavar="FILE", help="only measure throughput, and write a cProfile of the router")
    options = parser.parse_args()
    if options.profile:
        print(uvloop.run(throughput(options.rounds, options.profile)))
        return 0
    rate: Callable[[Raw], float] = partial(raw_value, "tokens_per_second")
    figures = {"tokens/s": rate, "added ms": added_first_token_ms}
    return arguments.print_cases(measure(options.rounds), figures)


if __name__ == "__main__":
    sys.exit(main())
