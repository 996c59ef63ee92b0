"""The negative log likelihood of each token of prose.txt, by transformers and by a model of ours in this process.

Results are kept, because several tests compare with the same.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from tests.real import models

TEXT = Path(__file__).with_name("prose.txt")
NUM_TOKENS = 1024
"""Tokens of the text that are computed: two windows of Gemma's."""
WHOLE = 1 << 20
"""In place of NUM_TOKENS: all of the text, where the mean of fewer tokens is too uncertain for what is compared."""
STEP = 512
"""Tokens that are computed together."""


class Served(NamedTuple):
    """What a model of ours gave."""

    tokens: torch.Tensor
    """[T - 1] float32: the negative log likelihood of each token but the first."""
    num_bytes: int
    """Of its tensors."""

    @property
    def mean(self) -> float:
        return float(self.tokens.mean())


def token_ids(folder: Path, most: int = NUM_TOKENS) -> torch.Tensor:
    """[most] of the text, with what the tokenizer puts before it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return torch.tensor(tokenizer(TEXT.read_text()).input_ids[:most])


@cache
def ids_of(name: str, most: int = NUM_TOKENS) -> torch.Tensor:
    """[most] under the tokenizer of a real model."""
    return token_ids(models.folder(name, "float32"), most)


@cache
def reference(name: str) -> torch.Tensor:
    """[NUM_TOKENS - 1] by transformers in float32."""
    return of_network(models.network(models.folder(name, "float32"), "float32"), ids_of(name))


def of_tokens(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """logits: [T, V] before each of ids, [T]. Returns [T] float32."""
    chosen = logits.gather(1, ids[:, None])[:, 0].float()
    return logits.float().logsumexp(1) - chosen


@torch.inference_mode()
def of_network(network: Any, ids: torch.Tensor) -> torch.Tensor:
    """By transformers' network. Returns [T - 1]."""
    return of_tokens(network(ids[None, :-1], use_cache=False).logits[0], ids[1:])


@cache
def of_served(name: str, folder: Path, dtype: str, most: int = NUM_TOKENS, **settings: Any) -> Served:
    """By a model of ours; `name`: of the real model whose tokenizer it has; `most`: tokens; `settings`: of its
    ShardConfig.
    """
    model = load_model(ShardConfig("m", str(folder), "unix:/dev/null", dtype=dtype, **settings))
    num_bytes = bytes_of(model)
    (tokens,) = of_model(model, [ids_of(name, most)])
    return Served(tokens, num_bytes)


@torch.inference_mode()
def of_model(model: Model, texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """By a model of ours, each text alone: [T - 1] of each."""
    pages = list(range(-(-max(map(len, texts)) // model.inputs.page_size)))
    model.allocate_kv(len(pages))
    of_texts = []
    for ids in texts:
        parts = []
        for start in range(0, len(ids) - 1, STEP):
            part = ids[start : min(start + STEP, len(ids) - 1)]
            model.inputs.fill([Segment(start, len(part), pages)], part, torch.arange(len(part)))
            parts.append(of_tokens(model.forward(), ids[start + 1 : start + 1 + len(part)]))
        of_texts.append(torch.cat(parts))
    return of_texts


def bytes_of(model: Model) -> int:
    """Bytes of all tensors that a network holds, each counted once."""
    sizes: dict[int, int] = {}
    seen, waiting = set[int](), [model.network.__dict__]
    while waiting:
        held: Any = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if hasattr(held, "__tensor_flatten__"):  # of several tensors, as torchao's
            waiting += [getattr(held, name) for name in held.__tensor_flatten__()[0]]
        elif isinstance(held, torch.Tensor):
            sizes[held.data_ptr()] = max(held.nbytes, sizes.get(held.data_ptr(), 0))
        elif isinstance(held, dict):
            waiting += held.values()
        elif isinstance(held, list | tuple):
            waiting += held
        elif type(held).__module__.partition(".")[0] in ("lorikeet", "torch", "transformers", "hqq", "bitsandbytes"):
            waiting.append(getattr(held, "__dict__", {}))
    return sum(sizes.values())
