"""The first token of a request whose adapter is in a slot, in host memory, or on disk, on an idle server.

One request at a time with a prompt of 256 tokens. An adapter leaves its slot because others take all of them, and
leaves memory because the operator unloads it; its served file is then pushed out of the system's cache where that is
allowed. What each request found is read from the server's own counters.

    python -m benchmarks.adapters_tiers [--quick] [ROUNDS]
"""

import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import adapted, load
from benchmarks.case import Case, Cases, Raw
from benchmarks.prompts import prompts

ROUNDS = 8
TIMES = 6
"""Requests per place and round."""
SLOTS = 2
NAMES = tuple(f"attention-{i}" for i in range(SLOTS + 1))
SEED = 37_000
SETTINGS: dict[str, Any] = {"rounds": ROUNDS, "times": TIMES, "slots": SLOTS, "tokens_in": 256, "seed": SEED}


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    rounds: int = ROUNDS
    times: int = TIMES
    num_prompt: int = 256


QUICK = Size(1, 2, 32)


def measure(
    finished: frozenset[str] = frozenset(), base: adapted.Base | None = None, size: Size | None = None
) -> Cases:
    """One case per round; the places take turns inside of it."""
    from benchmarks import adapter_files  # torch

    base, size = base or adapted.full(), size or Size()
    adapter_files.make(base.model, base.root, list(NAMES))
    with adapted.serving("tiers", base, "--max-active-adapters", str(SLOTS)) as server:
        uvloop.run(_round(server.port, base, Size(1, 1, size.num_prompt), SEED))
        for number in range(size.rounds):
            if f"round {number}" not in finished:
                raw, error = uvloop.run(_round(server.port, base, size, SEED + 1 + number))
                yield Case(f"round {number}", raw, error)


async def _round(port: int, base: adapted.Base, size: Size, seed: int) -> tuple[dict[str, Any], str]:
    """Seconds to the first token by place; an error where the adapter was not where it should have been."""
    texts = iter(prompts((4 + SLOTS) * size.times + 1, size.num_prompt, seed))
    raw: dict[str, Any] = {"resident": [], "host": [], "disk": []}
    wrong: list[str] = []
    first, *others = NAMES

    async def ask(name: str) -> float:
        length = load.Length(size.num_prompt, 1)
        answer = await load.complete(load.Target(port, name, {"ignore_eos_token": True}), next(texts), length)
        if answer.error:
            wrong.append(answer.error)
        return answer.first_token_s if answer.events else 0.0

    async def timed(place: str, tier: str) -> None:
        before = adapted.samples(port)
        raw[place].append(round(await ask(first), 4))
        after = adapted.samples(port)
        hits = f'lorikeet_adapter_hits_total{{tier="{tier}"}}'
        if after.get(hits, 0) != before.get(hits, 0) + 1:
            wrong.append(f"{place}: the adapter was not {tier}")
        loads = 'lorikeet_adapter_loads_total{tier="disk"}'
        if after.get(loads, 0) - before.get(loads, 0) != (place == "disk"):
            wrong.append(f"{place}: the loader was asked {after.get(loads, 0) - before.get(loads, 0)} times")

    await ask(first)
    for _ in range(size.times):
        await timed("resident", "slot")
        for name in others:
            await ask(name)  # they take all slots
        await timed("host", "elsewhere")
        for digest in (await adapted.admin(port, "unload", adapter_id=first)).json["unloaded"]:
            for path in base.store.rglob(f"{digest}.safetensors"):
                _uncache(path)
        await timed("disk", "elsewhere")
    return raw, "; ".join(wrong[:3])


def _uncache(path: Path) -> None:
    """Let the system forget what it has read of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def over_resident(place: str, raw: Raw) -> float:
    return float(statistics.median(raw[place]) / statistics.median(raw["resident"]))


if __name__ == "__main__":
    small = adapted.small() if "--quick" in sys.argv else None
    counts = [int(word) for word in sys.argv[1:] if word.isdigit()]
    for case in measure(base=small, size=QUICK if small else Size(counts[0] if counts else ROUNDS)):
        told = (
            ""
            if case.error
            else ", ".join(f"{place} {over_resident(place, case.raw):.2f}" for place in ("host", "disk"))
        )
        print(f"{case.name}: {told}", json.dumps(case.raw), case.error, flush=True)
