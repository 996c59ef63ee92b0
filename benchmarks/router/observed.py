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
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pathlib import Path

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Cases, Raw
from benchmarks.router import throughput
from benchmarks.router.accounted import Account
from benchmarks.router.four_shards import counted, in_one_loop

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
    return in_one_loop(rounds_of(rounds), rounds)


async def rounds_of(rounds: int) -> AsyncGenerator[Raw, None]:
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
                before = account.read()
                num_tokens, seconds, cpu_s = await counted(servers, running, ROUND_S)
                after = account.read()
                yield {
                    **{field: after[field] - before[field] for field in after},
                    "router_cpu_s": cpu_s,
                    "tokens_per_s": num_tokens / seconds,
                }


def share(field: str, raw: Raw) -> float:
    """Share of the router's processor time."""
    return float(raw[field] / raw["router_cpu_s"])


cost_of_viewers = partial(share, "live_s")
cost_of_traces = partial(share, "traces_s")


if __name__ == "__main__":
    cases = measure(arguments.parser(__doc__, rounds=ROUNDS).parse_args().rounds)
    sys.exit(arguments.print_cases(cases, {"viewers": cost_of_viewers, "traces": cost_of_traces}))
