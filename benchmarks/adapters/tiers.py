"""The time to first token of a request whose adapter is in a slot, in host memory, or on disk, on an idle server.

One request at a time with a prompt of 256 tokens. An adapter is evicted from its slot by others, and from memory by
the operator, who unloads it; its served file is then dropped from the system's cache. What lies below that, such as the
host of a virtual machine, may still hold it. The disk's rate is measured in the same way afterwards. The server's own
counters confirm the tier that each request met.
"""

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import adapted, completions
from benchmarks.models.prompts import prompts

ROUNDS = 8
TIMES = 6
"""Requests per tier and round."""
SLOTS = 2
NAMES = tuple(f"attention-{i}" for i in range(SLOTS + 1))
SEED = 37_000


@dataclass(frozen=True)
class TiersSize:
    """How much is asked."""

    rounds: int = ROUNDS
    times: int = TIMES
    num_prompt: int = 256


QUICK = TiersSize(1, 2, 32)


def measure(base: adapted.AdaptedBase | None = None, size: TiersSize | None = None) -> Cases:
    """One case per round; the tiers take turns inside of it."""
    from benchmarks.models import adapter_files  # torch

    base, size = base or adapted.full(), size or TiersSize()
    adapter_files.make(base.model, base.root, list(NAMES))
    with adapted.serving("tiers", base, "--max-active-adapters", str(SLOTS)) as server:
        uvloop.run(_round(server.port, base, TiersSize(1, 1, size.num_prompt), SEED))
        for number in range(size.rounds):
            raw, error = uvloop.run(_round(server.port, base, size, SEED + 1 + number))
            yield Case(f"round {number}", raw, error)


async def _round(port: int, base: adapted.AdaptedBase, size: TiersSize, seed: int) -> tuple[dict[str, Any], str]:
    """Time to first token by tier; an error if the adapter was in another tier."""
    texts = iter(prompts((4 + SLOTS) * size.times + 1, size.num_prompt, seed))
    raw: dict[str, Any] = {"resident": [], "host": [], "disk": [], "disk_mb_per_s": []}
    wrong: list[str] = []
    first, *others = NAMES

    async def ask(name: str) -> float:
        target = completions.Endpoint(port, name, {"ignore_eos_token": True})
        answer = await completions.complete(target, next(texts), completions.RequestLength(size.num_prompt, 1))
        if answer.error:
            wrong.append(answer.error)
        return answer.first_token_s if answer.events else 0.0

    async def timed(place: str, tier: str) -> None:
        first_samples = adapted.samples(port)
        raw[place].append(round(await ask(first), 4))
        last_samples = adapted.samples(port)
        hits = f'lorikeet_adapter_hits_total{{tier="{tier}"}}'
        if last_samples.get(hits, 0) != first_samples.get(hits, 0) + 1:
            wrong.append(f"{place}: the adapter was not {tier}")
        loads = 'lorikeet_adapter_loads_total{tier="disk"}'
        if last_samples.get(loads, 0) - first_samples.get(loads, 0) != (place == "disk"):
            wrong.append(
                f"{place}: the loader was asked {last_samples.get(loads, 0) - first_samples.get(loads, 0)} times"
            )

    await ask(first)
    for _ in range(size.times):
        await timed("resident", "slot")
        for name in others:
            await ask(name)  # they take all slots
        await timed("host", "host")
        for digest in (await adapted.admin(port, "unload", adapter_id=first)).json["unloaded"]:
            for path in base.store.rglob(f"{digest}.safetensors"):
                uncache(path)
                served = path
        await timed("disk", "disk")
        raw["disk_mb_per_s"].append(round(_read_rate(served) / 1e6, 1))
    return raw, "; ".join(wrong[:3])


def uncache(path: Path) -> None:
    """Drop a file from the system's cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_rate(path: Path) -> float:
    """Bytes per second at which the file is read while the system's cache does not hold it."""
    uncache(path)
    start = time.monotonic()
    num_bytes = len(path.read_bytes())
    return num_bytes / (time.monotonic() - start)


def disk_over_host(raw: Raw) -> float:
    return float(statistics.median(raw["disk"]) / statistics.median(raw["host"]))


def over_resident(place: str, raw: Raw) -> float:
    return float(statistics.median(raw[place]) / statistics.median(raw["resident"]))
