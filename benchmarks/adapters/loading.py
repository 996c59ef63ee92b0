"""Loading 64 cold adapters: on an idle server, and while other requests run.

Cold: neither memory nor disk tier has them; their files are in the system's cache, so that no disk is measured. A round
has three phases. The idle server loads all of them, and `benchmarks.adapters.plain_reading` reads the same files. Then
eight long generations keep both cores busy, and short requests come four times a second: 64 for cold adapters and 64
for the same adapters when they are resident, each first in turn. The slowdown of the generations is the ratio of their
time between tokens. Last, 64 requests ask for one cold adapter each, all at once, while such generations run: the
longest time to first token counts.
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

from benchmarks.evidence.figure import Case, Cases, Raw, percentile
from benchmarks.load import adapted, completions, rounds, servers
from benchmarks.models.prompts import prompts

ROUNDS = 10
CLIENTS = 8
NUM_COLD = 64
PER_SECOND = 4.0
SEED = 31_000
EXTRA = rounds.EXTRA[rounds.OURS]
SHORT = completions.RequestLength(16, 1)


@dataclass(frozen=True)
class LoadingSize:
    """How much is asked."""

    rounds: int = ROUNDS
    num_cold: int = NUM_COLD
    per_second: float = PER_SECOND
    longest: int = 3_500
    """Tokens of a generation that runs as long as needed."""


QUICK = LoadingSize(1, 8, 8.0)


@dataclass(frozen=True)
class Scene:
    """A server, and the adapters it is asked for."""

    base: adapted.AdaptedBase
    server: servers.RunningServer
    names: list[str]
    size: LoadingSize


def measure(base: adapted.AdaptedBase | None = None, size: LoadingSize | None = None) -> Cases:
    """One case per round, each with all three phases."""
    from benchmarks.models import adapter_files  # torch

    base, size = base or adapted.full(), size or LoadingSize()
    names = [f"attention-{i}" for i in range(size.num_cold)]
    adapter_files.make(base.model, base.root, names)
    with adapted.serving("loading", base, "--max-active-adapters", "128") as server:
        scene = Scene(base, server, names, size)
        uvloop.run(adapted.make_cold(server.port, names))
        for number in range(size.rounds):
            yield _round(scene, number)


def _round(scene: Scene, number: int) -> Case:
    raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    error = ""
    try:
        raw["idle_s"] = round(uvloop.run(_load(scene)), 4)
        with scene.server.frozen():
            raw["plain_s"] = _plain(scene)
        uvloop.run(adapted.make_cold(scene.server.port, scene.names))
        raw["next to"] = uvloop.run(_while_running(scene, SEED + number, cold_first=number % 2 == 0))
        uvloop.run(adapted.make_cold(scene.server.port, scene.names))
        raw["waiting"] = uvloop.run(_waiting(scene, SEED + 500 + number))
        uvloop.run(adapted.make_cold(scene.server.port, scene.names))
    except (RuntimeError, TimeoutError) as failure:
        error = str(failure)[:500]
    return Case(f"round {number}", raw, error)


async def _load(scene: Scene, every_s: float = 0.02) -> float:
    """Seconds until all cold adapters are in slots, polled every `every_s`."""
    start = time.perf_counter()
    await asyncio.gather(*(adapted.admin(scene.server.port, "load", adapter_id=name) for name in scene.names))
    await adapted.until_resident(scene.server.port, len(scene.names), every_s)
    return time.perf_counter() - start


def _plain(scene: Scene) -> float:
    """Seconds that reading and checking the same files takes."""
    folders = [str(scene.base.root / name) for name in scene.names]
    command = [sys.executable, "-m", "benchmarks.adapters.plain_reading", str(scene.base.model), *folders]
    done = subprocess.run(command, cwd=servers.REPOSITORY, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


@contextlib.asynccontextmanager
async def _texts(scene: Scene, seed: int) -> AsyncIterator[list[completions.TimedCompletion]]:
    """Eight generations that run until the block ends. Raises RuntimeError if one ended before."""
    target = completions.Endpoint(scene.server.port, str(scene.base.model), EXTRA)
    length = completions.RequestLength(32, scene.size.longest)
    answers = [completions.TimedCompletion() for _ in range(CLIENTS)]
    requests = zip(prompts(CLIENTS, length.num_prompt, seed), answers, strict=True)
    tasks = [asyncio.create_task(completions.complete(target, text, length, answer)) for text, answer in requests]
    try:
        await completions.until(lambda: all(answer.events for answer in answers) or any(task.done() for task in tasks))
        yield answers
        ended = [task.result() for task in tasks if task.done()]
        if ended:
            raise RuntimeError(f"a text ended too early: {ended[0].num_output} tokens {ended[0].error}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _while_running(scene: Scene, seed: int, cold_first: bool) -> dict[str, Any]:
    """Time between tokens of running generations while requests come for cold adapters and for resident ones."""
    raw: dict[str, Any] = {}
    if not cold_first:
        await _load(scene)
    for way in ("cold", "resident") if cold_first else ("resident", "cold"):
        if way == "cold" and not cold_first:
            await adapted.make_cold(scene.server.port, scene.names)
        async with _texts(scene, seed) as answers:  # equal lengths both times: longer texts take longer steps
            start = time.perf_counter()
            short_answers = await _ask_each(scene, seed + (way == "cold"), 1 / scene.size.per_second)
            gaps = _gaps(answers, start, time.perf_counter())
        raw[way] = {
            "p99_s": round(percentile(gaps, 99), 5),
            "median_s": round(percentile(gaps, 50), 5),
            "gaps": len(gaps),
            "first_token_s": [round(answer.first_token_s, 4) for answer in short_answers],
        }
    return raw


async def _ask_each(scene: Scene, seed: int, pause_s: float) -> list[completions.TimedCompletion]:
    """A request for each adapter, with such a pause after each. Raises RuntimeError if one fails."""
    texts = prompts(len(scene.names), SHORT.num_prompt, seed)
    running = []
    for name, text in zip(scene.names, texts, strict=True):
        target = completions.Endpoint(scene.server.port, name, EXTRA)
        running.append(asyncio.create_task(completions.complete(target, text, SHORT)))
        await asyncio.sleep(pause_s)
    answers = await asyncio.gather(*running)
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(errors[0])
    return answers


def _gaps(answers: list[completions.TimedCompletion], start: float, end: float) -> list[float]:
    """Seconds between the tokens that arrived between two moments."""
    return [
        second - first
        for answer in answers
        for first, second in itertools.pairwise(answer.events)
        if start <= first and second <= end
    ]


async def _waiting(scene: Scene, seed: int) -> dict[str, Any]:
    """Time to first token of each request for a cold adapter, all sent at once, and time between tokens meanwhile."""
    async with _texts(scene, seed + 250) as running:
        start = time.perf_counter()
        answers = await _ask_each(scene, seed, 0.0)
        end = time.perf_counter()
    first = [round(answer.first_token_s, 4) for answer in answers]
    return {"first_token_s": first, "p99_s": round(percentile(_gaps(running, start, end), 99), 5)}


def active(raw: Raw) -> float:
    """99th percentile of the time between tokens while adapters load, over that while they are resident."""
    return float(raw["next to"]["cold"]["p99_s"] / raw["next to"]["resident"]["p99_s"])


def over_plain(raw: Raw) -> float:
    return float(raw["idle_s"] / raw["plain_s"])


def longest_wait(raw: Raw) -> float:
    """The longest time to first token of a request for a cold adapter: it includes the wait for the adapter."""
    return float(max(raw["waiting"]["first_token_s"] + raw["next to"]["cold"]["first_token_s"]))


def active_at_once(raw: Raw) -> float:
    """p99 time between tokens while all 64 adapters are requested at once, over that next to resident ones."""
    return float(raw["waiting"]["p99_s"] / raw["next to"]["resident"]["p99_s"])
