"""Beyond capacity: how soon a request is refused, and what is left for those that were taken.

As many clients as are taken at once, by turns with and without further requests of the same kind, four times as many
as could be served, side by side in one run. Those come from a process of their own, in which nothing else waits.

    python -m benchmarks.overload
"""

import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from benchmarks import load, peers, servers
from benchmarks.case import Case, Cases, Raw
from benchmarks.closed_loop import EXTRA, OURS
from benchmarks.prompts import prompts

CLIENTS = 32
"""As many as are taken."""
FLOOD_PER_S = 50
ROUNDS, ROUND_S = 8, 12.0
SETTLE_S = 3.0
RETRY_S = 1.0
"""What `Retry-After` says at least."""
MOST_PROMPTS = 4000
"""Far more than a round can take."""
NUM_PROMPT, NUM_OUTPUT = 32, (32, 96)
"""Tokens. Short prompts: with long ones all clients would take turns at computing them. Texts of one length would end
in waves.
"""
SEED = 8_000
SETTINGS: dict[str, Any] = {
    "clients": CLIENTS,
    "flood_per_second": FLOOD_PER_S,
    "seconds": ROUND_S,
    "prompt_tokens": NUM_PROMPT,
    "new_tokens": NUM_OUTPUT,
    "seed": SEED,
}


def measure(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per round: the same seconds without and with a flood."""
    model = peers.model_folder()
    command = servers.lorikeet(model, "--max-concurrent-requests", str(CLIENTS))
    with servers.running("overload", command) as server:
        target = load.Target(server.port, str(model), EXTRA[OURS])
        uvloop.run(load.closed_loop(target, prompts(2 * CLIENTS, NUM_PROMPT, SEED), CLIENTS, load.Length(NUM_PROMPT)))
        for number in range(ROUNDS):
            if f"round {number}" not in finished:
                yield Case(f"round {number}", uvloop.run(round_of(target, number)))


async def round_of(target: load.Target, number: int) -> dict[str, Any]:
    """Tokens per second of all that were taken, without and with a flood, and how long refusals took."""
    flood_first = number % 2 == 0
    is_over = asyncio.Event()
    answers: list[load.Answer] = []
    waiting = iter(prompts(MOST_PROMPTS, NUM_PROMPT, SEED + number))
    draw = random.Random(SEED + number)

    async def client() -> None:
        while not is_over.is_set():
            answer = load.Answer(sent=time.monotonic())
            answers.append(answer)
            await load.complete(target, next(waiting), _length(draw), answer)
            if answer.error:  # one of the flood had the place
                await asyncio.sleep(RETRY_S)

    words = [sys.executable, "-m", "benchmarks.overload", str(target.port), target.model, str(SEED + 1000 + number)]
    pipe = asyncio.subprocess.PIPE
    flood = await asyncio.create_subprocess_exec(*words, cwd=servers.REPOSITORY, stdin=pipe, stdout=pipe)
    assert flood.stdout is not None
    await flood.stdout.readline()  # it is ready
    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    starts: dict[bool, float] = {}
    events, refused, errors = list[float](), list[float](), list[str]()
    for flooded in (flood_first, not flood_first):
        await asyncio.sleep(SETTLE_S)
        starts[flooded] = time.monotonic()
        if flooded:
            told = json.loads((await flood.communicate(b"go\n"))[0])
            events, refused, errors = told["events"], told["refused_ms"], told["errors"]
        await asyncio.sleep(max(0.0, starts[flooded] + ROUND_S - time.monotonic()))
    is_over.set()
    await asyncio.gather(*clients)
    events += [at for answer in answers for at in answer.events]
    return {
        "tokens_per_second": rate(events, starts[False]),
        "flooded_tokens_per_second": rate(events, starts[True]),
        "refused_ms": refused,
        "errors": sorted({*errors, *(answer.error[:100] for answer in answers if _is_wrong(answer))}),
    }


async def flood(target: load.Target, seed: int) -> dict[str, Any]:
    """Further requests at random moments, so many a second, each with a connection of its own. What came of them."""
    with contextlib.suppress(PermissionError):  # a clock that waits for a core itself shows its own wait
        os.nice(-10)
    draw = random.Random(seed)
    texts = iter(prompts(round(2 * FLOOD_PER_S * ROUND_S), NUM_PROMPT, seed))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    answers: list[load.Answer] = []
    tasks = []
    at = end = time.monotonic()
    end += ROUND_S
    while (at := at + draw.expovariate(FLOOD_PER_S)) < end:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        answers.append(load.Answer(sent=time.monotonic()))
        tasks.append(asyncio.create_task(load.complete(target, next(texts), _length(draw), answers[-1])))
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    for task in tasks:
        task.cancel()
    return {
        "events": [at for answer in answers for at in answer.events],
        "refused_ms": [round(1000 * (answer.last - answer.sent), 3) for answer in answers if "429" in answer.error],
        "errors": sorted({answer.error[:100] for answer in answers if _is_wrong(answer)}),
    }


def _length(draw: random.Random) -> load.Length:
    return load.Length(NUM_PROMPT, draw.randint(*NUM_OUTPUT))


def _is_wrong(answer: load.Answer) -> bool:
    return bool(answer.error) and "429" not in answer.error


def rate(events: Sequence[float], start: float) -> float:
    """Events of text per second of the part of a round that began then."""
    return sum(start <= at < start + ROUND_S for at in events) / ROUND_S


def goodput(raw: Raw) -> float:
    """What is left beside a flood, as a share of what there is without."""
    return float(raw["flooded_tokens_per_second"]) / float(raw["tokens_per_second"])


def refusal_p99(raw: Raw) -> float:
    """In milliseconds, connecting included."""
    return float(statistics.quantiles(raw["refused_ms"], n=100)[98])


def main() -> None:
    if len(sys.argv) > 1:
        port, model, seed = sys.argv[1:]
        print(json.dumps(uvloop.run(flood(load.Target(int(port), model, EXTRA[OURS]), int(seed)))))
        return
    for case in measure():
        raw = case.raw
        print(
            f"{case.name}: {raw['tokens_per_second']:.0f} tokens/s, flooded × {goodput(raw):.3f};"
            f" {len(raw['refused_ms'])} refused, p50 {statistics.median(raw['refused_ms']):.2f} ms,"
            f" p99 {refusal_p99(raw):.2f} ms, errors {raw['errors']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
