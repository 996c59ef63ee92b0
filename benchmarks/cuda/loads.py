"""Engines under larger loads: full batches, long contexts, top-p, and requests with drafts that arrive one by one."""

import time
from dataclasses import replace

from benchmarks.cuda import engines
from benchmarks.cuda.setup import Setup
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load.rounds import in_turn
from lorikeet.shard.scheduler.request import SamplingParams
from lorikeet.shard.scheduler.speculation.types import Method, Speculation
from tests.shard.engine.harness import EngineHarness, EngineRequest

GREEDY, NUCLEUS = "greedy", "top-p"
SAMPLING = SamplingParams(do_sample=True, temperature=0.8, top_p=0.9)
LAGS = (0, 1)


def measure(setup: Setup) -> Cases:
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


def milliseconds(name: str, raw: Raw) -> float:
    return 1e3 * float(raw[name]["seconds"])


def over_greedy(raw: Raw) -> float:
    """A step with top-p over one without."""
    return float(raw[NUCLEUS]["seconds"] / raw[GREEDY]["seconds"])


def long_contexts(setup: Setup) -> Cases:
    """One case per load: a step of requests whose prompts are as long as the longest context."""
    context, shape = max(setup.contexts), setup.large
    longest = replace(setup, longest=context + setup.text)
    ours = engines.engine(longest, shape, max(setup.long_loads), context + setup.text)
    for load in setup.long_loads:
        prompts = engines.prompts(setup, shape, load, context, seed=load)
        result = engines.steadily(ours, [EngineRequest(ids, setup.text) for ids in prompts])
        yield Case(f"{load} at once", {"load": load, **result})


def tokens_per_second(raw: Raw) -> float:
    return float(raw["tokens_per_second"])


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
    seconds = time.perf_counter() - start
    num_tokens = sum(len(run.token_ids) for run in runs)
    return {"tokens": num_tokens, "seconds": seconds, "tokens_per_second": num_tokens / seconds}


def over_lag_0(raw: Raw) -> float:
    """Throughput with lag 1 over that with lag 0."""
    return float(raw["lag 1"]["tokens_per_second"] / raw["lag 0"]["tokens_per_second"])
