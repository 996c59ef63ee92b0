"""The cost of adapters: closed loops of eight clients over HTTP on the 200 M Llama, in alternating rounds.

One server has no adapters, one has room for all, one has 16 slots that 256 adapters share. Only the server that is
asked runs. Other suites compare requests without an adapter, serve the same eight adapters from vLLM, and ask for
adapters of rank 8 next to others of rank 64.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw, in_rounds
from benchmarks.load import adapted, completions, peers, servers
from benchmarks.load.rounds import EXTRA, LENGTH, OURS, VLLM, alone, in_turn, summary
from benchmarks.models.prompts import prompts

ROUNDS, IDLE_ROUNDS = 8, 12
CLIENTS = 8
REQUESTS_PER_CLIENT = 3
RANK = 16
NUM_ROTATING, NUM_SLOTS = 256, 16
RANKS = (8, 64)
SEED, PEER_SEED, RANKS_SEED = 9_000, 23_000, 57_000
BARE, ROOMY, TIGHT = "bare", "roomy", "tight"
ATTENTION = tuple(f"attention-{i}" for i in range(CLIENTS))
PEER_FLAGS = ("--enable-lora", "--max-loras", str(CLIENTS), "--max-lora-rank", str(RANK))
PEER_REQUESTS = {OURS: 3, VLLM: 1}
"""Requests of each client. vLLM gets fewer: with adapters it takes several times as long per token."""


@dataclass(frozen=True)
class CostSize:
    """How much is asked."""

    rounds: int = ROUNDS
    rotating: int = NUM_ROTATING
    requests_per_client: int = REQUESTS_PER_CLIENT
    length: completions.RequestLength = LENGTH


QUICK = CostSize(1, 24, 1, completions.RequestLength(16, 8))
Ways = Mapping[str, tuple[str, Sequence[str]]]
"""By name: a server, and the models that clients ask for in turn."""


def measure(base: adapted.AdaptedBase | None = None, size: CostSize | None = None) -> Cases:
    """One case per round: every way, each first in turn, after a round that warms up."""
    size = size or CostSize()
    with _running(base, size, (BARE, ROOMY, TIGHT)) as (model, running):
        ways = partial(standard_ways, model=model, size=size)
        yield from in_rounds(size.rounds, lambda number: run_round(number, ways(number), running, size))


def without(base: adapted.AdaptedBase | None = None, size: CostSize | None = None) -> Cases:
    """One case per round: requests without an adapter to the server that has eight and to the one that has none, each
    twice, the first one last.
    """
    size = size or CostSize(IDLE_ROUNDS, NUM_SLOTS, 2)
    with _running(base, size, (BARE, ROOMY)) as (model, running):

        def ways(number: int) -> Ways:
            first, second = in_turn((ROOMY, BARE), number)
            return {f"{name} {place}": (name, [model]) for place, name in enumerate((first, second, second, first))}

        yield from in_rounds(size.rounds, lambda number: run_round(number, ways(number), running, size))


def mixed_ranks(base: adapted.AdaptedBase | None = None, size: CostSize | None = None) -> Cases:
    """One case per round: four clients ask for adapters of rank 8 on all linear layers, next to four that do so too,
    and next to four that ask for rank 64.
    """
    from benchmarks.models import adapter_files  # torch

    base, size = base or adapted.full(), size or CostSize()
    for rank in RANKS:
        names = [f"rank-{rank}-{i}" for i in range(CLIENTS)]
        adapter_files.make(base.model, base.root, names, adapter_files.ALL, rank=rank, seed=NUM_ROTATING + rank)
    small, large = ([f"rank-{rank}-{i}" for i in range(CLIENTS)] for rank in RANKS)
    half = CLIENTS // 2
    models = {"small": (ROOMY, small), "mixed": (ROOMY, [*small[:half], *large[half:]])}
    with adapted.serving("ranks", base, "--prefix-caching", "false") as server:  # both ways ask the same prompts
        ask_all = partial(run_round, running={ROOMY: server}, size=size, seed=RANKS_SEED, only=half)
        yield from in_rounds(size.rounds, lambda number: ask_all(number, turned(models, number)))


def small_over_alone(raw: Raw) -> float:
    """Time per token of the clients of rank 8, next to rank 64 over next to rank 8."""
    return float(raw["mixed"]["inter_token_s"] / raw["small"]["inter_token_s"])


def against_vllm(rounds: int = ROUNDS) -> Cases:
    """One case per round: the same eight adapters from both servers, one for each client."""
    from benchmarks.models import adapter_files  # torch

    base = adapted.full()
    folders = adapter_files.make(base.model, base.root, ATTENTION, rank=RANK)
    modules = [f"{name}={folder}" for name, folder in zip(ATTENTION, folders, strict=True)]
    with contextlib.ExitStack() as stack:
        command = peers.vllm(base.model, *PEER_FLAGS, "--lora-modules", *modules)
        both = {VLLM: stack.enter_context(servers.running(VLLM, command))}
        both[OURS] = stack.enter_context(adapted.serving(OURS, base))
        models = {name: (name, ATTENTION) for name in (OURS, VLLM)}
        ask_all = partial(run_round, running=both, size=CostSize(), seed=PEER_SEED)
        yield from in_rounds(rounds, lambda number: ask_all(number, turned(models, number)))


@contextlib.contextmanager
def _running(
    base: adapted.AdaptedBase | None, size: CostSize, names: Sequence[str]
) -> Iterator[tuple[str, dict[str, servers.RunningServer]]]:
    """The base's name and the servers, which have loaded the adapters they will be asked for before."""
    from benchmarks.models import adapter_files  # torch

    base = base or adapted.full()
    rotating = [f"attention-{i}" for i in range(size.rotating)]
    adapter_files.make(base.model, base.root, rotating, rank=RANK)
    wide = [f"all-{i}" for i in range(CLIENTS)]
    adapter_files.make(base.model, base.root, wide, adapter_files.ALL, rank=RANK, seed=NUM_ROTATING)
    tight = adapted.command(base, "--max-active-adapters", str(NUM_SLOTS))
    commands = {BARE: servers.lorikeet(base.model, *base.flags), ROOMY: adapted.command(base), TIGHT: tight}
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(servers.running(name, commands[name])) for name in names}
        for name, adapters in ((ROOMY, ATTENTION), (TIGHT, rotating)):
            if name in running:
                uvloop.run(load(running[name].port, adapters))
        yield str(base.model), running


def standard_ways(number: int, model: str, size: CostSize) -> Ways:
    """What is asked in a round."""
    count = CLIENTS * size.requests_per_client
    start = count * (number + 1)
    models: Ways = {
        "base": (BARE, [model]),
        "attention": (ROOMY, ATTENTION),
        "all": (ROOMY, [f"all-{i}" for i in range(CLIENTS)]),
        "rotation": (TIGHT, [f"attention-{i % size.rotating}" for i in range(start, start + count)]),
    }
    return turned(models, number)


def turned(models: Ways, number: int) -> Ways:
    """The ways in the order of a round."""
    return {way: models[way] for way in in_turn(list(models), number)}


def run_round(
    number: int,
    ways: Ways,
    running: Mapping[str, servers.RunningServer],
    size: CostSize,
    seed: int = SEED,
    end: str = "",
    only: int = CLIENTS,
) -> Case:
    """One case: every way in turn. `end`: of every prompt. Of each way only the first `only` clients count."""
    raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    errors: list[str] = []
    for way, (name, models) in ways.items():
        extra = EXTRA[VLLM if name == VLLM else OURS]
        chosen = replace(size, requests_per_client=PEER_REQUESTS.get(name, size.requests_per_client))
        with alone(name, running, errors):
            answers = uvloop.run(ask(running[name].port, models, seed + 1 + number, chosen, extra, end))
        raw[way] = summary([answer for place, answer in enumerate(answers) if client_of(place, chosen) < only])
        errors += [f"{way}: {answer.error}" for answer in answers if answer.error]
    return Case(f"round {number}", raw, "; ".join(errors[:3]))


async def load(port: int, names: Sequence[str]) -> None:
    """Bring every adapter into the disk tier."""
    for first in range(0, len(names), CLIENTS):
        replies = (adapted.generate(port, "x", name, 1) for name in names[first : first + CLIENTS])
        for reply in await asyncio.gather(*replies):
            if reply.status != 200:
                raise RuntimeError(f"{reply.status} {reply.body[:300]!r}")


async def ask(
    port: int, models: Sequence[str], seed: int, size: CostSize, extra: Mapping[str, Any], end: str = ""
) -> list[completions.TimedCompletion]:
    """A closed loop in which each client asks for the models in turn, beginning with its own. `end`: of all prompts."""
    texts = prompts(CLIENTS * size.requests_per_client, size.length.num_prompt - len(end.split()), seed)

    async def client(index: int) -> list[completions.TimedCompletion]:
        answers = []
        for turn in range(size.requests_per_client):
            number = turn * CLIENTS + index
            target = completions.Endpoint(port, models[number % len(models)], extra)
            answers.append(await completions.complete(target, texts[number] + end, size.length))
        return answers

    return [answer for answers in await asyncio.gather(*map(client, range(CLIENTS))) for answer in answers]


def client_of(place: int, size: CostSize) -> int:
    """The client that got the answer at this place of those that `ask` returns."""
    return place // size.requests_per_client


def idle_share(raw: Raw) -> float:
    """Tokens per second of the server that has adapters over the one without, over the round's four runs."""
    seconds = {
        server: sum(1 / raw[way]["tokens_per_second"] for way in raw if way.startswith(server))
        for server in (BARE, ROOMY)
    }
    return seconds[BARE] / seconds[ROOMY]
