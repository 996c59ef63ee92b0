"""transformers' own continuous batching as a process: it reads lines of prompts and answers with tokens per second.

Knows `generate_batch` and nothing of ours. Each line in is a JSON list of texts, each line out a JSON object.

    python -m benchmarks.transformers_batching MODEL NEW_TOKENS
"""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

SETTINGS: dict[str, Any] = {"attention": "sdpa", "dtype": "bfloat16", "allow_block_sharing": False}


def serve(folder: str, new_tokens: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(allow_block_sharing=False)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        prompts = [tokenizer(text)["input_ids"] for text in json.loads(line)]
        start = time.monotonic()
        outputs = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
        seconds = time.monotonic() - start
        counts = [len(output.generated_tokens) for output in outputs.values()]
        print(json.dumps({"counts": counts, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
