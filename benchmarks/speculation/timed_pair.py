"""A target and a draft model with a chosen acceptance probability in the engine of a shard, timed: whole runs and
single passes.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.load import peers
from benchmarks.models.random_llama import random_llama
from benchmarks.speculation.synthetic_draft import ForcedAcceptance, ForcedModel
from lorikeet.proto.params import NO_SPECULATION, Method, SamplingParams, Schedule, Speculation
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from tests.oracles.replay import Text, share_repeated
from tests.shard.engine.harness import EngineHarness, EngineRequest, Run

SEED = 20_260_712
WIDTH, CHANCE = 4, 0.94
BATCHES = (1, 8)
SWEEP = (1, 2, 3, 4, 6, 8, 10)
"""Fixed widths among which the best is searched."""
PROMPT, TEXT = 32, 160
KV_LEN, TURNS = 160, 12
DRAFT_20M = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class PairSize:
    """How much is run, with which models."""

    rounds: int = 8
    schedule_rounds: int = 16
    """A schedule and a fixed width take their steps at other moments: their ratio varies by over a percent a round."""
    text: int = TEXT
    turns: int = TURNS
    sweep: tuple[int, ...] = SWEEP
    target: Path | None = None
    """None is the 200 M Llama …"""
    draft: Mapping[str, int] = field(default_factory=lambda: DRAFT_20M)
    dtype: str = "bfloat16"


class TimedPair:
    """Target and draft model, an engine with both, and recorded texts."""

    def __init__(self, size: PairSize, num_texts: int, limits: Mapping[str, int] | None = None) -> None:
        """`limits`: by the name of runs, the number of requests above which nothing is drafted."""
        folder = size.target or peers.model_folder()
        config = ShardConfig(
            "target", str(folder), "unix:/dev/null", dtype=size.dtype, max_total_tokens=1024, max_running=32,
            cpu_memory=2**30, prefix_caching=False,
        )  # fmt: skip
        shape = dict(size.draft)
        draft = random_llama(f"draft-{shape['hidden_size']}", SEED, **shape)
        self.model = load_model(config)
        draft_config = ShardConfig("draft", str(draft), "unix:/dev/null", dtype=size.dtype)
        self.draft = ForcedModel.of(load_model(draft_config))
        self.weight_ratio = self.draft.info.num_parameters / self.model.info.num_parameters
        self._text = size.text
        self._config, self._limits = config, limits or {}
        self._engines = {"": EngineHarness(config, self.model, self.draft)}
        choice = np.random.default_rng(SEED)
        self._prompts = choice.integers(1, self.model.info.vocab_size, (num_texts, PROMPT)).tolist()
        runs = self._engines[""].run([self._wanted(number, NO_SPECULATION) for number in range(num_texts)])
        self.recorded = [[*run.wanted.prompt_ids, *run.token_ids] for run in runs]
        self._num_rounds = 0
        gc.collect()

    @property
    def repeated(self) -> float:
        """Share of the recorded texts' tokens in repeated runs of eight."""
        texts = [Text(tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), self._text) for ids in self.recorded]
        return sum(map(share_repeated, texts)) / len(texts)

    def run(
        self, batch: int, how: Speculation, chance: float = CHANCE, name: str = "", draw: int | None = None
    ) -> dict[str, float]:
        """Generate the first `batch` texts at once; speed while all of them ran. Runs of one name share what schedules
        learn, and have an engine of their own only if the name has a limit, since two engines are not equally fast.
        Runs of one `draw` accept drafts at the same positions.
        """
        self._num_rounds += 1
        if name in self._limits and name not in self._engines:  # KV is allocated anew while no request has any
            limited = replace(self._config, speculation_max_batch_size=self._limits[name])
            self._engines[name] = EngineHarness(limited, self.model, self.draft)
            gc.collect()
        engine = self._engines.get(name, self._engines[""])
        engine.learn_as(name)
        forced = self.draft.forced = ForcedAcceptance(chance, self.recorded, self._num_rounds if draw is None else draw)
        gc.freeze()  # as a shard does: else a collection of what was loaded takes a fifth of a second
        runs = engine.run([self._wanted(number, how) for number in range(batch)], forced.began)
        gc.unfreeze()
        self.draft.forced = None
        for run, ids in zip(runs, self.recorded, strict=False):
            if [*run.wanted.prompt_ids, *run.token_ids] != ids:
                raise RuntimeError("speculation has changed a text")
        return speed_of(runs)

    def _wanted(self, number: int, how: Speculation) -> EngineRequest:
        return EngineRequest(self._prompts[number], self._text, how, SamplingParams(do_sample=True, seed=number))


def speed_of(runs: Sequence[Run]) -> dict[str, float]:
    """Tokens, steps and seconds from the time when each run had its first token to the end of the first run."""
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
def steps(pair: TimedPair, turns: int) -> dict[str, float]:
    """Median seconds of single passes by (model, requests, tokens of each), the kinds in turn. The draft model's are as
    many in a row as a step has, each a part of that time: the first one alone finds its weights out of all caches.
    """
    kinds: dict[str, tuple[Model, int, int]] = {
        f"target {batch} x {count}": (pair.model, batch, count) for batch in BATCHES for count in (1, WIDTH + 1)
    }
    kinds |= {f"target 1 x {count}": (pair.model, 1, count) for count in (4, 8)}
    kinds |= {f"draft {batch} x 1": (pair.draft, batch, 1) for batch in BATCHES}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(turns):
        for name, (model, batch, count) in kinds.items():
            in_a_row = WIDTH if model is pair.draft else 1
            start = time.perf_counter()
            for _ in range(in_a_row):
                one_pass(model, batch, count)
            seconds[name].append((time.perf_counter() - start) / in_a_row)
    return {name: median(values) for name, values in seconds.items()}


def one_pass(model: Model, batch: int, count: int) -> None:
    """`count` tokens each of `batch` requests, and their best next tokens."""
    pages = -(-(KV_LEN + count) // model.page_size)
    segments = [Segment(KV_LEN, count, range(i * pages, (i + 1) * pages)) for i in range(batch)]
    rows = list(range(batch * count))
    model.inputs.fill(segments, torch.full((batch * count,), 300), torch.tensor(rows), rows)
    model.forward().argmax(-1)
