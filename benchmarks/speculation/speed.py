"""The speed-up of a draft model: the random 200 M Llama in bfloat16 with a random draft model of a tenth of its weights
and a chosen acceptance probability, in the engine of a shard.

A round times single steps (of several tokens, of the draft model) and whole runs with and without drafts in turn, so
that all of its figures see the same state of the machine. Texts are sampled at temperature 1: greedy ones would repeat
themselves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load.rounds import in_turn, speedup
from benchmarks.speculation.timed_pair import BATCHES, CHANCE, WIDTH, PairSize, TimedPair, fixed, steps
from lorikeet.proto.params import NO_SPECULATION, Method, Schedule, Speculation

ROUNDS, SCHEDULE_ROUNDS = PairSize().rounds, PairSize().schedule_rounds
LOADS = (1, 8, 32)
"""Requests at once under which schedules are compared."""
REPEATS: Mapping[int, int] = {1: 8, 8: 3, 32: 3}
"""Runs of each way in such a round, by load: the share of accepted drafts varies less over many tokens."""
REJECTED_REPEATS: Mapping[int, int] = {1: 2, 8: 1, 32: 1}
"""Runs of each way if no draft is accepted: steps without drafts vary little."""
OFF, DRAFTED = "off", "drafted"
AUTO, FIXED, REJECTED, LIMITED = "auto", "fixed", "rejected", "limited"
QUICK = PairSize(1, 1, 24, 3, (2, 4))
Way = tuple[Speculation, float, str]
"""What requests ask for, the chance of a draft, and the name under which schedules learn."""


def measure(size: PairSize | None = None) -> Cases:
    """One case per round: single steps, then runs with and without drafts, alone and in a batch."""
    size = size or PairSize()
    pair = TimedPair(size, max(BATCHES))
    for number in range(-1, size.rounds):
        raw: dict[str, Any] = {"weight_ratio": pair.weight_ratio, "repeated": pair.repeated, **steps(pair, size.turns)}
        for batch in BATCHES:
            for way in in_turn((DRAFTED, OFF), number):
                raw[f"{way} {batch}"] = pair.run(batch, NO_SPECULATION if way == OFF else fixed(WIDTH))
        if number >= 0:  # the first one warms up
            yield Case(f"round {number}", raw)


def schedules(batch: int, size: PairSize | None = None) -> Cases:
    """One case per round, under one load: schedule auto and the best fixed width by turns, with drafts that are right
    in the same places.
    """
    size = size or PairSize()
    pair, repeats = TimedPair(size, batch), REPEATS[batch] if size == PairSize() else 1
    sweep = _by_turns(pair, batch, {str(width): (fixed(width), CHANCE, "") for width in size.sweep}, 0, max(3, repeats))
    swept = {way: result["tokens_per_second"] for way, result in sweep.items()}
    best = max(size.sweep, key=lambda width: swept[str(width)])
    ways = {AUTO: (_auto(size), CHANCE, AUTO), FIXED: (fixed(best), CHANCE, "")}
    _by_turns(pair, batch, ways, 0, 2)  # lets the schedule learn
    for number in range(size.schedule_rounds):
        raw = _by_turns(pair, batch, ways, (number + 1) * repeats, repeats)
        yield Case(f"round {number}", {"batch": batch, "best": best, "sweep": swept, **raw})


def rejected(batch: int, size: PairSize | None = None) -> Cases:
    """One case per round, under one load: schedule auto with drafts that are never accepted, more requests than may
    speculate, and no drafts at all, in turn.
    """
    size = size or PairSize()
    pair, repeats = TimedPair(size, batch, {LIMITED: batch - 1}), REJECTED_REPEATS[batch] if size == PairSize() else 1
    ways = {
        REJECTED: (_auto(size), 0.0, REJECTED),
        LIMITED: (fixed(WIDTH), CHANCE, LIMITED),
        OFF: (NO_SPECULATION, 0.0, ""),
    }
    _by_turns(pair, batch, ways, 0, 2)  # lets the schedule learn
    for number in range(size.rounds):
        yield Case(f"round {number}", {"batch": batch, **_by_turns(pair, batch, ways, (number + 1) * repeats, repeats)})


def _auto(size: PairSize) -> Speculation:
    return Speculation(Method.DRAFT, max(size.sweep), schedule=Schedule.AUTO)


def _by_turns(pair: TimedPair, batch: int, ways: Mapping[str, Way], first: int, count: int) -> dict[str, Raw]:
    """`count` runs of each way, with the same draws of accepted drafts."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for draw in range(first, first + count):
        for way in in_turn(list(ways), draw):
            runs[way].append(pair.run(batch, *ways[way], draw))
    return {way: _summed(result) for way, result in runs.items()}


def _summed(runs: Sequence[Raw]) -> dict[str, float]:
    """Sums of several runs: all tokens over all seconds."""
    total = {name: float(sum(run[name] for run in runs)) for name in runs[0]}
    return {**total, "tokens_per_second": total["tokens"] / total["seconds"]}


def cost(count: int, raw: Raw, batch: int = 1) -> float:
    """v: a step of `count` tokens each over one of one token each."""
    return float(raw[f"target {batch} x {count}"] / raw[f"target {batch} x 1"])


def draft_cost(raw: Raw, batch: int = 1) -> float:
    """c: a pass of the draft model over a step of the target."""
    return float(raw[f"draft {batch} x 1"] / raw[f"target {batch} x 1"])


def cost_over_bytes(raw: Raw) -> float:
    """c over the ratio of weights."""
    return draft_cost(raw) / float(raw["weight_ratio"])


def times(batch: int, raw: Raw) -> float:
    """The speed-up with drafts."""
    return speedup(f"{DRAFTED} {batch}", f"{OFF} {batch}", raw)


def efficiency(batch: int, raw: Raw) -> float:
    """η: the speed-up over τ / (γc + v), all measured in this round."""
    run = raw[f"{DRAFTED} {batch}"]
    return times(batch, raw) / (
        run["tokens"] / run["steps"] / (WIDTH * draft_cost(raw, batch) + cost(WIDTH + 1, raw, batch))
    )


def efficiency_of_bytes(raw: Raw) -> float:
    """η if a step of several tokens cost as much as one of one token, and a draft's pass its share of the weights."""
    run = raw[f"{DRAFTED} 1"]
    return times(1, raw) / (run["tokens"] / run["steps"] / (WIDTH * float(raw["weight_ratio"]) + 1))


def repeated(raw: Raw) -> float:
    """Share of the texts' tokens in repeated runs of eight."""
    return float(raw["repeated"])
