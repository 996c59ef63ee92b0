"""What being observed costs a router: ten viewers of the live view, and traces of which none is sampled.

256 clients load one router in front of a simulated shard, as much as it can serve. It counts its own processor time for
snapshots and traces (`accounted.py`); the rest of its processor time is for the requests. Differences between runs with
and without viewers were larger than the costs.

    python -m benchmarks.router.observed [--rounds N]
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load.servers import cpu_seconds
from benchmarks.router import throughput
from benchmarks.router.accounted import Account

ROUNDS = 8
ROUND_S, WARM_UP_S = 4.0, 1.0
STREAMS, STEP_MS, NEW_TOKENS = 256, 4.0, 64
VIEWERS = 10
UNSAMPLED = {"otlp_endpoint": "http://127.0.0.1:9", "otlp_sample_ratio": 0.0}
WATCH = b"GET /v1/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.asynccontextmanager
async def viewers(port: int, count: int) -> AsyncIterator[None]:
    """Connections that read the live view until the block ends."""
    writers, readers = [], []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WATCH)
        writers.append(writer)
        readers.append(asyncio.create_task(reader.read(-1)))
    try:
        yield
    finally:
        for writer in writers:
            writer.close()
        await asyncio.gather(*readers, return_exceptions=True)


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per round."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        each = rounds_of(rounds)
        try:
            for number in range(rounds):
                yield Case(f"round {number}", runner.run(anext(each)))
        finally:
            runner.run(each.aclose())


async def rounds_of(rounds: int) -> AsyncGenerator[dict[str, float], None]:
    """The raw values of each round."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "account"
        account = Account(path)
        router = ("benchmarks.router.accounted", str(path))
        async with (
            throughput.servers(STEP_MS, settings=UNSAMPLED, router=router) as servers,
            viewers(servers.port, VIEWERS),
            throughput.clients(servers.port, [NEW_TOKENS] * STREAMS) as running,
        ):
            await asyncio.sleep(WARM_UP_S)
            for _ in range(rounds):
                began, before, cpu_before = time.perf_counter(), account.read(), cpu_seconds(servers.router_pid)
                num_before = sum(client.num_events for client in running)
                await asyncio.sleep(ROUND_S)
                seconds, after = time.perf_counter() - began, account.read()
                num_tokens = sum(client.num_events for client in running) - num_before
                yield {
                    **{field: after[field] - before[field] for field in after},
                    "router_cpu_s": cpu_seconds(servers.router_pid) - cpu_before,
                    "tokens_per_s": num_tokens / seconds,
                }


def share(field: str, raw: Raw) -> float:
    """Share of the router's processor time."""
    return float(raw[field] / raw["router_cpu_s"])


cost_of_viewers = partial(share, "live_s")
cost_of_traces = partial(share, "traces_s")


def main() -> int:
    given = arguments.parser(__doc__, rounds=ROUNDS).parse_args()
    figures = {"viewers": cost_of_viewers, "traces": cost_of_traces}
    return arguments.print_cases(measure(given.rounds), figures)


if __name__ == "__main__":
    sys.exit(main())
