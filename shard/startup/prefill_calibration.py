"""How many prompt tokens of a crowded adapter a step may have, by what steps take on this machine."""

import time
from statistics import median

import torch

from lorikeet.shard.batch.inputs import Segment
from lorikeet.shard.model import Model

CUDA_TOKENS = 512
"""There so many prompt tokens make a step about as long again as one that only decodes."""
LONGER = 1.5
"""By so many times the length of a step that only decodes, such prompts may lengthen one on a CPU: enough for prompts
to keep pace with the texts behind them, and little for whoever comes meanwhile."""
LEAST, MOST = 16, 512
ROWS, EXTRA = 8, 64
"""What is timed: steps of so many requests, with and without a prompt of so many tokens."""
TURNS = 3


def measure(model: Model, num_tokens: int) -> int:
    """Tokens. One request may have up to `num_tokens`. Writes to KV pages, so nobody may have any yet."""
    if model.info.device.type == "cuda":
        return CUDA_TOKENS
    extra = min(EXTRA, num_tokens)
    decodes = [Segment(0, 1, range(1))] * ROWS
    longer = [*decodes, Segment(0, extra, range(-(-extra // model.page_size)))]
    plain, mixed = [], []
    for _ in range(TURNS):
        plain.append(_seconds(model, decodes))
        mixed.append(_seconds(model, longer))
    return tokens(median(plain), median(mixed), extra)


def tokens(plain: float, mixed: float, extra: int) -> int:
    """plain: seconds of a step that only decodes; mixed: of one with `extra` prompt tokens besides."""
    each = max(0.0, mixed - plain) / extra
    return MOST if each * MOST <= LONGER * plain else max(LEAST, int(LONGER * plain / each))


def _seconds(model: Model, segments: list[Segment]) -> float:
    num_tokens = sum(segment.num_tokens for segment in segments)
    rows = list(range(ROWS))
    start = time.perf_counter()
    model.inputs.fill(segments, torch.zeros(num_tokens, dtype=torch.long), torch.tensor(rows), rows)
    model.forward()
    return time.perf_counter() - start
