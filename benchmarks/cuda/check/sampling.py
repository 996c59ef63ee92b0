"""Sampling by kernels: the tokens of plain operators, and how long it takes."""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.cuda.check.rows import Row, Rows, ceilings
from benchmarks.cuda.setup import Setup
from benchmarks.cuda.timing import seconds_of
from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.sampling.device import Tile

SAMPLED = SamplingParams(do_sample=True, temperature=0.8)
WAYS = {
    "greedy": (SamplingParams(), 3.0),
    "temperature": (SAMPLED, 3.0),
    "top-p": (replace(SAMPLED, top_p=0.9), 3.0),
    "min-p": (replace(SAMPLED, min_p=0.05), 3.0),
    "top-k, penalties": (SamplingParams(do_sample=True, top_k=50, repetition_penalty=1.1), 3.0),
    "top-p of flat logits": (SamplingParams(do_sample=True, top_p=0.9), 0.1),
}
"""Settings, and how large logits are."""
SMOKE_WAYS = ("greedy", "top-k, penalties")
PROMPT = [1, 2, 3]


def check(rows: Rows, setup: Setup, is_brief: bool) -> None:
    for name in WAYS if setup.is_cuda else SMOKE_WAYS:
        params, scale = WAYS[name]
        rows.check(name, partial(_sample, rows, setup, params, scale))


@torch.inference_mode()
def _sample(rows: Rows, setup: Setup, params: SamplingParams, scale: float) -> Row:
    vocabulary, count, device = setup.large.vocabulary, setup.requests, torch.device(setup.device)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(count, vocabulary, generator=generator) * scale).to(device)
    # a sampler counts what it sampled: each samples once
    tiles = (Tile(), None, Tile(), Tile())
    samplers = [Sampler(vocabulary, count, device, tile=tile, has_kernels=tile is not None) for tile in tiles]
    positions = [len(PROMPT)] * count
    for sampler in samplers:
        for row in range(count):
            sampler.add(row, replace(params, seed=row), LogprobParams(), PROMPT, len(PROMPT))
    tokens = [sampler.sample(logits, range(count), positions).to_host().token_ids for sampler in samplers]
    num_different = sum(a != b for a, b in zip(*tokens[:2], strict=True))

    def sample() -> object:
        return samplers[0].sample(logits, range(count), positions).token_ids

    seconds = seconds_of(sample, device, setup.repeats)
    same = list(tokens[0]) == list(tokens[2]) == list(tokens[3])
    found = {"us": 1e6 * seconds, "differ": num_different, "same_bits": same}
    if copy_gbs := ceilings(rows.out).get("copy_gbs"):
        found["share_of_copy"] = logits.nbytes / seconds / 1e9 / copy_gbs
    # two sums in other orders may differ in the last bit, and so rarely in a token
    return {"ok": same and num_different <= max(1, count // 32), **found}
