"""What adapters cost: closed loops of eight clients over HTTP on the 200 M Llama, in alternating rounds.

One server without adapters, one with room for all, one with 16 slots that 256 adapters share. Only the server that is
asked runs. Knows rounds, no bar.

    python -m benchmarks.adapters_cost [--quick] [--idle] [ROUNDS]
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks import adapted, load, servers
from benchmarks.case import Case, Cases, Raw
from benchmarks.closed_loop import IDLE_CPU, LENGTH, summary
from benchmarks.prompts import prompts

ROUNDS, IDLE_ROUNDS = 8, 12
CLIENTS = 8
REQUESTS_PER_CLIENT = 3
RANK = 16
NUM_ROTATING, NUM_SLOTS = 256, 16
SEED = 9_000
EXTRA = {"ignore_eos_token": True}
BARE, ROOMY, TIGHT = "bare", "roomy", "tight"
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "idle_rounds": IDLE_ROUNDS,
    "clients": CLIENTS,
    "requests_per_client": REQUESTS_PER_CLIENT,
    "rank": RANK,
    "rotating": NUM_ROTATING,
    "slots": NUM_SLOTS,
    "tokens_in": LENGTH.num_prompt,
    "tokens_out": LENGTH.num_output,
    "seed": SEED,
}


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    rounds: int = ROUNDS
    rotating: int = NUM_ROTATING
    requests_per_client: int = REQUESTS_PER_CLIENT
    length: load.Length = LENGTH


QUICK = Size(1, 24, 1, load.Length(16, 8))


def measure(
    finished: frozenset[str] = frozenset(), base: adapted.Base | None = None, size: Size | None = None
) -> Cases:
    """One case per round: every way of asking, in an order that turns from round to round."""
    size = size or Size()
    with _running(base, size, (BARE, ROOMY, TIGHT)) as (model, running):
        for number in range(-1, size.rounds):
            case = f"round {number}"
            if case not in finished:
                measured = _round(case, number, _ways(number, model, size), running, size)
                if number >= 0:  # the first one warms up
                    yield measured


def without(
    finished: frozenset[str] = frozenset(), base: adapted.Base | None = None, size: Size | None = None
) -> Cases:
    """One case per round: requests without an adapter, to a server that has eight and to one that has none; each twice,
    the first one last."""
    size = size or Size(IDLE_ROUNDS, NUM_SLOTS, 2)
    with _running(base, size, (BARE, ROOMY)) as (model, running):
        for number in range(-1, size.rounds):
            case = f"round {number}"
            if case not in finished:
                first, second = (BARE, ROOMY) if number % 2 else (ROOMY, BARE)
                order = (first, second, second, first)
                ways = {f"{server} {place}": (server, [model]) for place, server in enumerate(order)}
                measured = _round(case, number, ways, running, size)
                if number >= 0:
                    yield measured


@contextlib.contextmanager
def _running(base: adapted.Base | None, size: Size, names: Sequence[str]) -> Any:
    """The base's name and the servers, with the adapters that they are asked for where they are to be found."""
    from benchmarks import adapter_files  # torch

    base = base or adapted.full()
    adapter_files.make(base.model, base.root, [f"attention-{i}" for i in range(size.rotating)], rank=RANK)
    wide = [f"all-{i}" for i in range(CLIENTS)]
    adapter_files.make(base.model, base.root, wide, adapter_files.ALL, rank=RANK, seed=NUM_ROTATING)
    bare = servers.lorikeet(base.model, *base.flags)
    tight = adapted.command(base, "--max-active-adapters", str(NUM_SLOTS))
    commands = {BARE: bare, ROOMY: adapted.command(base), TIGHT: tight}
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(servers.running(name, commands[name])) for name in names}
        if ROOMY in running:
            uvloop.run(_lay_out(running[ROOMY].port, [f"attention-{i}" for i in range(CLIENTS)]))
        if TIGHT in running:
            uvloop.run(_lay_out(running[TIGHT].port, [f"attention-{i}" for i in range(size.rotating)]))
        yield str(base.model), running


def _ways(number: int, model: str, size: Size) -> Mapping[str, tuple[str, list[str]]]:
    """What is asked in a round: way → server and the models that clients ask for in turn."""
    count = CLIENTS * size.requests_per_client
    start = count * (number + 1)
    asked = {
        "base": (BARE, [model]),
        "attention": (ROOMY, [f"attention-{i}" for i in range(CLIENTS)]),
        "all": (ROOMY, [f"all-{i}" for i in range(CLIENTS)]),
        "rotation": (TIGHT, [f"attention-{i % size.rotating}" for i in range(start, start + count)]),
    }
    order = list(asked)
    return {way: asked[way] for way in order[number % len(order) :] + order[: number % len(order)]}


def _round(
    name: str,
    number: int,
    ways: Mapping[str, tuple[str, list[str]]],
    running: Mapping[str, servers.Server],
    size: Size,
) -> Case:
    raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    errors = []
    for way, (asked, models) in ways.items():
        with contextlib.ExitStack() as frozen:
            others = [server for server in running.values() if server.name != asked]
            for other in others:
                frozen.enter_context(other.frozen())
            before = sum(other.cpu_seconds() for other in others)
            answers = uvloop.run(ask(running[asked].port, models, SEED + 1 + number, size))
            spent = sum(other.cpu_seconds() for other in others) - before
        raw[way] = summary(answers)
        errors += [f"{way}: {answer.error}" for answer in answers if answer.error]
        if spent > servers.TICK_S + IDLE_CPU * (answers[-1].last - answers[0].sent):
            errors.append(f"{way}: the frozen servers used {spent:.2f} s of a core")
    return Case(name, raw, "; ".join(errors[:3]))


async def _lay_out(port: int, names: Sequence[str]) -> None:
    """Have every adapter in the disk tier, where it is to be found."""
    for first in range(0, len(names), CLIENTS):
        asked = (adapted.generate(port, "x", name, 1) for name in names[first : first + CLIENTS])
        for reply in await asyncio.gather(*asked):
            if reply.status != 200:
                raise RuntimeError(f"{reply.status} {reply.body[:300]!r}")


async def ask(
    port: int, models: Sequence[str], seed: int, size: Size, extra: Mapping[str, Any] = EXTRA
) -> list[load.Answer]:
    """A closed loop in which each client asks for the models in turn, beginning with its own."""
    texts = prompts(CLIENTS * size.requests_per_client, size.length.num_prompt, seed)

    async def client(index: int) -> list[load.Answer]:
        answers = []
        for turn in range(size.requests_per_client):
            number = turn * CLIENTS + index
            target = load.Target(port, models[number % len(models)], extra)
            answers.append(await load.complete(target, texts[number], size.length))
        return answers

    return [answer for answers in await asyncio.gather(*map(client, range(CLIENTS))) for answer in answers]


def share(way: str, of: str, raw: Raw) -> float:
    """Tokens per second of one way over those of another, in the same round."""
    return float(raw[way]["tokens_per_second"] / raw[of]["tokens_per_second"])


def idle_share(raw: Raw) -> float:
    """Tokens per second of the server that has adapters over that which has none, over the round's four runs."""
    seconds = {
        server: sum(1 / raw[way]["tokens_per_second"] for way in raw if way.startswith(server))
        for server in (BARE, ROOMY)
    }
    return seconds[BARE] / seconds[ROOMY]


if __name__ == "__main__":
    small = adapted.small() if "--quick" in sys.argv else None
    counts = [int(word) for word in sys.argv[1:] if word.isdigit()]
    chosen = QUICK if small else Size(counts[0] if counts else ROUNDS)
    if "--idle" in sys.argv:
        for case in without(base=small, size=chosen):
            told = f"{idle_share(case.raw):.3f}" if not case.error else ""
            print(f"{case.name}: without an adapter {told}", json.dumps(case.raw), case.error, flush=True)
    else:
        pairs = (("attention", "base"), ("all", "base"), ("rotation", "attention"))
        for case in measure(base=small, size=chosen):
            told = ", ".join(f"{way}/{of} {share(way, of, case.raw):.3f}" for way, of in pairs if not case.error)
            print(f"{case.name}: {told}", json.dumps(case.raw), case.error, flush=True)
