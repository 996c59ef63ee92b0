"""What guessing is worth in time: the random 200 M Llama in bfloat16 with a random draft model of a tenth of its
weights, dialled to an acceptance, in the engine of a shard.

A round times single steps (of several tokens, of the draft model) and whole runs with and without drafts by turns, so
that all of its figures are of one state of the machine. Texts are drawn at temperature 1: greedy ones would go round in
circles. Knows seconds and tokens, no bar.

    python -m benchmarks.guessing_speed [--quick] [--schedule CLIENTS]
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import peers
from benchmarks.case import Case, Cases, Raw
from benchmarks.dialled import Dial, DialledModel
from benchmarks.harness import Harness, Run, Wanted, random_llama
from benchmarks.replay import Text, share_repeated
from shard.batch import Segment
from shard.config import ShardConfig
from shard.model import Model, load_model
from shard.request import NO_SPECULATION, Method, SamplingParams, Schedule, Speculation

SEED = 20_260_712
ROUNDS = 8
WIDTH, CHANCE = 4, 0.94
BATCHES = (1, 8)
LOADS = (1, 8, 32)
"""Requests at once under which schedules are compared."""
SWEEP = (1, 2, 3, 4, 6, 8, 10)
"""Fixed widths among which the best is looked for."""
PROMPT, TEXT = 32, 160
KV_LEN, TURNS = 160, 12
DRAFT_20M = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 4096,
}  # fmt: skip
OFF, DRAFTED = "off", "drafted"
AUTO, FIXED, HOPELESS = "auto", "fixed", "hopeless"
SETTINGS: dict[str, Any] = {
    "seed": SEED, "rounds": ROUNDS, "width": WIDTH, "chance": CHANCE, "batches": BATCHES, "loads": LOADS,
    "sweep": SWEEP, "prompt": PROMPT, "text": TEXT, "kv_len": KV_LEN, "turns": TURNS, "draft": DRAFT_20M,
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much is run, by which models."""

    rounds: int = ROUNDS
    text: int = TEXT
    turns: int = TURNS
    sweep: tuple[int, ...] = SWEEP
    target: Path | None = None
    """None is the 200 M Llama …"""
    draft: Mapping[str, int] = field(default_factory=lambda: DRAFT_20M)
    dtype: str = "bfloat16"


QUICK = Size(1, 24, 3, (2, 4))


class Pair:
    """Target, draft model with a dial, an engine over both, and recorded texts."""

    def __init__(self, size: Size, num_texts: int) -> None:
        folder = size.target or peers.model_folder()
        config = ShardConfig(
            "target", str(folder), "unix:/dev/null", dtype=size.dtype, max_total_tokens=1024, max_running=32,
            cpu_memory=2**30, prefix_caching=False,
        )  # fmt: skip
        shape = dict(size.draft)
        draft = random_llama(f"draft-{shape['hidden_size']}", SEED, **shape)
        self.model = load_model(config)
        own = ShardConfig("draft", str(draft), "unix:/dev/null", dtype=size.dtype)
        self.draft = DialledModel.of(load_model(own))
        self.weight_ratio = self.draft.info.num_parameters / self.model.info.num_parameters
        self._text = size.text
        self._harness = Harness(config, self.model, self.draft)
        choice = np.random.default_rng(SEED)
        self._prompts = choice.integers(1, self.model.info.vocab_size, (num_texts, PROMPT)).tolist()
        runs = self._harness.run([self._wanted(number, NO_SPECULATION) for number in range(num_texts)])
        self.recorded = [[*run.wanted.prompt_ids, *run.token_ids] for run in runs]
        self._num_rounds = 0

    @property
    def repeated(self) -> float:
        """Share of the recorded texts' tokens in repeated runs of eight."""
        texts = [Text(tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), self._text) for ids in self.recorded]
        return sum(map(share_repeated, texts)) / len(texts)

    def run(self, batch: int, how: Speculation, chance: float = CHANCE) -> dict[str, float]:
        """The first `batch` texts at once, once; speed while all of them ran."""
        self._num_rounds += 1
        dial = self.draft.dial = Dial(chance, self.recorded, self._num_rounds)
        runs = self._harness.run([self._wanted(number, how) for number in range(batch)], dial.began)
        self.draft.dial = None
        for run, ids in zip(runs, self.recorded, strict=False):
            if [*run.wanted.prompt_ids, *run.token_ids] != ids:
                raise RuntimeError("guessing has changed a text")
        return speed_of(runs)

    def _wanted(self, number: int, how: Speculation) -> Wanted:
        return Wanted(self._prompts[number], self._text, how, SamplingParams(do_sample=True, seed=number))


def speed_of(runs: Sequence[Run]) -> dict[str, float]:
    """Tokens, steps and seconds between the moment when each had its first token and the first one's end."""
    start, end = max(run.steps[0].at for run in runs), min(run.steps[-1].at for run in runs)
    inside = [gave for run in runs for gave in run.steps if start < gave.at <= end]
    tokens = sum(len(gave.token_ids) for gave in inside)
    return {
        "tokens": tokens,
        "steps": len(inside),
        "drafted": sum(gave.num_drafted for gave in inside),
        "accepted": sum(gave.num_accepted for gave in inside),
        "seconds": end - start,
        "tokens_per_second": tokens / (end - start),
    }


def fixed(width: int) -> Speculation:
    return Speculation(Method.DRAFT, width, schedule=Schedule.CONSTANT)


def measure(finished: frozenset[str] = frozenset(), size: Size | None = None) -> Cases:
    """One case per round: single steps, then runs with and without drafts, alone and in a batch."""
    size = size or Size()
    wanted = [number for number in range(size.rounds) if f"round {number}" not in finished]
    if not wanted:
        return
    pair = Pair(size, max(BATCHES))
    for number in (-1, *wanted):
        raw: dict[str, Any] = {"weight_ratio": pair.weight_ratio, "repeated": pair.repeated, **steps(pair, size.turns)}
        for batch in BATCHES:
            for way in (OFF, DRAFTED) if number % 2 else (DRAFTED, OFF):
                raw[f"{way} {batch}"] = pair.run(batch, NO_SPECULATION if way == OFF else fixed(WIDTH))
        if number >= 0:  # the first one warms up
            yield Case(f"round {number}", raw)


@torch.inference_mode()
def steps(pair: Pair, turns: int) -> dict[str, float]:
    """Median seconds of single passes by (model, requests, tokens of each), the sorts by turns."""
    sorts: dict[str, tuple[Model, int, int]] = {
        f"target {batch} x {count}": (pair.model, batch, count) for batch in BATCHES for count in (1, WIDTH + 1)
    }
    sorts |= {f"target 1 x {count}": (pair.model, 1, count) for count in (4, 8)}
    sorts |= {f"draft {batch} x 1": (pair.draft, batch, 1) for batch in BATCHES}
    seconds: dict[str, list[float]] = {name: [] for name in sorts}
    for _ in range(turns):
        for name, (model, batch, count) in sorts.items():
            start = time.perf_counter()
            _pass(model, batch, count)
            seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def _pass(model: Model, batch: int, count: int) -> None:
    """`count` tokens each of so many requests, and their best next tokens."""
    pages = -(-(KV_LEN + count) // model.page_size)
    segments = [Segment(KV_LEN, count, range(i * pages, (i + 1) * pages)) for i in range(batch)]
    rows = list(range(batch * count))
    model.inputs.fill(segments, torch.full((batch * count,), 300), torch.tensor(rows), rows)
    model.forward().argmax(-1)


def schedules(batch: int, finished: frozenset[str] = frozenset(), size: Size | None = None) -> Cases:
    """One case per round, under one load: schedule auto, the best fixed width, and neither guess nor hope: auto with
    drafts that are never accepted, and no drafts at all.
    """
    size = size or Size()
    wanted = [number for number in range(size.rounds) if f"round {number}" not in finished]
    if not wanted:
        return
    pair = Pair(size, max(LOADS))
    auto = Speculation(Method.DRAFT, max(size.sweep), schedule=Schedule.AUTO)
    found = {width: [pair.run(batch, fixed(width))["tokens_per_second"] for _ in range(3)] for width in size.sweep}
    swept = {str(width): median(rates) for width, rates in found.items()}
    best = max(size.sweep, key=lambda width: swept[str(width)])
    ways = {AUTO: (auto, CHANCE), FIXED: (fixed(best), CHANCE), HOPELESS: (auto, 0.0), OFF: (NO_SPECULATION, 0.0)}
    for number in (-2, -1, *wanted):  # the first two let the schedule learn
        order = list(ways)[number % 4 :] + list(ways)[: number % 4]
        raw = {way: pair.run(batch, *ways[way]) for way in order}
        if number >= 0:
            yield Case(f"round {number}", {"batch": batch, "best": best, "sweep": swept, **raw})


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
    "repeated": lambda raw: float(raw["repeated"]),
}
SCHEDULE_FIGURES: Mapping[str, Callable[[Raw], float]] = {
    "best width": lambda raw: float(raw["best"]),
    "auto over it": partial(rate, AUTO, FIXED),
    "auto with nothing accepted over off": partial(rate, HOPELESS, OFF),
}


def main() -> None:
    size = QUICK if "--quick" in sys.argv else Size()
    cases, figures = measure(size=size), FIGURES
    if "--schedule" in sys.argv:
        cases, figures = schedules(int(sys.argv[sys.argv.index("--schedule") + 1]), size=size), SCHEDULE_FIGURES
    print(f"| round | {' | '.join(figures)} |\n|{'---|' * (len(figures) + 1)}")
    told: list[Raw] = []
    for case in cases:
        print(f"| {case.name} | {' | '.join(f'{value(case.raw):.3f}' for value in figures.values())} |", flush=True)
        told.append(case.raw)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
