"""Beyond capacity: how soon a request is refused, and what is left for those that were taken.

A server full of long requests, by turns with and without a flood of further ones, side by side in one run.

    python -m benchmarks.overload
"""

import asyncio
import json
import statistics
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
FLOOD_PER_S = 100
ROUNDS, ROUND_S = 8, 12.0
SETTLE_S = 3.0
RETRY_S = 0.1
MOST_PROMPTS = 4000
"""Far more than a round can take."""
LENGTH = load.Length(32, 64)
"""Short prompts: with long ones all clients would take turns at computing them."""
FLOOD_TOKENS = 8
CONNECTIONS = 4
"""Of the flood: one that is taken after all does not hold up the others."""
SEED = 8_000
SETTINGS: dict[str, Any] = {
    "clients": CLIENTS,
    "flood_per_second": FLOOD_PER_S,
    "seconds": ROUND_S,
    "prompt_tokens": LENGTH.num_prompt,
    "new_tokens": LENGTH.num_output,
    "seed": SEED,
}


def measure(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per round: the same seconds without and with a flood."""
    model = peers.model_folder()
    command = servers.lorikeet(model, "--max-concurrent-requests", str(CLIENTS))
    with servers.running("overload", command) as server:
        for number in range(ROUNDS):
            if f"round {number}" not in finished:
                target = load.Target(server.port, str(model), EXTRA[OURS])
                yield Case(f"round {number}", uvloop.run(round_of(target, number)))


async def round_of(target: load.Target, number: int) -> dict[str, Any]:
    """Tokens per second of those that were taken, without and with a flood, and how long refusals took."""
    flood_first = number % 2 == 0
    is_over = asyncio.Event()
    answers: list[load.Answer] = []
    waiting = iter(prompts(MOST_PROMPTS, LENGTH.num_prompt, SEED + number))

    async def client() -> None:
        while not is_over.is_set():
            answers.append(load.Answer(sent=time.monotonic()))
            await load.complete(target, next(waiting), LENGTH, answers[-1])
            if answers[-1].error:  # one of the flood had the place: as others would, try again a moment later
                await asyncio.sleep(RETRY_S)

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    await asyncio.sleep(SETTLE_S)
    speeds: dict[bool, float] = {}
    refusals: list[tuple[int, float]] = []
    for flooded in (flood_first, not flood_first):
        start = time.monotonic()
        flood = [asyncio.create_task(flood_with(target, refusals)) for _ in range(CONNECTIONS * flooded)]
        await asyncio.sleep(ROUND_S)
        taken = FLOOD_TOKENS * sum(status == 200 for status, _ in refusals) / ROUND_S
        speeds[flooded] = tokens_between(answers, start, time.monotonic()) + taken * flooded
        for task in flood:
            task.cancel()
    is_over.set()
    await asyncio.gather(*clients)
    return {
        "tokens_per_second": speeds[False],
        "flooded_tokens_per_second": speeds[True],
        "refused_ms": [round(1000 * seconds, 3) for status, seconds in refusals if status == 429],
        "taken": sum(status == 200 for status, _ in refusals),
        "errors": sorted({answer.error[:100] for answer in answers if answer.error and "429" not in answer.error}),
    }


async def flood_with(target: load.Target, refusals: list[tuple[int, float]]) -> None:
    """One request after the other on a connection that stays open, so many a second; status and seconds of each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    body = json.dumps({"model": target.model, "prompt": "one too many " * 20, "max_tokens": FLOOD_TOKENS}).encode()
    head = (
        f"POST {load.PATH} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        while True:
            start = time.monotonic()
            writer.write(head.encode() + body)
            status = int((await reader.readuntil(b"\r\n")).split()[1])
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(headers.partition(b"content-length:")[2].split(b"\r\n")[0]))
            refusals.append((status, time.monotonic() - start))
            await asyncio.sleep(max(0.0, start + CONNECTIONS / FLOOD_PER_S - time.monotonic()))
    finally:
        writer.close()


def tokens_between(answers: Sequence[load.Answer], start: float, end: float) -> float:
    """Events of text per second."""
    return sum(start <= at < end for answer in answers for at in answer.events) / (end - start)


def goodput(raw: Raw) -> float:
    """What is left beside a flood, as a share of what there is without."""
    return float(raw["flooded_tokens_per_second"]) / float(raw["tokens_per_second"])


def refusal_p99(raw: Raw) -> float:
    """In milliseconds."""
    return float(statistics.quantiles(raw["refused_ms"], n=100)[98])


def main() -> None:
    for case in measure():
        raw = case.raw
        print(
            f"{case.name}: {raw['tokens_per_second']:.0f} tokens/s, flooded × {goodput(raw):.3f};"
            f" {len(raw['refused_ms'])} refused, p50 {statistics.median(raw['refused_ms']):.2f} ms,"
            f" p99 {refusal_p99(raw):.2f} ms, {raw['taken']} taken, errors {raw['errors']}"
        )


if __name__ == "__main__":
    main()
