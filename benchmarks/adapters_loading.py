"""Nobody waits for a load: 64 cold adapters are asked for while others run, and are loaded while nobody runs.

Cold: neither memory nor disk tier has them; their files are in the system's cache, so that no disk is measured. A round
has three parts. The idle server loads all of them, and `benchmarks/plain_reading.py` reads the same files beside it.
Then eight long texts keep both cores busy, and requests with a short prompt come four times a second: 64 for cold
adapters, and 64 for the same when they are resident, in turn which is first. What texts feel of the loads is the
distance of their tokens in the one time over that in the other. At last 64 requests ask for a cold adapter each, all at
once beside such texts: how long does the last of them wait for its first token?

    python -m benchmarks.adapters_loading [--quick] [ROUNDS]
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks import adapted, load, servers
from benchmarks.case import Case, Cases, Raw
from benchmarks.figures import percentile
from benchmarks.prompts import prompts

ROUNDS = 10
CLIENTS = 8
NUM_COLD = 64
PER_SECOND = 4.0
SEED = 31_000
EXTRA = {"ignore_eos_token": True}
SHORT = load.Length(16, 1)
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "clients": CLIENTS,
    "cold_adapters": NUM_COLD,
    "per_second": PER_SECOND,
    "rank": 16,
    "seed": SEED,
}


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    rounds: int = ROUNDS
    num_cold: int = NUM_COLD
    per_second: float = PER_SECOND
    longest: int = 3_500
    """Tokens of a text that runs for as long as is needed."""


QUICK = Size(1, 8, 8.0)


@dataclass(frozen=True)
class Scene:
    """A server, and what is asked of it."""

    base: adapted.Base
    server: servers.Server
    names: list[str]
    size: Size


def measure(
    finished: frozenset[str] = frozenset(), base: adapted.Base | None = None, size: Size | None = None
) -> Cases:
    """One case per round, each with all three."""
    from benchmarks import adapter_files  # torch

    base, size = base or adapted.full(), size or Size()
    names = [f"attention-{i}" for i in range(size.num_cold)]
    adapter_files.make(base.model, base.root, names)
    with adapted.serving("loading", base, "--max-active-adapters", "128") as server:
        scene = Scene(base, server, names, size)
        uvloop.run(adapted.make_cold(server.port, names))
        for number in range(size.rounds):
            if f"round {number}" not in finished:
                yield _round(scene, number)


def _round(scene: Scene, number: int) -> Case:
    raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    error = ""
    try:
        raw["idle_s"] = round(uvloop.run(_load(scene)), 4)
        with scene.server.frozen():
            raw["plain_s"] = _plain(scene)
        uvloop.run(adapted.make_cold(scene.server.port, scene.names))
        raw["beside"] = uvloop.run(_beside(scene, SEED + number, cold_first=number % 2 == 0))
        uvloop.run(adapted.make_cold(scene.server.port, scene.names))
        raw["waiting"] = uvloop.run(_waiting(scene, SEED + 500 + number))
        uvloop.run(adapted.make_cold(scene.server.port, scene.names))
    except (RuntimeError, TimeoutError) as failure:
        error = str(failure)[:500]
    return Case(f"round {number}", raw, error)


async def _load(scene: Scene, every_s: float = 0.02) -> float:
    """Seconds until all cold adapters are in slots, looked at so often."""
    start = time.monotonic()
    await asyncio.gather(*(adapted.admin(scene.server.port, "load", adapter_id=name) for name in scene.names))
    await adapted.until_resident(scene.server.port, len(scene.names), every_s)
    return time.monotonic() - start


def _plain(scene: Scene) -> float:
    """Seconds that reading and checking the same files takes."""
    folders = [str(scene.base.root / name) for name in scene.names]
    command = [sys.executable, "-m", "benchmarks.plain_reading", str(scene.base.model), *folders]
    done = subprocess.run(command, cwd=servers.REPOSITORY, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


@contextlib.asynccontextmanager
async def _texts(scene: Scene, seed: int) -> AsyncIterator[list[load.Answer]]:
    """Eight texts that run until the block ends. Raises RuntimeError where one ended before."""
    target = load.Target(scene.server.port, str(scene.base.model), EXTRA)
    length = load.Length(32, scene.size.longest)
    answers: list[load.Answer] = []
    tasks = []
    for text in prompts(CLIENTS, length.num_prompt, seed):
        answers.append(load.Answer(time.monotonic()))
        tasks.append(asyncio.create_task(load.complete(target, text, length, answers[-1])))
    try:
        await load.until(lambda: all(answer.events for answer in answers) or any(task.done() for task in tasks))
        yield answers
        ended = [task.result() for task in tasks if task.done()]
        if ended:
            raise RuntimeError(f"a text ended too early: {ended[0].num_output} tokens {ended[0].error}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _beside(scene: Scene, seed: int, cold_first: bool) -> dict[str, Any]:
    """Distances of running texts' tokens while requests come for cold adapters and for resident ones."""
    raw: dict[str, Any] = {}
    if not cold_first:
        await _load(scene)
    for way in ("cold", "resident") if cold_first else ("resident", "cold"):
        if way == "cold" and not cold_first:
            await adapted.make_cold(scene.server.port, scene.names)
        async with _texts(scene, seed) as answers:  # of the same lengths both times: longer ones take longer steps
            start = time.monotonic()
            asked = await _arrivals(scene, seed + (way == "cold"))
            gaps = _gaps(answers, start, time.monotonic())
        raw[way] = {
            "p99_s": round(percentile(gaps, 99), 5),
            "median_s": round(percentile(gaps, 50), 5),
            "gaps": len(gaps),
            "first_token_s": [round(answer.first_token_s, 4) for answer in asked],
        }
    return raw


async def _arrivals(scene: Scene, seed: int) -> list[load.Answer]:
    """A request for each adapter, so many per second; all answered. Raises RuntimeError."""
    texts = prompts(len(scene.names), SHORT.num_prompt, seed)
    running = []
    for name, text in zip(scene.names, texts, strict=True):
        target = load.Target(scene.server.port, name, EXTRA)
        running.append(asyncio.create_task(load.complete(target, text, SHORT)))
        await asyncio.sleep(1 / scene.size.per_second)
    return _sound(await asyncio.gather(*running))


def _sound(answers: list[load.Answer]) -> list[load.Answer]:
    """Raises RuntimeError where one failed."""
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        raise RuntimeError(errors[0])
    return answers


def _gaps(answers: list[load.Answer], start: float, end: float) -> list[float]:
    """Seconds between tokens that came between two moments."""
    return [
        after - before
        for answer in answers
        for before, after in itertools.pairwise(answer.events)
        if start <= before and after <= end
    ]


async def _waiting(scene: Scene, seed: int) -> dict[str, Any]:
    """Seconds to the first token of each request for a cold adapter, all sent at once, and what running texts felt."""
    texts = prompts(len(scene.names), SHORT.num_prompt, seed)
    targets = [load.Target(scene.server.port, name, EXTRA) for name in scene.names]
    async with _texts(scene, seed + 250) as running:
        start = time.monotonic()
        asked = (load.complete(target, text, SHORT) for target, text in zip(targets, texts, strict=True))
        answers = _sound(await asyncio.gather(*asked))
        end = time.monotonic()
    first = [round(answer.first_token_s, 4) for answer in answers]
    return {"first_token_s": first, "p99_s": round(percentile(_gaps(running, start, end), 99), 5)}


def active(raw: Raw) -> float:
    """99th percentile of running texts' distance of tokens while adapters load, over that without."""
    return float(raw["beside"]["cold"]["p99_s"] / raw["beside"]["resident"]["p99_s"])


def over_plain(raw: Raw) -> float:
    return float(raw["idle_s"] / raw["plain_s"])


def longest_wait(raw: Raw) -> float:
    """Its first token includes the wait for its adapter, and is no shorter."""
    return float(max(raw["waiting"]["first_token_s"] + raw["beside"]["cold"]["first_token_s"]))


def active_at_once(raw: Raw) -> float:
    """The same while all 64 are in haste."""
    return float(raw["waiting"]["p99_s"] / raw["beside"]["resident"]["p99_s"])


if __name__ == "__main__":
    small = adapted.small() if "--quick" in sys.argv else None
    counts = [int(word) for word in sys.argv[1:] if word.isdigit()]
    chosen = QUICK if small else Size(counts[0] if counts else ROUNDS)
    for case in measure(base=small, size=chosen):
        told = ""
        if not case.error:
            told = f"felt {active(case.raw):.2f}, at once {active_at_once(case.raw):.2f}, "
            told += f"over plain {over_plain(case.raw):.2f}, waited {longest_wait(case.raw):.1f} s"
        print(f"{case.name}: {told}", json.dumps(case.raw), case.error, flush=True)
