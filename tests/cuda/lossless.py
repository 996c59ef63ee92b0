"""Speculation changes no text on the device: the embedded model in one engine in float32, with every method and width.

Every text is generated without speculation first, with the two best tokens of each position, so that one that differs
at a tie is recognised. Half of the requests are sampled; their ties are unknown, so they are counted separately.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cuda.engines import configured, room
from benchmarks.cuda.setup import Setup
from benchmarks.evidence.figure import Case, Cases, Raw
from lorikeet.proto.params import Method, SamplingParams, Speculation
from lorikeet.shard.model import load_model
from lorikeet.shard.startup.draft_model import load_draft_model
from tests.oracles import family
from tests.oracles.family import BASE, DRAFT, FAMILY
from tests.shard.engine.adapter_exactness import lay_out
from tests.shard.engine.harness import EngineHarness, EngineRequest, Run

TIE = 1e-3
"""Difference of the oracle's two best logits that counts as a tie: the device adds up in another order."""
METHODS = (Method.LOOKUP, Method.MEDUSA, Method.DRAFT)
WIDTHS = (1, 3, 5, 10)
NUM_HEADS = 3
NUM_PROMPTS, NUM_TOKENS = 64, 64
SAMPLED = SamplingParams(do_sample=True, temperature=0.9, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.2)


def ways(setup: Setup) -> dict[str, Speculation]:
    """By name; heads are three at most, so wider ones draft no more."""
    widths = (3,) if setup.is_smoke else WIDTHS
    return {
        f"{method} {width}": Speculation(method, width, min(width, NUM_HEADS))
        for method in METHODS
        for width in widths
        if method is not Method.MEDUSA or width <= NUM_HEADS
    }


def measure(setup: Setup) -> Cases:
    """One case per method and width: all requests at once, against the texts without speculation."""
    count, length = (6, 16) if setup.is_smoke else (NUM_PROMPTS, NUM_TOKENS)
    prompts = family.encode(family.prompts("code", count))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digest = lay_out(BASE, folder, {"heads": FAMILY / "heads" / "base"})["heads"]
        longest = max(map(len, prompts)) + length + 2 * max(WIDTHS)
        own = {"max_total_tokens": longest, "dtype": "float32", "speculation_max_batch_size": count}
        settings = {**room(setup, count, longest), **own}
        config = configured(
            setup, BASE, **settings, adapter_store=str(folder), draft_model=str(DRAFT), draft_dtype="float32"
        )
        model = load_model(config)
        engine = EngineHarness(config, model, load_draft_model(config, model))
        asked = [
            EngineRequest(
                ids, length, sampling=replace(SAMPLED, seed=at) if at % 2 else SamplingParams(), alternatives=2
            )
            for at, ids in enumerate(prompts)
        ]
        plain = engine.run(asked)
        for way, how in ways(setup).items():
            heads = digest if how.takes_heads else ""
            runs = engine.run([replace(each, speculation=how, heads_digest=heads) for each in asked])
            yield _case(way, plain, runs)


def _case(way: str, plain: Sequence[Run], runs: Sequence[Run]) -> Case:
    answers: dict[str, int] = {"changed": 0, "ties": 0, "sampled": 0, "sampled_changed": 0}
    for without, run in zip(plain, runs, strict=True):
        is_sampled = without.wanted.sampling.do_sample
        answers["sampled"] += is_sampled
        if without.token_ids == run.token_ids:
            continue
        if is_sampled:
            answers["sampled_changed"] += 1
        else:
            answers["ties" if _is_tie(without, run) else "changed"] += 1
    answers["accepted"] = sum(gave.num_accepted for run in runs for gave in run.steps)
    answers["tokens"] = sum(len(run.token_ids) for run in runs)
    return Case(way, answers, "" if answers["accepted"] else "no draft was accepted, so nothing was shown")


def _is_tie(without: Run, run: Run) -> bool:
    """Whether the first tokens that differ were as good as equally likely."""
    pairs = zip(without.token_ids, run.token_ids, strict=True)
    place = next(at for at, (a, b) in enumerate(pairs) if a != b)
    best = [logprob for gave in without.steps for logprob in gave.alternatives][2 * place : 2 * place + 2]
    return best[0] - best[1] < TIE


def share_of_sampled(raw: Raw) -> float:
    """Share of the sampled texts that speculation has changed."""
    return float(raw["sampled_changed"] / raw["sampled"])
