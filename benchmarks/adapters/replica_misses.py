"""Adapter loads per request: one router over two replicas against two single servers behind round robin.

Sixty-four adapters with Zipf's popularity, eight slots a shard, a closed loop. Both sides run at the same time and get
the same requests, one side after the other in every round.

    python -m benchmarks.adapters.replica_misses [--rounds N]
"""

import asyncio
import contextlib
import itertools
import random
import sys
from collections.abc import Iterator, Sequence

import uvloop

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import adapted, servers
from benchmarks.models.prompts import prompts

ROUNDS = 8
ADAPTERS, SLOTS, REPLICAS = 64, 8, 2
CLIENTS = 16
WARM_UP, REQUESTS = 200, 400
"""Requests of each side and round; the first ones are not counted."""
TOKENS_IN, TOKENS_OUT = 24, 16
SEED = 71_000
NAMES = tuple(f"popular-{i}" for i in range(ADAPTERS))


def measure(base: adapted.Base | None = None, rounds: int = ROUNDS) -> Cases:
    """One case per round: ours, then the peer."""
    from benchmarks.models import adapter_files  # torch

    base = base or adapted.small()
    adapter_files.make(base.model, base.root, list(NAMES), rank=4)
    slots = ("--max-active-adapters", str(SLOTS))
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(adapted.serving("misses", base, *slots, "--replicas", str(REPLICAS)))]
        peers = [stack.enter_context(adapted.serving(f"misses-{n}", base, *slots)) for n in range(REPLICAS)]
        for number in range(rounds):
            raw, wrong = {}, list[str]()
            for side, group in (("ours", ours), ("peer", peers)):
                draw = random.Random(SEED + number)
                uvloop.run(_send(group, draw, WARM_UP, wrong))
                before = _num_loaded(group)
                uvloop.run(_send(group, draw, REQUESTS, wrong))
                raw[side] = _num_loaded(group) - before
            yield Case(f"round {number}", raw, "; ".join(wrong[:3]))


async def _send(group: Sequence[servers.Server], draw: random.Random, count: int, wrong: list[str]) -> None:
    """Send `count` requests, dealt to the servers in turn."""
    texts = prompts(count, TOKENS_IN, draw.randrange(1 << 30))
    weights = [1 / place for place in range(1, ADAPTERS + 1)]
    chosen = draw.choices(NAMES, weights, k=count)
    waiting = zip(texts, chosen, itertools.cycle(group), strict=False)

    async def client(own: Iterator[tuple[str, str, servers.Server]]) -> None:
        for text, name, server in own:
            reply = await adapted.generate(server.port, text, name, TOKENS_OUT)
            if reply.status != 200:
                wrong.append(f"{name}: {reply.status} {reply.body[:200]!r}")

    await asyncio.gather(*(client(waiting) for _ in range(CLIENTS)))


def _num_loaded(group: Sequence[servers.Server]) -> int:
    """Adapters that were loaded into slots so far: those evicted, and those resident."""
    total = 0.0
    for server in group:
        now = adapted.samples(server.port)
        total += now.get('lorikeet_adapter_evictions_total{tier="slot"}', 0.0) + now["lorikeet_adapters_resident"]
    return round(total)


def over_peer(raw: Raw) -> float:
    return float(raw["ours"] / raw["peer"])


if __name__ == "__main__":
    chosen = arguments.parser(__doc__, rounds=ROUNDS).parse_args()
    sys.exit(arguments.print_cases(measure(None, chosen.rounds), {"over round robin": over_peer}))
