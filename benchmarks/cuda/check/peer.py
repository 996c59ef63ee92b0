"""transformers on the card, with the random model of the other stages: `generate`, continuous batching, PEFT."""

import time
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.cuda import engines
from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.setup import Setup
from benchmarks.models.adapter_files import ALL

MOST_TOKENS = 64


def check(rows: Rows, setup: Setup, is_brief: bool) -> None:
    length, count = min(setup.text, MOST_TOKENS), setup.requests
    ids = engines.prompts(setup, setup.large, count, setup.prompt)
    config = LlamaConfig(**setup.large.config())
    network: Any = engines.random_network(
        config, getattr(torch, setup.dtype), setup.device, setup.seed, attention="sdpa"
    )
    batch = torch.tensor(ids, device=setup.device)

    def generate(model: Any) -> Row:
        options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
        model.generate(input_ids=batch[:, :4], attention_mask=torch.ones_like(batch[:, :4]), **options)
        _wait(setup)
        start = time.monotonic()
        model.generate(input_ids=batch, attention_mask=torch.ones_like(batch), **options)
        _wait(setup)
        return {"tok_s": count * length / (time.monotonic() - start)}

    def batched() -> Row:
        memory = {"max_memory_percent": 0.5} if setup.is_cuda else {"num_blocks": 8, "max_batch_tokens": 64}
        generated(network, ids[:2], length, **memory)
        counts, seconds = generated(network, ids, length, **memory)
        return {"ok": counts == [length] * count, "tok_s": sum(counts) / seconds}

    def adapted() -> Row:
        import peft

        return generate(peft.get_peft_model(network, peft.LoraConfig(r=setup.rank, target_modules=list(ALL))))

    rows.check(f"transformers generate, {count} at once", lambda: generate(network))
    rows.check("transformers continuous batching", batched)
    rows.check("PEFT generate, one adapter", adapted)


def _wait(setup: Setup) -> None:
    if setup.is_cuda:
        torch.cuda.synchronize(setup.device)


def generated(model: Any, ids: list[list[int]], num_tokens: int, **memory: Any) -> tuple[list[int], float]:
    """How many tokens transformers generates for each prompt, and the seconds of all. Its settings are the defaults,
    but for sharing prefixes, which no two prompts have.
    """
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    generation = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(allow_block_sharing=False, **memory)
    start = time.monotonic()
    outputs = model.generate_batch(
        ids, generation_config=generation, continuous_batching_config=batching, progress_bar=False
    )
    seconds = time.monotonic() - start
    return [len(output.generated_tokens) for output in outputs.values()], seconds
