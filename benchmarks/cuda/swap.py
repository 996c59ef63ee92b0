"""The effect of a hot swap on running requests and on the one that waits for it: an adapter is copied from host memory
into a slot during the steps of a batch. The same request comes in turn with a resident adapter and with one that is
not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from benchmarks.evidence.figure import Raw
from tests.shard.engine.harness import EngineHarness, EngineRequest, Run

QUIET = 8
"""Steps between two requests, that nothing happens in."""
CYCLE = 6
"""Adapters that are asked for in turn, so that none of them is in a slot when it is asked for."""


@dataclass(frozen=True)
class Met:
    """A request that came while a batch ran."""

    asked_at: float
    first_at: float


def run_round(engine: EngineHarness, batch: Sequence[EngineRequest], spare: Sequence[str], swaps: int) -> Raw:
    running = engine.submit(batch)
    while not all(run.steps for run in running):
        engine.turn()
    met: dict[str, list[Met]] = {"resident": [], "missing": []}
    for number in range(swaps):
        digests = {"resident": batch[number % len(batch)].adapter_digest, "missing": spare[number % len(spare)]}
        for kind, digest in digests.items():
            met[kind].append(_meet(engine, EngineRequest(list(batch[0].prompt_ids), 1, adapter_digest=digest)))
    if any(len(run.token_ids) == run.wanted.num_tokens for run in running):
        raise RuntimeError("the batch ended before the last adapter had come")
    times = [gave.at for gave in running[0].steps]
    engine.finish()
    return summary(times, met)


def _meet(engine: EngineHarness, wanted: EngineRequest) -> Met:
    for _ in range(QUIET):
        engine.turn()
    run: Run = engine.submit([wanted])[0]
    while not run.steps:
        engine.turn()
    return Met(run.asked_at, run.steps[0].at)


def summary(times: Sequence[float], met: dict[str, list[Met]]) -> dict[str, object]:
    """The raw values of a round. times: when each step of the batch was known.

    A step is during a copy if it ended between a request and its first token, except the step that computed the
    request's own prompt, the last of these. Quiet steps ended in as long a time before the request.
    """
    steps = list(pairwise(times))
    during, quiet = [], []
    for each in met["missing"]:
        during_copy = [end - start for start, end in steps if each.asked_at < end < each.first_at]
        if during_copy:
            before = [end - start for start, end in steps if end <= each.asked_at]
            during.append(max(during_copy))
            quiet.append(max(before[-len(during_copy) :]))
    return {
        "steps": [end - start for start, end in steps],
        "during": during,
        "quiet": quiet,
        **{kind: [each.first_at - each.asked_at for each in found] for kind, found in met.items()},
    }


def lengthening(raw: Raw) -> float:
    """The longest step during a copy over the longest of as many quiet ones, at the median over copies."""
    return median(raw["during"]) / median(raw["quiet"]) if raw["during"] else 1.0


def longest(raw: Raw) -> float:
    """The longest step during any copy over a usual one."""
    return max(raw["during"]) / median(raw["steps"]) if raw["during"] else 1.0


def later_ms(raw: Raw) -> float:
    """How much later the first token comes, in milliseconds."""
    return 1e3 * (median(raw["missing"]) - median(raw["resident"]))
