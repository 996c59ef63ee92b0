"""transformers' continuous batching of a random model in this process. Knows `generate_batch` and nothing of ours."""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.cuda.setup import LlamaShape, Setup

MEMORY = 0.5
"""Part of the free memory that its KV may take: it shares the card."""
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
        """All prompts at once. Raises RuntimeError where a text is not as long as wanted."""
        generation = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(allow_block_sharing=False, **self._memory)
        start = time.perf_counter()
        outputs = self._model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
        seconds = time.perf_counter() - start
        counts = [len(output.generated_tokens) for output in outputs.values()]
        if counts != [num_tokens] * len(prompts):
            raise RuntimeError(f"transformers gave {counts} tokens")
        tokens = float(sum(counts))
        return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
