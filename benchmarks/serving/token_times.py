"""When streamed tokens reach clients, and what each costs the router, of this checkout and of another one, in turn.

    python -m benchmarks.serving.token_times --other FOLDER [--streams 1,64,256]

FOLDER is a checkout of an earlier commit. A simulated shard gives each stream one token per 4 ms. It and the clients
share one core and one clock, the router has the other core. For each number of streams: tokens per second, the
router's processor time per token, median and 90th percentile of the time between the events of a stream, and the time
from the end of a step to the client.
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
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.evidence import arguments
from benchmarks.load.servers import cpu_seconds
from lorikeet.proto.process import free_port
from tests.router.simulated_shard import SimulatedModel, SimulatedShard, start

CORES = sorted(os.sched_getaffinity(0))
NEW_TOKENS = 256
PROMPT = "The parrot said a word, and then it said"
EVENT = b"data: {"
STEP_S, WARM_UP_S, ROUND_S, ROUNDS = 0.004, 1.0, 3.0, 3
ROOT = Path(__file__).parents[2]


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


async def until_ready(port: int) -> None:
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
        self._seen = 0
        self._tail = b""
        self.num_events = 0
        self.num_requests = 0
        self.failure = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        self._seen = 0
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        # An event's start may lie across two reads.
        text = self._tail + data
        num_events = text.count(EVENT)
        self._tail = text[-len(EVENT) + 1 :]
        if num_events:
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


class TimedClient(StreamClient):
    """Keeps when each event came."""

    def __init__(self) -> None:
        super().__init__(NEW_TOKENS)
        self.times: list[float] = []
        """Of the running stream."""
        self.gaps: list[float] = []
        self.delays: list[float] = []
        """From the end of the newest step to an event, where all streams together are one."""
        self.stepped_at = 0.0

    def data_received(self, data: bytes) -> None:
        now, num_earlier, num_requests = time.perf_counter(), self.num_events, self.num_requests
        super().data_received(data)
        num_new = self.num_events - num_earlier
        if num_new and self.times:
            self.gaps += [now - self.times[-1], *[0.0] * (num_new - 1)]
            self.delays.append(now - self.stepped_at)
        self.times += [now] * num_new
        if self.num_requests > num_requests:
            self.times = []


@dataclass(frozen=True)
class Times:
    """What one round gave."""

    tokens_per_s: float
    router_us: float
    median_ms: float
    late_ms: float
    """90th percentile."""
    delay_ms: float


def started(folder: Path, name: str, address: str, port: int) -> "subprocess.Popen[bytes]":
    """The router of a checkout, on the last core. name: its model's folder."""
    written = {"model_id": "simulated", "model_path": name, "shard_addresses": [address], "hostname": "127.0.0.1"}
    Path(name, "router.json").write_text(json.dumps(written | {"port": port, "log_level": "error"}))
    environment = os.environ | {"PYTHONPATH": f"{folder / 'src'}:{folder}"}
    command = [sys.executable, "-m", "lorikeet.router", f"{name}/router.json"]
    router = subprocess.Popen(command, cwd=folder, env=environment)
    os.sched_setaffinity(router.pid, {CORES[-1]})
    return router


async def measured(folder: Path, num_streams: int) -> Times:
    """One round with the router of a checkout."""
    clients = [TimedClient() for _ in range(num_streams)]

    class Stepped(SimulatedShard):
        def _emit(self, stream: object) -> None:
            stepped_at = time.perf_counter()
            for client in clients:
                client.stepped_at = stepped_at
            super()._emit(stream)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as name:
        address, port = f"unix:{name}/shard.sock", free_port()
        write_model(Path(name))
        server, _, stepping = await start(address, SimulatedModel(STEP_S), Stepped)
        router = await asyncio.to_thread(started, folder, name, address, port)
        try:
            await until_ready(port)
            loop = asyncio.get_running_loop()
            for client in clients:
                await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
            await asyncio.sleep(WARM_UP_S)
            for client in clients:
                client.gaps, client.delays = [], []
            num_earlier, cpu_earlier = sum(client.num_events for client in clients), cpu_seconds(router.pid)
            await asyncio.sleep(ROUND_S)
            num_tokens = sum(client.num_events for client in clients) - num_earlier
            cpu_s = cpu_seconds(router.pid) - cpu_earlier
            gaps = [gap for client in clients for gap in client.gaps]
            delays = [delay for client in clients for delay in client.delays]
        finally:
            for client in clients:
                client.close()
            router.send_signal(signal.SIGTERM)
            router.wait()
            await server.stop(None)
            stepping.cancel()
    if failures := [client.failure for client in clients if client.failure]:
        raise RuntimeError(failures[0])
    late_ms = 1000 * statistics.quantiles(gaps, n=10)[-1]
    return Times(
        num_tokens / ROUND_S, 1e6 * cpu_s / num_tokens, 1000 * statistics.median(gaps), late_ms,
        1000 * statistics.median(delays),
    )  # fmt: skip


def main() -> None:
    """All numbers of streams, of both checkouts."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--streams", default="1,64,256")
    parser.add_argument("--other", type=Path, metavar="FOLDER", help="another checkout")
    options = parser.parse_args()
    os.sched_setaffinity(0, {CORES[0]})
    folders = {"here": ROOT} | ({"other": options.other.resolve()} if options.other else {})
    head = (
        "| streams | router of | tokens/s | router, µs/token | between tokens, ms: median | 90 % | ratio | added, ms |"
    )
    print(head + "\n|---|---|---|---|---|---|---|---|")
    for num_streams in map(int, options.streams.split(",")):
        rounds = [
            {label: uvloop.run(measured(folder, num_streams)) for label, folder in folders.items()}
            for _ in range(ROUNDS)
        ]
        for label in folders:
            of = [values[label] for values in rounds]
            tokens_per_s, router_us, median_ms, late_ms, delay_ms = (
                statistics.median(getattr(times, name) for times in of) for name in Times.__dataclass_fields__
            )
            cells = [num_streams, label, f"{tokens_per_s:.0f}", f"{router_us:.1f}", f"{median_ms:.2f}"]
            cells += [f"{late_ms:.2f}", f"{late_ms / median_ms:.2f}" if median_ms else "–", f"{delay_ms:.2f}"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
