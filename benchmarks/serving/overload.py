"""Beyond capacity: how fast requests are rejected, and how much throughput the accepted ones keep.

As many clients as are accepted at once, by turns with and without a flood of further requests, four times as many as
could be served. The flood is a separate process (this module as a program), so that its clock waits for nothing else.
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

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import completions, peers, servers
from benchmarks.load.rounds import EXTRA, OURS
from benchmarks.models.prompts import prompts

CLIENTS = 32
"""Clients: as many as are accepted at once."""
FLOOD_PER_S = 50
ROUNDS, ROUND_S = 8, 12.0
SETTLE_S = 3.0
RETRY_S = 1.0
"""The least that `Retry-After` asks for."""
MAX_PROMPTS = 4000
"""Far more than a round needs."""
NUM_PROMPT, NUM_OUTPUT = 32, (32, 96)
"""Tokens. Short prompts: with long ones all clients would wait for their prefill. Texts of one length would end in
waves.
"""
SEED = 8_000


def measure(rounds: int = ROUNDS) -> Cases:
    """One case per round: the same seconds without and with a flood."""
    model = peers.model_folder()
    command = servers.lorikeet(model, "--max-concurrent-requests", str(CLIENTS))
    with servers.running("overload", command) as server:
        target = completions.Endpoint(server.port, str(model), EXTRA[OURS])
        texts = prompts(2 * CLIENTS, NUM_PROMPT, SEED)
        uvloop.run(completions.closed_loop(target, texts, CLIENTS, completions.RequestLength(NUM_PROMPT)))
        for number in range(rounds):
            yield Case(f"round {number}", uvloop.run(round_of(target, number)))


async def round_of(target: completions.Endpoint, number: int) -> dict[str, Any]:
    """Tokens per second of all accepted requests, without and with a flood, and the latency of rejections."""
    flood_first = number % 2 == 0
    is_over = asyncio.Event()
    answers: list[completions.TimedCompletion] = []
    waiting = iter(prompts(MAX_PROMPTS, NUM_PROMPT, SEED + number))
    draw = random.Random(SEED + number)

    async def client() -> None:
        while not is_over.is_set():
            answer = completions.TimedCompletion()
            answers.append(answer)
            await completions.complete(target, next(waiting), _length(draw), answer)
            if answer.error:  # a request of the flood was accepted instead
                await asyncio.sleep(RETRY_S)

    words = [sys.executable, "-m", "benchmarks.serving.overload"]
    words += [str(target.port), target.model, str(SEED + 1000 + number)]
    pipe = asyncio.subprocess.PIPE
    flood = await asyncio.create_subprocess_exec(*words, cwd=servers.REPOSITORY, stdin=pipe, stdout=pipe)
    assert flood.stdout is not None
    await flood.stdout.readline()  # it is ready
    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    starts: dict[bool, float] = {}
    events, refused, errors = list[float](), list[float](), list[str]()
    for flooded in (flood_first, not flood_first):
        await asyncio.sleep(SETTLE_S)
        starts[flooded] = time.perf_counter()
        if flooded:
            result = json.loads((await flood.communicate(b"go\n"))[0])
            events, refused, errors = result["events"], result["refused_ms"], result["errors"]
        await asyncio.sleep(max(0.0, starts[flooded] + ROUND_S - time.perf_counter()))
    is_over.set()
    await asyncio.gather(*clients)
    events += [time_s for answer in answers for time_s in answer.events]
    return {
        "tokens_per_second": rate(events, starts[False]),
        "flooded_tokens_per_second": rate(events, starts[True]),
        "refused_ms": refused,
        "errors": sorted({*errors, *(answer.error[:100] for answer in answers if _is_wrong(answer))}),
    }


async def flood(target: completions.Endpoint, seed: int) -> dict[str, Any]:
    """Further requests, FLOOD_PER_S on average, each with its own connection. Returns what became of them."""
    with contextlib.suppress(PermissionError):  # a clock that waits for a core itself shows its own wait
        os.nice(-10)
    draw = random.Random(seed)
    texts = iter(prompts(round(2 * FLOOD_PER_S * ROUND_S), NUM_PROMPT, seed))
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    answers: list[completions.TimedCompletion] = []
    tasks = []
    time_s = end = time.perf_counter()
    end += ROUND_S
    while (time_s := time_s + draw.expovariate(FLOOD_PER_S)) < end:
        await asyncio.sleep(max(0.0, time_s - time.perf_counter()))
        answers.append(completions.TimedCompletion())
        tasks.append(asyncio.create_task(completions.complete(target, next(texts), _length(draw), answers[-1])))
    await asyncio.sleep(max(0.0, end - time.perf_counter()))
    for task in tasks:
        task.cancel()
    return {
        "events": [time_s for answer in answers for time_s in answer.events],
        "refused_ms": [round(1000 * (answer.last - answer.sent), 3) for answer in answers if "429" in answer.error],
        "errors": sorted({answer.error[:100] for answer in answers if _is_wrong(answer)}),
    }


def _length(draw: random.Random) -> completions.RequestLength:
    return completions.RequestLength(NUM_PROMPT, draw.randint(*NUM_OUTPUT))


def _is_wrong(answer: completions.TimedCompletion) -> bool:
    return bool(answer.error) and "429" not in answer.error


def rate(events: Sequence[float], start: float) -> float:
    """Tokens per second of the part of a round that began at `start`."""
    return sum(start <= time_s < start + ROUND_S for time_s in events) / ROUND_S


def goodput(raw: Raw) -> float:
    """Throughput during a flood over that without."""
    return float(raw["flooded_tokens_per_second"]) / float(raw["tokens_per_second"])


def refusal_p99(raw: Raw) -> float:
    """In milliseconds, connecting included."""
    return float(statistics.quantiles(raw["refused_ms"], n=100)[98])


if __name__ == "__main__":
    parser = arguments.parser(__doc__)
    parser.add_argument("flood", nargs=3, metavar=("PORT", "MODEL", "SEED"), help="the server, its model, and a seed")
    port, model, seed = parser.parse_args().flood
    print(json.dumps(uvloop.run(flood(completions.Endpoint(int(port), model, EXTRA[OURS]), int(seed)))))
