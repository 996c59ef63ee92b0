"""Target and draft model with a dial in the engine of a shard, timed: whole runs and single passes.

`benchmarks.guessing_speed` says what for.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from benchmarks import peers
from benchmarks.dial import Dial, DialledModel
from benchmarks.guessing_speed import BATCHES, CHANCE, KV_LEN, PROMPT, SEED, WIDTH, Size
from benchmarks.harness import Harness, Run, Wanted, random_llama
from benchmarks.replay import Text, share_repeated
from lorikeet.shard.batch.inputs import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.scheduler.request import SamplingParams
from lorikeet.shard.scheduler.speculation.types import NO_SPECULATION, Method, Schedule, Speculation


class Pair:
    """Target, draft model with a dial, an engine over both, and recorded texts."""

    def __init__(self, size: Size, num_texts: int, limits: Mapping[str, int] | None = None) -> None:
        """`limits` says of runs, by name, above how many requests nothing is guessed."""
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
        self._config, self._limits = config, limits or {}
        self._engines = {"": Harness(config, self.model, self.draft)}
        choice = np.random.default_rng(SEED)
        self._prompts = choice.integers(1, self.model.info.vocab_size, (num_texts, PROMPT)).tolist()
        runs = self._engines[""].run([self._wanted(number, NO_SPECULATION) for number in range(num_texts)])
        self.recorded = [[*run.wanted.prompt_ids, *run.token_ids] for run in runs]
        self._num_rounds = 0
        gc.collect()

    @property
    def repeated(self) -> float:
        """ScheduledRequest of the recorded texts' tokens in repeated runs of eight."""
        texts = [Text(tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), self._text) for ids in self.recorded]
        return sum(map(share_repeated, texts)) / len(texts)

    def run(
        self, batch: int, how: Speculation, chance: float = CHANCE, name: str = "", draw: int | None = None
    ) -> dict[str, float]:
        """The first `batch` texts at once, once; speed while all of them ran. Runs of one name learn for themselves
        what guesses are worth, in an engine of their own only where the name has a limit: two are not equally fast.
        Runs of one `draw` have drafts that are right in the same places, else each has its own.
        """
        self._num_rounds += 1
        if name in self._limits and name not in self._engines:  # KV is laid out anew, and nobody has any just now
            own = replace(self._config, speculation_max_batch_size=self._limits[name])
            self._engines[name] = Harness(own, self.model, self.draft)
            gc.collect()
        engine = self._engines.get(name, self._engines[""])
        engine.learn_as(name)
        dial = self.draft.dial = Dial(chance, self.recorded, self._num_rounds if draw is None else draw)
        gc.freeze()  # as a shard does: else what was loaded is gone through now and then, a fifth of a second
        runs = engine.run([self._wanted(number, how) for number in range(batch)], dial.began)
        gc.unfreeze()
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


@torch.inference_mode()
def steps(pair: Pair, turns: int) -> dict[str, float]:
    """Median seconds of single passes by (model, requests, tokens of each), the sorts by turns. The draft model's are
    as many in a row as a step has, each a part of that time: the first one alone finds its weights out of all caches.
    """
    sorts: dict[str, tuple[Model, int, int]] = {
        f"target {batch} x {count}": (pair.model, batch, count) for batch in BATCHES for count in (1, WIDTH + 1)
    }
    sorts |= {f"target 1 x {count}": (pair.model, 1, count) for count in (4, 8)}
    sorts |= {f"draft {batch} x 1": (pair.draft, batch, 1) for batch in BATCHES}
    seconds: dict[str, list[float]] = {name: [] for name in sorts}
    for _ in range(turns):
        for name, (model, batch, count) in sorts.items():
            in_a_row = WIDTH if model is pair.draft else 1
            start = time.perf_counter()
            for _ in range(in_a_row):
                one_pass(model, batch, count)
            seconds[name].append((time.perf_counter() - start) / in_a_row)
    return {name: median(values) for name, values in seconds.items()}


def one_pass(model: Model, batch: int, count: int) -> None:
    """`count` tokens each of so many requests, and their best next tokens."""
    pages = -(-(KV_LEN + count) // model.page_size)
    segments = [Segment(KV_LEN, count, range(i * pages, (i + 1) * pages)) for i in range(batch)]
    rows = list(range(batch * count))
    model.inputs.fill(segments, torch.full((batch * count,), 300), torch.tensor(rows), rows)
    model.forward().argmax(-1)
