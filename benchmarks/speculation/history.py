"""Tokens per step of history drafts over prompt lookup, on requests of the embedded model's adapters that repeat
earlier ones: all of them, half of them, or none. The counts are the server's own, of one client and texts with a seed,
so that they do not depend on time. Another suite times requests that repeat nothing, with history and without.
"""

import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import servers
from benchmarks.load.rounds import in_turn
from tests.oracles import family
from tests.oracles.family import KINDS, LOOKUP, DraftOptions, TextRequest

WIDTH = 6
TASKS = ("record", "query", "value")
TEMPERATURES = (0.0, 0.7)
ON, OFF = "on", "off"
ALL, HALF, NONE = "all", "half", "none"
REPEATS: Mapping[str, float] = {ALL: 1.0, HALF: 0.5, NONE: 0.0}
"""The part of the counted requests whose prompt was sent before."""
ROUNDS = 8
REQUESTS, TIMED = 240, 48
"""Requests that are counted, and requests of a round that is timed."""
MAX_TOKENS = 96


def command() -> servers.Command:
    return family.command("--speculation-max-batch-size", "64", draft=None)


def measure(workload: str) -> Cases:
    """One case per temperature: tokens and steps with only lookup, and with lookup and history."""
    earlier, counted = _workload(REQUESTS, REPEATS[workload])
    with servers.running("history", command()) as server:
        for temperature in TEMPERATURES:
            raw: dict[str, Any] = {"requests": len(counted)}
            for way in (OFF, ON):
                salt = f"{temperature} {way}"
                _run(server.port, _asked(earlier, temperature, way, salt, first_seed=1_000_000))
                raw[way] = _run(server.port, _asked(counted, temperature, way, salt))
            error = "" if raw[ON].pop("texts") == raw[OFF].pop("texts") else "the texts differ"
            yield Case(f"temperature {temperature:g}", raw, error)


def unrelated() -> Cases:
    """One case per round: requests without a common text, with history and without, each first in turn."""
    prompts = _prompts(2 * TIMED * (ROUNDS + 1))
    with servers.running("history", command()) as server:
        for number in range(-1, ROUNDS):
            raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
            for place, way in enumerate(in_turn((OFF, ON), number)):
                first = (2 * (number + 1) + place) * TIMED
                result = _run(server.port, _asked(prompts[first : first + TIMED], 0.0, way, ""))
                raw[way] = {"tokens_per_second": result["tokens"] / result["seconds"]}
            if number >= 0:
                yield Case(f"round {number}", raw)


def gain(raw: Raw) -> float:
    """Tokens per step with history over those with only lookup. The texts are the same."""
    return float(raw[OFF]["steps"] / raw[ON]["steps"])


def _workload(count: int, share: float) -> tuple[list[TextRequest], list[TextRequest]]:
    """Requests that were sent before, and those that are counted."""
    prompts = _prompts(count)
    num_repeated = round(share * count)
    earlier = prompts[:num_repeated]
    others = iter(prompts[num_repeated:])
    repeated = iter(earlier)
    kinds = itertools.cycle([share > 0, share == 1.0]) if share else itertools.repeat(False)
    counted = [next(repeated if is_repeated else others) for is_repeated, _ in zip(kinds, range(count), strict=False)]
    return earlier, counted


def _prompts(count: int) -> list[TextRequest]:
    """Different prompts of the tasks in turn."""
    per_task = -(-count // len(TASKS))
    of_tasks = [
        [TextRequest(prompt, KINDS[task], MAX_TOKENS) for prompt in family.prompts(task, per_task)] for task in TASKS
    ]
    return list(itertools.chain.from_iterable(zip(*of_tasks, strict=True)))[:count]


def _run(port: int, requests: list[tuple[TextRequest, DraftOptions]]) -> dict[str, Any]:
    """One request after another."""
    start = time.monotonic()
    answers = uvloop.run(family.ask_all(port, requests, clients=1))
    seconds = time.monotonic() - start
    faults = [fault for answer in answers for fault in answer.faults()]
    if faults:
        raise RuntimeError("; ".join(faults[:3]))
    return {
        "tokens": sum(answer.counts.tokens for answer in answers),
        "steps": sum(answer.counts.forwards for answer in answers),
        "drafted": sum(answer.counts.drafted for answer in answers),
        "history": sum(answer.report.get("sources", {}).get("history", 0) for answer in answers),
        "seconds": seconds,
        "texts": [answer.text for answer in answers],
    }


def _asked(
    requests: list[TextRequest], temperature: float, way: str, salt: str, first_seed: int = 0
) -> list[tuple[TextRequest, DraftOptions]]:
    """Requests of the tenant `salt`. A prompt that is repeated has another seed."""
    pairs = []
    for number, request in enumerate(requests, first_seed):
        fields: dict[str, Any] = {"speculative_history": way == ON}
        fields |= {"cache_salt": salt} if salt else {}
        fields |= {"temperature": temperature, "do_sample": True, "seed": number} if temperature else {}
        pairs.append((replace(request, distribution=fields), DraftOptions(LOOKUP, WIDTH)))
    return pairs
