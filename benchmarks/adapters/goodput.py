"""The highest request rate of a server whose host memory holds a fifth of its adapters, the rest being on disk, over
the rate of a server that holds them all.

Adapters have ranks 8 to 64, on attention only or on all linear layers in turn. How often requests ask for each follows
a Zipf distribution, gaps between arrivals a gamma distribution. A rate holds if the 99th percentiles of the time to
first token and of the time between tokens do.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.adapters.cost import load
from benchmarks.adapters.tiers import uncache
from benchmarks.evidence.figure import Case, Cases, Raw, percentile
from benchmarks.load import adapted, completions
from benchmarks.load.rounds import EXTRA, OURS
from benchmarks.models.prompts import prompts

COUNT = 1000
RANKS = (8, 8, 8, 8, 16, 16, 16, 32, 32, 64)
ZIPF_EXPONENT = 1.0
VARIATION = 2.0
"""Coefficient of variation of the gaps between arrivals: standard deviation over mean."""
PROMPT_TOKENS, OUTPUT_TOKENS = (64, 256), (16, 64)
RATES = tuple(round(1.5 * 1.03**step, 3) for step in range(63))
"""Requests per second that are tried, by bisection: six probes find the highest good one, to 3 %."""
PROBE_S, WARM_UP_S = 50.0, 60.0
FIRST_TOKEN_S, INTER_TOKEN_S = 2.0, 0.1
LEAST_RATE = 2.0
"""Lowest rate of the server that holds all adapters: below it the run is void."""
HELD_SHARE, KV_BYTES = 0.2, 1 << 30
ROOM = 1.1
"""Host memory of the server that holds all adapters, over the size of their files."""
SEED = 61_000
MISSES = tuple(f'lorikeet_adapter_hits_total{{tier="{tier}"}}' for tier in ("host", "disk", "source"))
"""Requests whose adapter was in no slot."""
RESIDENT, FIFTH = "resident", "fifth"


@dataclass(frozen=True)
class GoodputSize:
    """How much is asked."""

    count: int = COUNT
    rates: Sequence[float] = RATES
    probe_s: float = PROBE_S
    warm_up_s: float = WARM_UP_S
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS
    output_tokens: tuple[int, int] = OUTPUT_TOKENS
    kv_bytes: int = KV_BYTES


QUICK = GoodputSize(12, (4.0, 8.0), 2.0, 1.0, (8, 16), (2, 4), 64 << 20)


def measure(count: int = COUNT, base: adapted.AdaptedBase | None = None, size: GoodputSize | None = None) -> Cases:
    """One case: every probe of both servers, one after the other."""
    base, size = base or adapted.full(), size or GoodputSize(count)
    names, num_bytes = _adapters(base, size.count)
    raw: dict[str, Any] = {"adapter_mb": round(num_bytes / 1e6)}
    errors: list[str] = []
    for name, held in ((RESIDENT, int(ROOM * num_bytes)), (FIFTH, int(HELD_SHARE * num_bytes))):
        memory = ("--cpu-memory", str(size.kv_bytes + held), "--adapter-host-memory", str(held))
        slots = ("--max-active-adapters", str(size.count))
        with adapted.serving(name, base, *memory, *slots) as server:
            uvloop.run(load(server.port, names))
            uvloop.run(_probe(server.port, names, size, size.rates[0], size.warm_up_s, SEED))
            raw[name] = _search(server.port, names, size, base.store, errors)
    yield Case("search", raw, "; ".join(errors[:3]))


def _adapters(base: adapted.AdaptedBase, count: int) -> tuple[list[str], int]:
    """Names, the most popular first, and the bytes of their weights."""
    from benchmarks.models import adapter_files  # torch

    names = [f"mixed-{number}" for number in range(count)]
    for number, name in enumerate(names):
        rank, targets = RANKS[number // 2 % len(RANKS)], (adapter_files.ATTENTION, adapter_files.ALL)[number % 2]
        adapter_files.make(base.model, base.root, [name], targets, rank=rank, seed=SEED + number)
    num_bytes = sum((base.root / name / adapter_files.WEIGHTS).stat().st_size for name in names)
    random.Random(SEED).shuffle(names)  # size does not follow popularity
    return names, num_bytes


def _search(port: int, names: Sequence[str], size: GoodputSize, store: Path, errors: list[str]) -> list[dict[str, Any]]:
    """The probes of one server."""

    def probe(number: int) -> dict[str, Any]:
        for path in store.rglob("*.safetensors"):
            uncache(path)  # other adapters than those in memory are on disk indeed
        first, rate = adapted.samples(port), size.rates[number]
        answers = uvloop.run(_probe(port, names, size, rate, size.probe_s, SEED + 1 + number))
        errors.extend(answer.error for answer in answers if answer.error)
        last = adapted.samples(port)
        num_misses = sum(last.get(name, 0) - first.get(name, 0) for name in MISSES)
        return {"rate": rate, "misses": num_misses, **_summary(answers)}

    return _bisect(len(size.rates), probe, errors)


def _bisect(count: int, probe: Callable[[int], dict[str, Any]], errors: Sequence[str]) -> list[dict[str, Any]]:
    """The probes of a bisection over `count` ascending rates: the first rate that fails is above the highest that
    holds. An error ends it.
    """
    probes: list[dict[str, Any]] = []
    low, high = 0, count
    while low < high and not errors:
        middle = (low + high) // 2
        probes.append(probe(middle))
        low, high = (middle + 1, high) if holds(probes[-1]) else (low, middle)
    return probes


async def _probe(
    port: int, names: Sequence[str], size: GoodputSize, rate: float, seconds: float, seed: int
) -> list[completions.TimedCompletion]:
    """Requests of the given rate on average, whatever the server does; both servers get the same."""
    draw = random.Random(seed)
    weights = [1 / (place + 1) ** ZIPF_EXPONENT for place in range(len(names))]
    shape = 1 / VARIATION**2
    texts = prompts(round(rate * seconds), size.prompt_tokens[1], seed)
    start, offset = time.monotonic(), 0.0
    running: list[asyncio.Task[completions.TimedCompletion]] = []
    for text in texts:
        offset += draw.gammavariate(shape, 1 / (rate * shape))
        [name] = draw.choices(names, weights)
        length = completions.RequestLength(draw.randint(*size.prompt_tokens), draw.randint(*size.output_tokens))
        prompt = " " + " ".join(text.split()[: length.num_prompt])
        await asyncio.sleep(max(0.0, start + offset - time.monotonic()))
        target = completions.Endpoint(port, name, EXTRA[OURS])
        running.append(asyncio.create_task(completions.complete(target, prompt, length)))
    return list(await asyncio.gather(*running))


def _summary(answers: Sequence[completions.TimedCompletion]) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.error]
    if not good:
        raise RuntimeError(f"no request succeeded: {answers[0].error}")
    gaps = [second - first for answer in good for first, second in pairwise(answer.events)]
    firsts = [answer.first_token_s for answer in good]
    return {
        "requests": len(answers),
        "first_token_p99_s": round(percentile(firsts, 99), 4),
        "inter_token_p99_s": round(percentile(gaps, 99), 4),
        "longest_wait_s": round(max(firsts), 4),
    }


def holds(probe: Raw) -> bool:
    return bool(probe["first_token_p99_s"] <= FIRST_TOKEN_S and probe["inter_token_p99_s"] <= INTER_TOKEN_S)


def highest_rate(server: str, raw: Raw) -> float:
    """Requests per second of the best probe that held; 0 if none did."""
    return max((float(probe["rate"]) for probe in raw[server] if holds(probe)), default=0.0)


def share_of_resident(raw: Raw) -> float:
    resident = highest_rate(RESIDENT, raw)
    return highest_rate(FIFTH, raw) / resident if resident else 0.0


def void(raws: Sequence[Raw]) -> str:
    """Why the run says nothing."""
    rates = [highest_rate(RESIDENT, raw) for raw in raws]
    if min(rates) < LEAST_RATE:
        return f"with all adapters in memory {min(rates)} requests/s hold, not {LEAST_RATE}"
    return f"with all adapters in memory the highest rate of {RATES[-1]} holds" if max(rates) >= RATES[-1] else ""
