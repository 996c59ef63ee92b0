"""Decoding against the card's floors, and against transformers' own continuous batching of a random model in this
process.
"""

import time
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.cuda import engines, speeds
from benchmarks.cuda.setup import LlamaShape, Setup, Speeds, floors
from benchmarks.evidence.figure import Case, Cases, Raw
from tests.shard.engine.harness import EngineHarness

MEMORY = 0.5
"""Suite of the free memory that its KV may take: it shares the card."""
SMOKE_MEMORY = {"num_blocks": 8, "max_batch_tokens": 64}


class Peer:
    """Its own defaults, but for sharing prefixes, which no two prompts have."""

    def __init__(self, setup: Setup, shape: LlamaShape) -> None:
        self._memory = {"max_memory_percent": MEMORY} if setup.is_cuda else SMOKE_MEMORY
        torch.manual_seed(setup.seed)
        with torch.device(setup.device):
            self._model: Any = AutoModelForCausalLM.from_config(
                LlamaConfig(**shape.config()), dtype=getattr(torch, setup.dtype), attn_implementation="sdpa"
            ).eval()

    def run(self, prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
        """All prompts at once. Raises RuntimeError if a text has another length."""
        generation = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(allow_block_sharing=False, **self._memory)
        start = time.perf_counter()
        outputs = self._model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
        seconds = time.perf_counter() - start
        counts = [len(output.generated_tokens) for output in outputs.values()]
        if counts != [num_tokens] * len(prompts):
            raise RuntimeError(f"transformers generated {counts} tokens")
        tokens = float(sum(counts))
        return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


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


def over_peer(raw: Raw) -> float:
    return float(raw["ours"]["tokens_per_second"] / raw["transformers"]["tokens_per_second"])
