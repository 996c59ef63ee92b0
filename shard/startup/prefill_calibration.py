"""Times steps with and without prompts: they give the prefill budget of the busiest adapter, and the first estimate of
how many prompt tokens a step computes.
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.model import Model

CUDA_TOKENS = 2048
"""Not measured on CUDA: a step with this many prompt tokens of an 8 B model takes 50 ms on an H200. How many a step
computes of all adapters together is decided by times of steps while serving.
"""
SLOWDOWN = 1.5
"""Time that the prompts of one adapter may add to a step on CPU, as a multiple of a step that only decodes: enough for
prompts to keep pace with the requests that decode, and little for the requests of other adapters."""
MIN_TOKENS, MAX_TOKENS = 16, 512
NUM_DECODES, NUM_PROMPT_TOKENS = 8, 64
"""Steps of so many decoding requests are timed with and without so many prompt tokens."""
REPEATS = 3


class Calibration(NamedTuple):
    """What was measured."""

    budget: int
    """Prompt tokens of one adapter."""
    steps: Sequence[tuple[int, int, float]] = ()
    """Prompt tokens, all tokens and seconds of the steps; empty on CUDA."""


def measure(model: Model, max_prompt_tokens: int) -> Calibration:
    """Writes to KV pages, so it must run before any request."""
    if model.info.device.type == "cuda":
        return Calibration(CUDA_TOKENS)
    num_prompt = min(NUM_PROMPT_TOKENS, max_prompt_tokens)
    decodes = [Segment(0, 1, range(1))] * NUM_DECODES
    with_prompt = [*decodes, Segment(0, num_prompt, range(-(-num_prompt // model.page_size)))]
    times = [(_seconds(model, decodes), _seconds(model, with_prompt)) for _ in range(REPEATS)]
    decode_s, mixed_s = map(median, zip(*times, strict=True))
    steps = (0, NUM_DECODES, decode_s), (num_prompt, NUM_DECODES + num_prompt, mixed_s)
    return Calibration(budget(decode_s, mixed_s, num_prompt), steps)


def budget(decode_s: float, mixed_s: float, num_prompt: int) -> int:
    """The budget for a step that takes `decode_s` without and `mixed_s` with `num_prompt` prompt tokens."""
    token_s = max(0.0, mixed_s - decode_s) / num_prompt
    if token_s * MAX_TOKENS <= SLOWDOWN * decode_s:
        return MAX_TOKENS
    return max(MIN_TOKENS, int(SLOWDOWN * decode_s / token_s))


def _seconds(model: Model, segments: list[Segment]) -> float:
    num_tokens = sum(segment.num_tokens for segment in segments)
    rows = list(range(NUM_DECODES))
    start = time.perf_counter()
    model.inputs.fill(segments, torch.zeros(num_tokens, dtype=torch.long), torch.tensor(rows), rows)
    model.forward()
    return time.perf_counter() - start
