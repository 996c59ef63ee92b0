"""Activated LoRA on the 200 M Llama: the time to its first token after a turn of the base model, next to the base model
and to the same weights as plain LoRA; and the throughput of batches that mix all three.
"""

import os
import statistics
from functools import partial
from typing import Any

import uvloop

from benchmarks.adapters import cost
from benchmarks.evidence.figure import Case, Cases, Raw, in_rounds
from benchmarks.load import adapted, completions
from benchmarks.load.rounds import in_turn
from benchmarks.models.prompts import prompts, words

ROUNDS, MIXED_ROUNDS = 8, 12
TIMES = 3
"""Conversations per round."""
NUM_PROMPT, NUM_OUTPUT = 2048, 16
"""Tokens of the base model's turn."""
NUM_UNCACHED = 16
"""Tokens after it: the invocation, or another text of the same length."""
VOCABULARY = 8192
SEED = 51_000
BASE, ACTIVATED, PLAIN = "base", "alora", "lora"
MIXED, LORA = "mixed", "lora"


MIXED_SIZE = cost.CostSize(MIXED_ROUNDS, 0, 3)


def measure() -> Cases:
    """One case per round: after a turn of the base model, the same conversation goes on in three ways."""
    base = adapted.full()
    _adapters(base, 1)
    with adapted.serving("activated", base) as server:
        model = str(base.model)
        yield from in_rounds(ROUNDS, lambda number: uvloop.run(_round(server.port, model, number)))


def mixed() -> Cases:
    """One case per round: eight clients with only LoRA, and with base model, LoRA and activated LoRA in one batch.

    Both ask the same prompts. Without prefix caching the second way does not find the KV of the first.
    """
    base = adapted.full()
    _adapters(base, cost.CLIENTS)
    plain, activated = ([f"{kind}-{i}" for i in range(cost.CLIENTS)] for kind in (PLAIN, ACTIVATED))
    blend = [(str(base.model), plain[i], activated[i])[i % 3] for i in range(cost.CLIENTS)]
    models = {LORA: ("activated", plain), MIXED: ("activated", blend)}
    with adapted.serving("activated", base, "--prefix-caching", "false") as server:
        ask = partial(cost.run_round, running={"activated": server}, size=MIXED_SIZE, seed=SEED, end=_invocation())
        yield from in_rounds(MIXED_SIZE.rounds, lambda number: ask(number, cost.turned(models, number)))


def _invocation() -> str:
    """Four words, each a token: the last in every prompt of an activated LoRA."""
    return " " + " ".join(words(VOCABULARY)[:4])


def _adapters(base: adapted.AdaptedBase, count: int) -> None:
    """Make adapters with equal weights as LoRA and as activated LoRA."""
    from benchmarks.models import adapter_files  # torch

    ids = adapter_files.token_ids(base.model, _invocation())
    adapter_files.make(base.model, base.root, [f"{PLAIN}-{i}" for i in range(count)])
    adapter_files.make(base.model, base.root, [f"{ACTIVATED}-{i}" for i in range(count)], invocation_ids=ids)


async def _round(port: int, model: str, number: int) -> Case:
    """Times to the first token."""
    raw: dict[str, Any] = {BASE: [], ACTIVATED: [], PLAIN: [], "load_average": os.getloadavg()[0]}
    texts = prompts(TIMES, NUM_PROMPT, SEED + 1 + number, VOCABULARY)
    other = " " + " ".join(words(VOCABULARY)[100 : 100 + NUM_UNCACHED])
    filler = " " + " ".join(words(VOCABULARY)[200 : 200 + NUM_UNCACHED - 4])
    for place, text in enumerate(texts):
        reply = await adapted.generate(port, text, model, NUM_OUTPUT, return_full_text=True)
        turn = reply.json["generated_text"]
        ways = {BASE: (model, other), ACTIVATED: (f"{ACTIVATED}-0", filler + _invocation())}
        ways[PLAIN] = (f"{PLAIN}-0", filler + _invocation())
        for way in in_turn(list(ways), number + place):
            name, end = ways[way]
            seconds, cached, error = await _first_token(port, name, turn + end)
            if error or (cached >= NUM_PROMPT - 64) != (way != PLAIN):
                return Case(f"round {number}", raw, error or f"{way}: {cached} tokens were cached")
            raw[way].append(round(seconds, 5))
    return Case(f"round {number}", raw)


async def _first_token(port: int, name: str, prompt: str) -> tuple[float, int, str]:
    """Seconds, cached tokens of the prompt by the server's counter, and an error."""
    num_before = adapted.samples(port).get("lorikeet_cached_prompt_tokens_total", 0)
    target = completions.Endpoint(port, name, {"ignore_eos_token": True, "temperature": 0})
    answer = await completions.complete(target, prompt, completions.RequestLength(0, 1))
    cached = adapted.samples(port).get("lorikeet_cached_prompt_tokens_total", 0) - num_before
    error = "" if answer.num_output == 1 else answer.error
    return (answer.first_token_s if answer.events else 0.0), int(cached), error


def ratio(of: str, over: str, raw: Raw) -> float:
    """Median time to the first token of one way over that of another."""
    return float(statistics.median(raw[of]) / statistics.median(raw[over]))
