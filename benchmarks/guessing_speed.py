"""What guessing is worth in time: the random 200 M Llama in bfloat16 with a random draft model of a tenth of its
weights, dialled to an acceptance, in the engine of a shard.

A round times single steps (of several tokens, of the draft model) and whole runs with and without drafts by turns, so
that all of its figures are of one state of the machine. Texts are drawn at temperature 1: greedy ones would go round in
circles. Knows seconds and tokens, no bar.

    python -m benchmarks.guessing_speed [--quick] [--schedule CLIENTS | --hopeless CLIENTS]
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.case import Case, Cases, Raw
from lorikeet.shard.scheduler.speculation.types import NO_SPECULATION, Method, Schedule, Speculation

if TYPE_CHECKING:
    from benchmarks.speed_pair import Pair

SEED = 20_260_712
ROUNDS = 8
WIDTH, CHANCE = 4, 0.94
BATCHES = (1, 8)
LOADS = (1, 8, 32)
"""Requests at once under which schedules are compared."""
SCHEDULE_ROUNDS = 16
"""A schedule and a fixed width take their steps at other moments: their ratio varies by more than a percent a round."""
REPEATS: Mapping[int, int] = {1: 8, 8: 3, 32: 3}
"""Runs of each way in such a round, by load: what drafts are right about varies less over many tokens."""
HOPELESS_REPEATS: Mapping[int, int] = {1: 2, 8: 1, 32: 1}
"""The same where no draft is right: steps without drafts vary little."""
SWEEP = (1, 2, 3, 4, 6, 8, 10)
"""Fixed widths among which the best is looked for."""
PROMPT, TEXT = 32, 160
KV_LEN, TURNS = 160, 12
DRAFT_20M = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 4096,
}  # fmt: skip
OFF, DRAFTED = "off", "drafted"
AUTO, FIXED, HOPELESS, LIMITED = "auto", "fixed", "hopeless", "limited"
SETTINGS: dict[str, Any] = {
    "seed": SEED, "rounds": ROUNDS, "width": WIDTH, "chance": CHANCE, "batches": BATCHES, "loads": LOADS,
    "sweep": SWEEP, "schedule_rounds": SCHEDULE_ROUNDS,
    "repeats": {str(load): count for load, count in REPEATS.items()},
    "hopeless_repeats": {str(load): count for load, count in HOPELESS_REPEATS.items()},
    "prompt": PROMPT, "text": TEXT, "kv_len": KV_LEN, "turns": TURNS, "draft": DRAFT_20M,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much is run, by which models."""

    rounds: int = ROUNDS
    schedule_rounds: int = SCHEDULE_ROUNDS
    text: int = TEXT
    turns: int = TURNS
    sweep: tuple[int, ...] = SWEEP
    target: Path | None = None
    """None is the 200 M Llama …"""
    draft: Mapping[str, int] = field(default_factory=lambda: DRAFT_20M)
    dtype: str = "bfloat16"


QUICK = Size(1, 1, 24, 3, (2, 4))
Way = tuple[Speculation, float, str]
"""What requests ask for, the chance of a draft, and the name under which schedules learn."""


def measure(finished: frozenset[str] = frozenset(), size: Size | None = None) -> Cases:
    """One case per round: single steps, then runs with and without drafts, alone and in a batch."""
    size = size or Size()
    wanted = _missing(size.rounds, finished)
    if not wanted:
        return
    from benchmarks.speed_pair import Pair, fixed, steps  # torch

    pair = Pair(size, max(BATCHES))
    for number in (-1, *wanted):
        raw: dict[str, Any] = {"weight_ratio": pair.weight_ratio, "repeated": pair.repeated, **steps(pair, size.turns)}
        for batch in BATCHES:
            for way in (OFF, DRAFTED) if number % 2 else (DRAFTED, OFF):
                raw[f"{way} {batch}"] = pair.run(batch, NO_SPECULATION if way == OFF else fixed(WIDTH))
        if number >= 0:  # the first one warms up
            yield Case(f"round {number}", raw)


def schedules(batch: int, finished: frozenset[str] = frozenset(), size: Size | None = None) -> Cases:
    """One case per round, under one load: schedule auto and the best fixed width by turns, with drafts that are right
    in the same places.
    """
    size = size or Size()
    wanted = _missing(size.schedule_rounds, finished)
    if not wanted:
        return
    from benchmarks.speed_pair import Pair, fixed  # torch

    pair, repeats = Pair(size, batch), REPEATS[batch] if size == Size() else 1
    sweep = _by_turns(pair, batch, {str(width): (fixed(width), CHANCE, "") for width in size.sweep}, 0, max(3, repeats))
    swept = {way: told["tokens_per_second"] for way, told in sweep.items()}
    best = max(size.sweep, key=lambda width: swept[str(width)])
    ways = {AUTO: (_auto(size), CHANCE, AUTO), FIXED: (fixed(best), CHANCE, "")}
    _by_turns(pair, batch, ways, 0, 2)  # lets the schedule learn
    for number in wanted:
        raw = _by_turns(pair, batch, ways, (number + 1) * repeats, repeats)
        yield Case(f"round {number}", {"batch": batch, "best": best, "sweep": swept, **raw})


def hopeless(batch: int, finished: frozenset[str] = frozenset(), size: Size | None = None) -> Cases:
    """One case per round, under one load: schedule auto with drafts that are never accepted, more requests than may
    guess, and no drafts at all, by turns.
    """
    size = size or Size()
    wanted = _missing(size.rounds, finished)
    if not wanted:
        return
    from benchmarks.speed_pair import Pair, fixed  # torch

    pair, repeats = Pair(size, batch, {LIMITED: batch - 1}), HOPELESS_REPEATS[batch] if size == Size() else 1
    ways = {
        HOPELESS: (_auto(size), 0.0, HOPELESS),
        LIMITED: (fixed(WIDTH), CHANCE, LIMITED),
        OFF: (NO_SPECULATION, 0.0, ""),
    }
    _by_turns(pair, batch, ways, 0, 2)  # lets the schedule learn
    for number in wanted:
        yield Case(f"round {number}", {"batch": batch, **_by_turns(pair, batch, ways, (number + 1) * repeats, repeats)})


def _missing(rounds: int, finished: frozenset[str]) -> list[int]:
    return [number for number in range(rounds) if f"round {number}" not in finished]


def _auto(size: Size) -> Speculation:
    return Speculation(Method.DRAFT, max(size.sweep), schedule=Schedule.AUTO)


def _by_turns(pair: "Pair", batch: int, ways: Mapping[str, Way], first: int, count: int) -> dict[str, Raw]:
    """So many runs of each way, each draw of drafts with all of them."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for draw in range(first, first + count):
        turn = draw % len(ways)
        for way in [*list(ways)[turn:], *list(ways)[:turn]]:
            runs[way].append(pair.run(batch, *ways[way], draw))
    return {way: _summed(told) for way, told in runs.items()}


def _summed(runs: Sequence[Raw]) -> dict[str, float]:
    """Of several runs, all tokens over all seconds."""
    total = {name: float(sum(run[name] for run in runs)) for name in runs[0]}
    return {**total, "tokens_per_second": total["tokens"] / total["seconds"]}


def cost(count: int, raw: Raw, batch: int = 1) -> float:
    """v: a step of so many tokens each over one of one token each."""
    return float(raw[f"target {batch} x {count}"] / raw[f"target {batch} x 1"])


def draft_cost(raw: Raw, batch: int = 1) -> float:
    """c: a pass of the draft model over a step of the target."""
    return float(raw[f"draft {batch} x 1"] / raw[f"target {batch} x 1"])


def cost_over_bytes(raw: Raw) -> float:
    """c over the ratio of weights."""
    return draft_cost(raw) / float(raw["weight_ratio"])


def times(batch: int, raw: Raw) -> float:
    """How many times faster with drafts."""
    return float(raw[f"{DRAFTED} {batch}"]["tokens_per_second"] / raw[f"{OFF} {batch}"]["tokens_per_second"])


def efficiency(batch: int, raw: Raw) -> float:
    """η: times faster over τ / (γc + v), all measured in this round."""
    run = raw[f"{DRAFTED} {batch}"]
    return times(batch, raw) / (
        run["tokens"] / run["steps"] / (WIDTH * draft_cost(raw, batch) + cost(WIDTH + 1, raw, batch))
    )


def efficiency_of_bytes(raw: Raw) -> float:
    """η where a step of several tokens cost what one does, and a draft's pass its share of the weights."""
    run = raw[f"{DRAFTED} 1"]
    return times(1, raw) / (run["tokens"] / run["steps"] / (WIDTH * float(raw["weight_ratio"]) + 1))


def rate(way: str, over: str, raw: Raw) -> float:
    """Tokens per second of one way over those of another."""
    return float(raw[way]["tokens_per_second"] / raw[over]["tokens_per_second"])


def repeated(raw: Raw) -> float:
    """ScheduledRequest of the texts' tokens in repeated runs of eight."""
    return float(raw["repeated"])


FIGURES: Mapping[str, Callable[[Raw], float]] = {
    "v(4)": partial(cost, 4),
    "v(8)": partial(cost, 8),
    "c": draft_cost,
    "c over bytes": cost_over_bytes,
    "times alone": partial(times, 1),
    "η alone": partial(efficiency, 1),
    "times of 8": partial(times, 8),
    "η of 8": partial(efficiency, 8),
    "η of bytes": efficiency_of_bytes,
    "repeated": repeated,
}
SCHEDULE_FIGURES: Mapping[str, Callable[[Raw], float]] = {
    "best width": lambda raw: float(raw["best"]),
    "auto over it": partial(rate, AUTO, FIXED),
}
HOPELESS_FIGURES: Mapping[str, Callable[[Raw], float]] = {
    "auto with nothing accepted over off": partial(rate, HOPELESS, OFF),
    "too many to guess over off": partial(rate, LIMITED, OFF),
}


def main() -> None:
    size = QUICK if "--quick" in sys.argv else Size()
    cases, figures = measure(size=size), FIGURES
    if "--schedule" in sys.argv:
        cases, figures = schedules(int(sys.argv[sys.argv.index("--schedule") + 1]), size=size), SCHEDULE_FIGURES
    if "--hopeless" in sys.argv:
        cases, figures = hopeless(int(sys.argv[sys.argv.index("--hopeless") + 1]), size=size), HOPELESS_FIGURES
    print(f"| round | {' | '.join(figures)} |\n|{'---|' * (len(figures) + 1)}")
    told: list[Raw] = []
    for case in cases:
        print(f"| {case.name} | {' | '.join(f'{value(case.raw):.3f}' for value in figures.values())} |", flush=True)
        told.append(case.raw)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
