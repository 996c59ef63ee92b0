"""What grammars cost on one server of the 200 M Llama: steps with eight constrained requests, the first token of a
request with a schema that was not seen before, and other requests next to schemas that use up their compile limit.

Ways take turns within a round, each first in turn. Prompts, schemas and lengths come from a seed.
"""

import asyncio
import contextlib
import itertools
import os
import statistics
from collections.abc import Iterator
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Cases, Raw, percentile
from benchmarks.load import adapted, completions
from benchmarks.load.rounds import LENGTH, in_turn
from benchmarks.models.prompts import prompts

ROUNDS = 8
CLIENTS = 8
REQUESTS = 3
"""Requests of each client and round; eight clients send constrained requests."""
TIMES = 24
"""First tokens per way and round."""
FIRST_PROMPT = 300
STREAMS, STREAM = 4, completions.RequestLength(32, 512)
"""Next to schemas that use up their limit: streams at once, and the tokens of each."""
SEED = 61_000
PLAIN, CONSTRAINED = "plain", "constrained"
CALM, HOSTILE = "calm", "hostile"


def schema(number: int) -> dict[str, Any]:
    """An object whose list has more items than any output has tokens; each number gives another schema."""
    names = ("name", "kind", "tags", "owner", "note", "place")
    properties: dict[str, Any] = {f"{name}{number}": {"type": "string", "maxLength": 12} for name in names}
    properties |= {"size": {"type": "integer", "minimum": number}, "state": {"enum": ["open", "closed", f"s{number}"]}}
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    rows = {"type": "array", "items": item, "minItems": 500, "maxItems": 500}
    return {"type": "object", "properties": {"rows": rows}, "required": ["rows"], "additionalProperties": False}


def endless(number: int) -> dict[str, Any]:
    """A schema whose check uses up its processor time; each number gives another one."""
    return {"allOf": [{"type": "string", "pattern": f"a{{{length}}}"} for length in range(number, number + 300)]}


def following(number: int) -> dict[str, Any]:
    """The fields of a request whose output follows the schema of that number, one token per step."""
    return {"response_format": {"type": "json_object", "schema": schema(number)}, "speculative_tokens": 0}


def steps() -> Cases:
    """One case per round: median pause between tokens of eight plain and of eight constrained requests. Most pauses are
    steps in which all eight get a token; a mean would also count the prompts of requests that begin later.
    """
    base = adapted.full()
    with adapted.serving("grammar-steps", base) as server:
        for number in range(-1, ROUNDS):
            raw, errors = _raw(), list[str]()
            for way in in_turn((PLAIN, CONSTRAINED), number):
                answers = uvloop.run(_closed(server.port, base, SEED + number + 1, way))
                errors += [answer.error for answer in answers if answer.error]
                pauses = [pause for answer in answers if not answer.error for pause in _pauses(answer)]
                raw[way] = statistics.median(pauses) if pauses else 0.0
            if number >= 0:
                yield Case(f"round {number}", raw, "; ".join(errors[:3]))


def first_tokens() -> Cases:
    """One case per round: times to first token without a schema and with one that the server has never seen."""
    base = adapted.full()
    numbers = itertools.count(1)
    with adapted.serving("grammar-first", base) as server:
        for number in range(-1, ROUNDS):
            raw, errors = _raw() | {PLAIN: [], CONSTRAINED: []}, list[str]()
            texts = iter(prompts(2 * TIMES, FIRST_PROMPT, SEED + number + 1))
            for _ in range(TIMES):
                for way in in_turn((PLAIN, CONSTRAINED), number):
                    extra = {} if way == PLAIN else following(next(numbers))
                    target = completions.Endpoint(server.port, str(base.model), {"ignore_eos_token": True, **extra})
                    length = completions.RequestLength(FIRST_PROMPT, 1)
                    answer = uvloop.run(completions.complete(target, next(texts), length))
                    errors += [answer.error] if answer.error else []
                    raw[way] += [round(answer.first_token_s, 5)] if answer.events else []
            if number >= 0:
                yield Case(f"round {number}", raw, "; ".join(errors[:3]))


def neighbours() -> Cases:
    """One case per round: every pause between tokens of some streams, without and with a caller who sends one endless
    schema after another.
    """
    base = adapted.full()
    numbers = itertools.count(1)
    with adapted.serving("grammar-neighbours", base) as server:
        for number in range(-1, ROUNDS):
            raw, errors = _raw(), list[str]()
            for way in in_turn((CALM, HOSTILE), number):
                hostile = numbers if way == HOSTILE else iter(())
                answers, statuses = uvloop.run(_next_to(server.port, base, SEED + number + 1, hostile))
                errors += [answer.error for answer in answers if answer.error]
                errors += [f"{status} for an endless schema" for status in statuses if status not in (422, 429)]
                raw[way] = [round(pause, 5) for answer in answers for pause in _pauses(answer)]
                raw["schemas"] = max(len(statuses), raw.get("schemas", 0))
            if number >= 0:
                yield Case(f"round {number}", raw, "; ".join(errors[:3]))


async def _closed(port: int, base: adapted.AdaptedBase, seed: int, way: str) -> list[completions.TimedCompletion]:
    texts = prompts(CLIENTS * REQUESTS, LENGTH.num_prompt, seed)

    async def client(index: int) -> list[completions.TimedCompletion]:
        extra = {} if way == PLAIN else following(index)
        target = completions.Endpoint(port, str(base.model), {"ignore_eos_token": True, **extra})
        mine = texts[index * REQUESTS : (index + 1) * REQUESTS]
        return [await completions.complete(target, text, LENGTH) for text in mine]

    return [answer for answers in await asyncio.gather(*map(client, range(CLIENTS))) for answer in answers]


async def _next_to(
    port: int, base: adapted.AdaptedBase, seed: int, hostile: Iterator[int]
) -> tuple[list[completions.TimedCompletion], list[int]]:
    """What the streams saw, and how the endless schemas were answered."""
    statuses: list[int] = []

    async def attack() -> None:
        for number in hostile:
            body = {
                "inputs": "x",
                "parameters": {"response_format": {"type": "json_object", "schema": endless(number)}},
            }
            statuses.append((await adapted.send(port, "/generate", body)).status)

    attacking = asyncio.create_task(attack())
    target = completions.Endpoint(port, str(base.model), {"ignore_eos_token": True})
    texts = prompts(STREAMS, STREAM.num_prompt, seed)
    answers = await asyncio.gather(*(completions.complete(target, text, STREAM) for text in texts))
    attacking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await attacking
    return list(answers), statuses


def _raw() -> dict[str, Any]:
    return {"load_average": os.getloadavg()[0]}


def _pauses(answer: completions.TimedCompletion) -> list[float]:
    return [second - first for first, second in itertools.pairwise(answer.events)]


def over_plain(raw: Raw) -> float:
    """Ratio of the medians of a round."""
    return float(_median(raw[CONSTRAINED]) / _median(raw[PLAIN]))


def _median(value: float | list[float]) -> float:
    return statistics.median(value) if isinstance(value, list) else value


def p99_over_calm(raw: Raw) -> float:
    return percentile(raw[HOSTILE], 99) / percentile(raw[CALM], 99)
