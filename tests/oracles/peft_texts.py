"""What PEFT itself writes under an adapter, each prompt alone: the text that a server's answers are held against."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def greedy(base: Path, adapter: Path | None, prompts: Sequence[str], num_tokens: int) -> list[list[int]]:
    """Greedy token ids in float32, past any end of text; without an adapter those of the bare base."""
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's own
            model = peft.PeftModel.from_pretrained(model, str(adapter))
    model.eval()
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            whole = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        texts.append([int(token) for token in whole[0, ids.shape[1] :]])
    return texts
