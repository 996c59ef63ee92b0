"""What being observed costs a router: ten viewers of the live view, and traces of which none is sampled.

Two routers, one with `otlp_endpoint`, stand in front of simulated shards of 20 ms a step; 256 clients load one of them
at a time. Costs are processor time of the router while it sends the same tokens, as a share of one core.

    python -m benchmarks.router.observed [--rounds N]
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator

import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load.servers import cpu_seconds
from benchmarks.router import throughput

ROUNDS = 8
ROUND_S, WARM_UP_S = 4.0, 0.5
STREAMS, STEP_MS, NEW_TOKENS = 256, 20.0, 64
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


async def loaded(servers: throughput.Servers, num_viewers: int = 0) -> dict[str, float]:
    """The router's processor time for each token, and tokens per second."""
    async with viewers(servers.port, num_viewers), throughput.clients(servers.port, [NEW_TOKENS] * STREAMS) as running:
        await asyncio.sleep(WARM_UP_S)
        before, start = sum(client.num_events for client in running), time.perf_counter()
        cpu_before = cpu_seconds(servers.router_pid)
        await asyncio.sleep(ROUND_S)
        seconds = time.perf_counter() - start
        num_tokens = sum(client.num_events for client in running) - before
        cpu = cpu_seconds(servers.router_pid) - cpu_before
    return {"tokens_per_s": round(num_tokens / seconds, 1), "router_us_per_token": round(1e6 * cpu / num_tokens, 3)}


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per round: unobserved, with viewers, with traces."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        each = rounds_of(rounds)
        try:
            for number in range(rounds):
                yield Case(f"round {number}", runner.run(anext(each)))
        finally:
            runner.run(each.aclose())


async def rounds_of(rounds: int) -> AsyncGenerator[dict[str, dict[str, float]], None]:
    """The raw values of each round; the order changes."""
    async with (
        throughput.servers(STEP_MS) as plain,
        throughput.servers(STEP_MS, settings=UNSAMPLED) as traced,
    ):
        runs = {"plain": (plain, 0), "viewers": (plain, VIEWERS), "traced": (traced, 0)}
        for number in range(rounds):
            names = [*runs][number % 3 :] + [*runs][: number % 3]
            yield {name: await loaded(*runs[name]) for name in names}


def cost(raw: Raw, name: str) -> float:
    """Further processor time per second at the plain router's rate: a share of one core."""
    further = raw[name]["router_us_per_token"] - raw["plain"]["router_us_per_token"]
    return float(1e-6 * further * raw["plain"]["tokens_per_s"])


def cost_of_viewers(raw: Raw) -> float:
    return cost(raw, "viewers")


def cost_of_traces(raw: Raw) -> float:
    return cost(raw, "traced")


def main() -> int:
    given = arguments.parser(__doc__, rounds=ROUNDS).parse_args()
    figures = {"viewers, of a core": cost_of_viewers, "traces, of a core": cost_of_traces}
    return arguments.print_cases(measure(given.rounds), figures)


if __name__ == "__main__":
    sys.exit(main())
