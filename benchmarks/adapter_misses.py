"""Adapters brought into slots per request: one router over two replicas, beside two servers of one that take turns.

Sixty-four adapters of Zipf's popularity, eight slots a shard, a closed loop. Both run at the same time and are asked
the same, one after the other in every round.

    python -m benchmarks.adapter_misses [ROUNDS] [CLIENTS]
"""

import asyncio
import contextlib
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import uvloop

from benchmarks import adapted, servers
from benchmarks.case import Case, Cases, Raw
from benchmarks.prompts import prompts

ROUNDS = 8
ADAPTERS, SLOTS, REPLICAS = 64, 8, 2
CLIENTS = 16
WARM_UP, REQUESTS = 200, 400
"""Of each side and round; the first ones are not counted."""
TOKENS_IN, TOKENS_OUT = 24, 16
SEED = 71_000
NAMES = tuple(f"popular-{i}" for i in range(ADAPTERS))
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "adapters": ADAPTERS,
    "slots": SLOTS,
    "replicas": REPLICAS,
    "clients": CLIENTS,
    "requests": REQUESTS,
    "tokens_in": TOKENS_IN,
    "tokens_out": TOKENS_OUT,
    "seed": SEED,
}


def measure(
    finished: frozenset[str] = frozenset(),
    base: adapted.Base | None = None,
    rounds: int = ROUNDS,
    clients: int = CLIENTS,
) -> Cases:
    """One case per round: ours, then the peer."""
    from benchmarks import adapter_files  # torch

    base = base or adapted.small()
    adapter_files.make(base.model, base.root, list(NAMES), rank=4)
    slots = ("--max-active-adapters", str(SLOTS))
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(adapted.serving("misses", base, *slots, "--replicas", str(REPLICAS)))]
        peers = [stack.enter_context(adapted.serving(f"misses-{n}", base, *slots)) for n in range(REPLICAS)]
        for number in range(rounds):
            if f"round {number}" in finished:
                continue
            raw, wrong = {}, list[str]()
            for side, group in (("ours", ours), ("peer", peers)):
                draw = random.Random(SEED + number)
                uvloop.run(_asked(group, draw, WARM_UP, clients, wrong))
                before = _brought(group)
                uvloop.run(_asked(group, draw, REQUESTS, clients, wrong))
                raw[side] = _brought(group) - before
            yield Case(f"round {number}", raw, "; ".join(wrong[:3]))


async def _asked(
    group: Sequence[servers.Server], draw: random.Random, count: int, clients: int, wrong: list[str]
) -> None:
    """So many requests, dealt to the servers by turns."""
    texts = prompts(count, TOKENS_IN, draw.randrange(1 << 30))
    weights = [1 / place for place in range(1, ADAPTERS + 1)]
    chosen = draw.choices(NAMES, weights, k=count)
    waiting = zip(texts, chosen, itertools.cycle(group), strict=False)

    async def client(own: Iterator[tuple[str, str, servers.Server]]) -> None:
        for text, name, server in own:
            reply = await adapted.generate(server.port, text, name, TOKENS_OUT)
            if reply.status != 200:
                wrong.append(f"{name}: {reply.status} {reply.body[:200]!r}")

    await asyncio.gather(*(client(waiting) for _ in range(clients)))


def _brought(group: Sequence[servers.Server]) -> int:
    """Adapters that came into slots so far: those that left them, and those that are there."""
    total = 0.0
    for server in group:
        now = adapted.samples(server.port)
        total += now.get('lorikeet_adapter_evictions_total{tier="slot"}', 0.0) + now["lorikeet_adapters_resident"]
    return round(total)


def over_peer(raw: Raw) -> float:
    return float(raw["ours"] / raw["peer"])


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    for case in measure(rounds=numbers[0] if numbers else ROUNDS, clients=numbers[1] if numbers[1:] else CLIENTS):
        print(case.name, json.dumps(case.raw), round(over_peer(case.raw), 3), case.error, flush=True)
