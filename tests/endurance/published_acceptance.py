"""The published acceptance tables through the engine: LMFlow's tokens per forward and Xinference's share of accepted
drafts, with a draft model whose acceptance probability is theirs (`benchmarks.speculation.synthetic_draft`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.models.random_llama import random_llama
from benchmarks.speculation import published
from benchmarks.speculation.synthetic_draft import ForcedAcceptance, ForcedModel
from lorikeet.proto.params import Method, Schedule, Speculation
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from tests.oracles.replay import iid_tokens_per_step
from tests.shard.engine.harness import EngineHarness, EngineRequest, Run

SEED = 20_260_711
"""Seed of prompts and of what is right; fixed before anything was measured."""
TEXT, PROMPT = 1024, 8
"""Tokens of a text, and of the prompt before it."""
AT_ONCE = 192
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "max_position_embeddings": 2048,
}  # fmt: skip
TOKENS = 1_000_000
"""Tokens of a row of LMFlow's table."""
DRAFTED = 500_000
"""Draft tokens for Xinference's share."""


class Pair:
    """A tiny target, its recorded texts, and a tiny draft model with a chosen acceptance."""

    def __init__(self, num_texts: int, text: int = TEXT) -> None:
        torch.set_num_threads(1)  # matrices so small are not worth a second one
        target = random_llama("accepted-target", SEED, 8.0, **TINY)
        other = random_llama("accepted-draft", SEED + 1, 8.0, **TINY)
        config = ShardConfig(
            "target", str(target), "unix:/dev/null", dtype="float32", max_total_tokens=2048, max_running=AT_ONCE,
            cpu_memory=2**29, prefix_caching=False, speculation_max_batch_size=AT_ONCE,
        )  # fmt: skip
        draft = ShardConfig("draft", str(other), "unix:/dev/null", dtype="float32")
        self.draft = ForcedModel.of(load_model(draft))
        self._harness = EngineHarness(config, load_model(config), self.draft)
        self.text = text
        choice = np.random.default_rng(SEED)
        self._prompts = choice.integers(1, TINY["vocab_size"], (num_texts, PROMPT)).tolist()
        runs = self._harness.run([EngineRequest(prompt, text) for prompt in self._prompts])
        self.recorded = [[*run.wanted.prompt_ids, *run.token_ids] for run in runs]

    def run(self, chance: float, width: int, num_texts: int, round: int) -> list[Run]:
        """`num_texts` texts, the recorded ones repeatedly, with other accepted positions each time."""
        how = Speculation(Method.DRAFT, width, schedule=Schedule.CONSTANT)
        forced = self.draft.forced = ForcedAcceptance(chance, self.recorded, round)
        wanted = [EngineRequest(self._prompts[i % len(self._prompts)], self.text, how) for i in range(num_texts)]
        runs = self._harness.run(wanted, forced.began)
        self.draft.forced = None
        for number, run in enumerate(runs):
            if [*run.wanted.prompt_ids, *run.token_ids] != self.recorded[number % len(self.recorded)]:
                raise RuntimeError(f"text {number} is not the text without speculation")
        return runs


def tally(runs: Sequence[Run], width: int) -> dict[str, int]:
    """Sums over the steps that drafted in full: the last ones of a text have no room for all drafts."""
    full = [gave for run in runs for gave in run.steps if gave.num_drafted == width]
    return {
        "texts": len(runs),
        "tokens": sum(len(gave.token_ids) for gave in full),
        "forwards": len(full),
        "drafted": width * len(full),
        "accepted": sum(gave.num_accepted for gave in full),
        "all_tokens": sum(len(run.token_ids) for run in runs),
        "all_forwards": sum(len(run.steps) for run in runs),
    }


def forwards(pair: Pair, width: int, tokens: int = TOKENS) -> dict[str, int]:
    """One row of LMFlow's table: counts over at least `tokens` tokens."""
    num_texts = -(-tokens // (pair.text - 2 * width - 2))
    return tally(pair.run(published.LMFLOW_CHANCE, width, num_texts, width), width)


def accepted(pair: Pair, drafted: int = DRAFTED) -> dict[str, int]:
    """Xinference's accepted over drafted: counts over at least `drafted` drafts."""
    width, chance = published.XINFERENCE_WIDTH, published.XINFERENCE_CHANCE
    tokens = drafted * iid_tokens_per_step(chance, width) / width
    num_texts = int(1.02 * tokens / (pair.text - 2 * width - 2)) + 1
    return tally(pair.run(chance, width, num_texts, 100), width)


def forwards_error(width: int, counts: dict[str, int]) -> float:
    """Distance of a row's tokens per forward from LMFlow's."""
    return abs(counts["tokens"] / counts["forwards"] - published.LMFLOW_FORWARDS[width])


def accepted_error(counts: dict[str, int]) -> float:
    """Distance of accepted over drafted from Xinference's."""
    return abs(counts["accepted"] / counts["drafted"] - published.XINFERENCE_ACCEPTED)
