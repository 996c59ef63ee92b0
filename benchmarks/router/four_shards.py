"""One router over four shards against one over one: streamed tokens per second, in alternating rounds.

Simulated shards of 64 requests and 8 ms a step give 8 000 tokens/s each. They and the clients share a core, the router
has the other.

    python -m benchmarks.router.four_shards [--rounds N]
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence

import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load.servers import cpu_seconds
from benchmarks.router import throughput

ROUNDS = 8
ROUND_S, WARM_UP_S = 3.0, 1.0
SHARDS = 4
STREAMS, STEP_MS = 64, 8.0
"""Streams, and milliseconds of a step, of each shard."""
NEW_TOKENS = 256


async def loaded(servers: throughput.Servers, num_shards: int) -> dict[str, float]:
    """Tokens per second of as many streams as the shards take at once, and the router's time for each."""
    async with throughput.clients(servers.port, [NEW_TOKENS] * STREAMS * num_shards) as running:
        await asyncio.sleep(WARM_UP_S)
        num_tokens, seconds, cpu_s = await counted(servers, running, ROUND_S)
    return {"tokens_per_s": round(num_tokens / seconds, 1), "router_us_per_token": round(1e6 * cpu_s / num_tokens, 2)}


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per round: one shard, then four."""
    return in_one_loop(rounds_of(rounds), rounds)


def in_one_loop(values: AsyncGenerator[Raw, None], rounds: int) -> Cases:
    """One case per round, from its raw values."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            for number in range(rounds):
                yield Case(f"round {number}", runner.run(anext(values)))
        finally:
            runner.run(values.aclose())


async def counted(
    servers: throughput.Servers, running: Sequence[throughput.Client], round_s: float
) -> tuple[int, float, float]:
    """Tokens that clients get in a round, its seconds, and the router's processor time."""
    before, start = sum(client.num_events for client in running), time.perf_counter()
    cpu_before = cpu_seconds(servers.router_pid)
    await asyncio.sleep(round_s)
    seconds = time.perf_counter() - start
    num_tokens = sum(client.num_events for client in running) - before
    return num_tokens, seconds, cpu_seconds(servers.router_pid) - cpu_before


async def rounds_of(rounds: int) -> AsyncGenerator[Raw, None]:
    """The raw values of each round."""
    async with (
        throughput.servers(STEP_MS, max_running=STREAMS) as one,
        throughput.servers(STEP_MS, num_shards=SHARDS, max_running=STREAMS) as four,
    ):
        for _ in range(rounds):
            yield {"one": await loaded(one, 1), "four": await loaded(four, SHARDS)}


def share(raw: Raw) -> float:
    """Tokens per second of four shards as a share of four times one."""
    return float(raw["four"]["tokens_per_s"] / (SHARDS * raw["one"]["tokens_per_s"]))


if __name__ == "__main__":
    cases = measure(arguments.parser(__doc__, rounds=ROUNDS).parse_args().rounds)
    sys.exit(arguments.print_cases(cases, {f"of {SHARDS} times one": share}))
