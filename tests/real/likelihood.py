"""The negative log likelihood of each token of prose.txt, by transformers and by a model of ours in this process."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from lorikeet.shard.batch.inputs import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model

TEXT = Path(__file__).with_name("prose.txt")
STEP = 512
"""Tokens that are computed together."""


def token_ids(folder: Path) -> torch.Tensor:
    """[T] of the text, with what the tokenizer puts before it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return torch.tensor(tokenizer(TEXT.read_text()).input_ids)


def of_tokens(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """logits: [T, V] before each of ids, [T]. Returns [T] float32."""
    return -torch.log_softmax(logits.float(), 1).gather(1, ids[:, None])[:, 0]


@torch.inference_mode()
def of_network(network: Any, ids: torch.Tensor) -> torch.Tensor:
    """By transformers' network. Returns [T - 1]."""
    return of_tokens(network(ids[None, :-1]).logits[0], ids[1:])


@torch.inference_mode()
def of_model(folder: Path, ids: torch.Tensor, dtype: str, **settings: Any) -> torch.Tensor:
    """By a model of ours; `settings`: of its ShardConfig. Returns [T - 1]."""
    model = load_model(ShardConfig("m", str(folder), "unix:/dev/null", dtype=dtype, **settings))
    pages = list(range(-(-len(ids) // model.inputs.page_size)))
    model.allocate_kv(len(pages))
    parts = []
    for start in range(0, len(ids) - 1, STEP):
        part = ids[start : min(start + STEP, len(ids) - 1)]
        model.inputs.fill([Segment(start, len(part), pages)], part, torch.arange(len(part)))
        parts.append(of_tokens(model.forward(), ids[start + 1 : start + 1 + len(part)]))
    return torch.cat(parts)
