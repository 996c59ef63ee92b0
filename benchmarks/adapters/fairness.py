"""Fairness among adapters: how long requests of seven adapters wait while an eighth floods the server at twenty times
its rate, and how many tokens an adapter of weight three gets compared with one of weight one.

Flood: requests arrive by a Poisson process per adapter, whatever the server does, without and with a flood in turn; the
others' arrivals are the same in both. Weights: more clients than run at once send requests for both adapters without a
pause, and tokens are counted while both have requests waiting.
"""

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw, percentile
from benchmarks.load import adapted, completions, rounds, servers
from benchmarks.models.prompts import prompts

ROUNDS = 6
FLOOD_ROUNDS = 8
NUM_ADAPTERS = 8
FLOOD = 20
RATE = 0.4
"""Requests per second of an adapter that does not flood: eight of them are a third of what the machine can do."""
SECONDS = 36.0
HEAVY, LIGHT, WEIGHT = "heavy", "light", 3.0
CLIENTS_EACH = 24
RUNNING = 8
"""Requests that the shard computes at once in the second measurement."""
EXTRA = rounds.EXTRA[rounds.OURS]
SEED = 41_000
LENGTH = completions.RequestLength(32, 16)


@dataclass(frozen=True)
class FairnessSize:
    """How much is asked."""

    rounds: int = ROUNDS
    seconds: float = SECONDS
    rate: float = RATE
    length: completions.RequestLength = LENGTH


QUICK = FairnessSize(1, 6.0, 1.0, completions.RequestLength(8, 4))


def flood(base: adapted.AdaptedBase | None = None, size: FairnessSize | None = None) -> Cases:
    """One case per round: without and with a flood, each first in turn."""
    base, size, names = _made(base, size or FairnessSize(FLOOD_ROUNDS))
    with adapted.serving("fair", base, "--max-queued-per-adapter", "4096") as server:
        uvloop.run(_warm(server, names, size))
        for number in range(size.rounds):
            raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
            errors: list[str] = []
            for way in rounds.in_turn(("calm", "flood"), number):
                others, flooding = uvloop.run(_arrivals(server, names, size, SEED + number, way == "flood"))
                errors += [answer.error for answer in others if answer.error]
                raw[way] = {
                    "first_token_s": [round(answer.first_token_s, 4) for answer in others if not answer.error],
                    "flooding": len(flooding),
                    "refused": sum(bool(answer.error) for answer in flooding),
                }
                uvloop.run(_until_idle(server))
            yield Case(f"round {number}", raw, "; ".join(errors[:3]))


def weights(base: adapted.AdaptedBase | None = None, size: FairnessSize | None = None) -> Cases:
    """One case per round: tokens of both adapters while both have requests waiting."""
    base, size, names = _made(base, size)
    entries = {HEAVY: {"source": "local", "id": names[0], "weight": WEIGHT}, LIGHT: {"source": "local", "id": names[1]}}
    with tempfile.TemporaryDirectory() as folder:
        catalogue = Path(folder) / "catalogue.yaml"
        catalogue.write_text(json.dumps(entries))
        room = str(RUNNING * (size.length.num_prompt + size.length.num_output))
        flags = ["--adapters", str(catalogue), "--max-batch-total-tokens", room]
        flags += ["--max-total-tokens", str(size.length.num_prompt + size.length.num_output)]
        with adapted.serving("weights", base, *flags) as server:
            uvloop.run(_warm(server, [HEAVY, LIGHT], size))
            for number in range(size.rounds):
                raw, error = uvloop.run(_shares(server, size, SEED + 100 * number))
                yield Case(f"round {number}", raw, error)
                uvloop.run(_until_idle(server))


def _made(
    base: adapted.AdaptedBase | None, size: FairnessSize | None
) -> tuple[adapted.AdaptedBase, FairnessSize, list[str]]:
    from benchmarks.models import adapter_files  # torch

    base = base or adapted.full()
    names = [f"attention-{i}" for i in range(NUM_ADAPTERS)]
    adapter_files.make(base.model, base.root, names)
    return base, size or FairnessSize(), names


async def _warm(server: servers.RunningServer, names: Sequence[str], size: FairnessSize) -> None:
    texts = prompts(len(names), size.length.num_prompt, SEED - 1)
    targets = [completions.Endpoint(server.port, name, EXTRA) for name in names]
    requests = (completions.complete(target, text, size.length) for target, text in zip(targets, texts, strict=True))
    for answer in await asyncio.gather(*requests):
        if answer.error:
            raise RuntimeError(answer.error)


async def _until_idle(server: servers.RunningServer) -> None:
    """Wait until the requests of one measurement are finished before the next."""
    await completions.until(lambda: not adapted.samples(server.port)["lorikeet_active_requests"])


async def _arrivals(
    server: servers.RunningServer, names: Sequence[str], size: FairnessSize, seed: int, is_flood: bool
) -> tuple[list[completions.TimedCompletion], list[completions.TimedCompletion]]:
    """Answers to the other adapters, and to the first one, which may flood."""

    async def adapter(number: int) -> list[completions.TimedCompletion]:
        rate = size.rate * (FLOOD if is_flood and number == 0 else 1)
        draw = random.Random(1000 * seed + number)
        texts = prompts(int(2 * rate * size.seconds) + 20, size.length.num_prompt, 1000 * seed + number)
        target = completions.Endpoint(server.port, names[number], EXTRA)
        start, offset = time.perf_counter(), draw.expovariate(rate)
        running = []
        while offset < size.seconds and texts:
            await asyncio.sleep(max(0.0, start + offset - time.perf_counter()))
            running.append(asyncio.create_task(completions.complete(target, texts.pop(), size.length)))
            offset += draw.expovariate(rate)
        if number == 0:  # the backlog of the flood is not measured
            await asyncio.sleep(1.0)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return [await task for task in running if not task.cancelled()]

    first, *others = await asyncio.gather(*(adapter(number) for number in range(len(names))))
    return [answer for answers in others for answer in answers], first


async def _shares(server: servers.RunningServer, size: FairnessSize, seed: int) -> tuple[dict[str, Any], str]:
    """Tokens of both adapters in a time during which both have more requests than run."""
    seen: dict[str, list[completions.TimedCompletion]] = {HEAVY: [], LIGHT: []}

    async def client(name: str, number: int) -> None:
        target = completions.Endpoint(server.port, name, EXTRA)
        for text in prompts(200, size.length.num_prompt, seed + number):
            seen[name].append(completions.TimedCompletion())
            await completions.complete(target, text, size.length, seen[name][-1])

    tasks = [
        asyncio.create_task(client(name, number + place * CLIENTS_EACH))
        for place, name in enumerate(seen)
        for number in range(CLIENTS_EACH)
    ]
    await asyncio.sleep(size.seconds / 4)
    start = time.perf_counter()
    await asyncio.sleep(size.seconds * 3 / 4)
    end = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    raw: dict[str, Any] = {
        name: sum(start <= moment <= end for answer in answers for moment in answer.events)
        for name, answers in seen.items()
    }
    errors = [answer.error for answers in seen.values() for answer in answers if answer.error]
    return raw, "; ".join(errors[:3])


def others_wait(raw: Raw) -> float:
    """99th percentile of the other adapters' time to first token during the flood, over that without."""
    return percentile(raw["flood"]["first_token_s"], 99) / percentile(raw["calm"]["first_token_s"], 99)


def heavy_share(raw: Raw) -> float:
    return float(raw[HEAVY] / raw[LIGHT])


def off_weight(raw: Raw) -> float:
    """How far the ratio of tokens is from that of the weights."""
    return abs(heavy_share(raw) - WEIGHT)
