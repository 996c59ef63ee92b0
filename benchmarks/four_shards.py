"""One router over four shards beside one over one: streamed tokens per second, in alternating rounds.

Simulated shards of 64 requests and 8 ms a step give 8 000 tokens/s each. They and the clients share a core, the
router has the other.

    python -m benchmarks.four_shards [ROUNDS]
    python -m benchmarks.four_shards --profile out  # four shards, with the router under cProfile
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

import uvloop

from benchmarks import router
from benchmarks.case import Case, Cases, Raw

ROUNDS = 8
ROUND_S, WARM_UP_S = 3.0, 1.0
SHARDS = 4
STREAMS, STEP_MS = 64, 8.0
"""Of each shard."""
NEW_TOKENS = 256
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "shards": SHARDS,
    "streams_per_shard": STREAMS,
    "step_ms": STEP_MS,
    "new_tokens": NEW_TOKENS,
}


async def loaded(servers: router.Servers, num_shards: int) -> dict[str, float]:
    """Tokens per second of as many streams as the shards take at once, and the router's time for each."""
    async with router.clients(servers.port, [NEW_TOKENS] * STREAMS * num_shards) as running:
        await asyncio.sleep(WARM_UP_S)
        before, begun = sum(client.num_events for client in running), time.perf_counter()
        cpu_before = router.cpu_seconds(servers.router_pid)
        await asyncio.sleep(ROUND_S)
        seconds = time.perf_counter() - begun
        num_tokens = sum(client.num_events for client in running) - before
        cpu = router.cpu_seconds(servers.router_pid) - cpu_before
    return {"tokens_per_s": round(num_tokens / seconds, 1), "router_us_per_token": round(1e6 * cpu / num_tokens, 2)}


def measure(finished: frozenset[str] = frozenset(), rounds: int = ROUNDS) -> Cases:
    """One case per round: one shard, then four."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        each = rounds_of(rounds)
        try:
            for number in range(rounds):
                raw = runner.run(anext(each))
                if f"round {number}" not in finished:
                    yield Case(f"round {number}", raw)
        finally:
            runner.run(each.aclose())


async def rounds_of(rounds: int) -> AsyncGenerator[dict[str, dict[str, float]], None]:
    """What each round gave."""
    async with (
        router.servers(STEP_MS, max_running=STREAMS) as one,
        router.servers(STEP_MS, num_shards=SHARDS, max_running=STREAMS) as four,
    ):
        for _ in range(rounds):
            yield {"one": await loaded(one, 1), "four": await loaded(four, SHARDS)}


def share(raw: Raw) -> float:
    """Of four times one."""
    return float(raw["four"]["tokens_per_s"] / (SHARDS * raw["one"]["tokens_per_s"]))


async def profiled(path: str) -> None:
    async with router.servers(STEP_MS, path, SHARDS, STREAMS) as four:
        print(await loaded(four, SHARDS))


def main() -> None:
    if "--profile" in sys.argv:
        uvloop.run(profiled(sys.argv[-1]))
        return
    raws = []
    for case in measure(rounds=int(sys.argv[1]) if sys.argv[1:] else ROUNDS):
        raws.append(case.raw)
        print(case.name, json.dumps(case.raw), round(share(case.raw), 3), flush=True)
    print(f"{statistics.median(map(share, raws)):.3f} of {SHARDS} times one")


if __name__ == "__main__":
    main()
