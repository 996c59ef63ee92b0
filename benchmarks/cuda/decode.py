"""Decoding against the card's floors, and against transformers' own continuous batching of a random model in this
process; larger loads, long contexts, top-p, and requests with drafts that arrive one by one.
"""

import time
from dataclasses import asdict, replace

import torch
from transformers import LlamaConfig

from benchmarks.cuda import engines, speeds
from benchmarks.cuda.setup import LlamaShape, Setup, Speeds, floors
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load.rounds import in_turn
from benchmarks.serving.transformers_peer import generated
from lorikeet.proto.params import Method, SamplingParams, Speculation
from tests.shard.engine.harness import EngineHarness, EngineRequest

MEMORY = 0.5
"""Share of the free memory that its KV may take: it shares the card."""
GREEDY, NUCLEUS = "greedy", "top-p"
SAMPLING = SamplingParams(do_sample=True, temperature=0.8, top_p=0.9)
LAGS = (0, 1)
SMOKE_MEMORY = {"num_blocks": 8, "max_batch_tokens": 64}


class Peer:
    """A random model in transformers."""

    def __init__(self, setup: Setup, shape: LlamaShape) -> None:
        self._memory = {"max_memory_percent": MEMORY} if setup.is_cuda else SMOKE_MEMORY
        config, dtype = LlamaConfig(**shape.config()), getattr(torch, setup.dtype)
        self._model = engines.random_network(config, dtype, setup.device, setup.seed, attention="sdpa")

    def run(self, prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
        """All prompts at once. Raises RuntimeError if a text has another length."""
        counts, seconds = generated(self._model, prompts, num_tokens, **self._memory)
        if counts != [num_tokens] * len(prompts):
            raise RuntimeError(f"transformers generated {counts} tokens")
        return engines.speed(sum(counts), seconds)


def batches(setup: Setup) -> tuple[int, ...]:
    return 1, setup.requests


def measure(setup: Setup) -> Cases:
    """One case per round: what a step takes alone and in a full batch, and the least that it could."""
    shape = setup.large
    ours = engines.usual(setup)
    for batch in batches(setup):
        ours.run(engines.wanted(setup, shape, batch))  # warms up
    for number in range(setup.rounds):
        found = speeds.measured(setup)
        raw = {f"batch {batch}": _step(setup, ours, batch, found) for batch in batches(setup)}
        yield Case(f"round {number}", {**asdict(found), **raw})


def _step(setup: Setup, ours: EngineHarness, batch: int, found: Speeds) -> Raw:
    result = engines.steadily(ours, engines.wanted(setup, setup.large, batch))
    num_kv_tokens = batch * (setup.prompt + setup.text / 2)
    by_bandwidth, by_products = floors(setup.large, batch, num_kv_tokens, found)
    return {**result, "kv_tokens": num_kv_tokens, "by_bandwidth": by_bandwidth, "by_products": by_products}


def share_of_floor(batch: int, raw: Raw) -> float:
    """The larger floor over what a step took."""
    result = raw[f"batch {batch}"]
    return float(max(result["by_bandwidth"], result["by_products"]) / result["seconds"])


def milliseconds(batch: int, raw: Raw) -> float:
    return 1e3 * float(raw[f"batch {batch}"]["seconds"])


def against_peer(setup: Setup) -> Cases:
    """One case per round: as many requests at once through us and through transformers, prompts included."""
    shape = setup.large
    ours, theirs = engines.usual(setup), Peer(setup, shape)
    wanted = engines.wanted(setup, shape, setup.requests)
    ids = [list(each.prompt_ids) for each in wanted]
    ours.run(wanted)
    theirs.run(ids[:2], setup.text)
    for number in range(setup.long_rounds):
        result = {"ours": engines.total(ours.run(wanted)), "transformers": theirs.run(ids, setup.text)}
        yield Case(f"round {number}", result)


def full_loads(setup: Setup) -> Cases:
    """One case per round: a step of each full load, and of the usual batch with top-p in place of the arg max."""
    most = max(*setup.full_loads, setup.requests)
    ours = engines.engine(setup, setup.large, most, setup.prompt + setup.text)
    ours.run(engines.wanted(setup, setup.large, most))  # warms up
    for number in range(setup.long_rounds):
        raw: dict[str, object] = {}
        for load in in_turn([str(load) for load in setup.full_loads], number):
            raw[f"batch {load}"] = engines.steadily(ours, engines.wanted(setup, setup.large, int(load)))
        for way in in_turn([GREEDY, NUCLEUS], number):
            wanted = engines.wanted(setup, setup.large, setup.requests)
            if way == NUCLEUS:
                wanted = [replace(each, sampling=replace(SAMPLING, seed=at)) for at, each in enumerate(wanted)]
            raw[way] = engines.steadily(ours, wanted)
        yield Case(f"round {number}", raw)


def long_contexts(setup: Setup) -> Cases:
    """One case per load: a step of requests whose prompts are as long as the longest context."""
    context, shape = max(setup.contexts), setup.large
    longest = replace(setup, longest=context + setup.text)
    ours = engines.engine(longest, shape, max(setup.long_loads), context + setup.text)
    for load in setup.long_loads:
        prompts = engines.prompts(setup, shape, load, context, seed=load)
        result = engines.steadily(ours, [EngineRequest(ids, setup.text) for ids in prompts])
        yield Case(f"{load} at once", {"load": load, **result})


def staggered(setup: Setup) -> Cases:
    """One case per round: requests with prompt lookup that arrive some steps apart, with commit lag 0 and 1."""
    made = {f"lag {lag}": engines.full(setup, commit_lag=lag) for lag in LAGS}
    for harness in made.values():
        _arrive(setup, harness, -1)
    for number in range(setup.long_rounds):
        yield Case(f"round {number}", {way: _arrive(setup, made[way], number) for way in in_turn(list(made), number)})


def _arrive(setup: Setup, harness: EngineHarness, number: int) -> dict[str, float]:
    """Prompts that repeat themselves, so that drafts are found."""
    count = min(8, setup.requests)
    speculation = Speculation(Method.LOOKUP, setup.width)
    start = time.perf_counter()
    runs = []
    for ids in engines.prompts(setup, setup.large, count, setup.prompt // 2, seed=number + 7):
        runs += harness.submit([EngineRequest([*ids, *ids], setup.text, speculation)])
        for _ in range(3):
            harness.turn()
    harness.finish()
    return engines.speed(sum(len(run.token_ids) for run in runs), time.perf_counter() - start)
