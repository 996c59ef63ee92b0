"""The sampler's distribution for one row of logits: by many samples, or by log probabilities."""

from dataclasses import asdict

import numpy as np
import torch

from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.sampling import Sampler
from tests.shard.sampling.oracle import Case

CPU = torch.device("cpu")


def params(case: Case, seed: int = 0, do_sample: bool = True) -> SamplingParams:
    return SamplingParams(do_sample=do_sample, seed=seed, **asdict(case))


def draws(
    logits: np.ndarray, case: Case, known: list[int], num_prompt: int, num_seeds: int, num_positions: int
) -> np.ndarray:
    """[num_seeds, num_positions] tokens drawn at neighbouring positions, each time after the same known tokens."""
    rows = list(range(num_seeds))
    table = torch.tensor(logits, dtype=torch.float32).expand(num_seeds, -1)
    found = []
    for position in range(num_positions):
        sampler = Sampler(len(logits), num_seeds, CPU)
        for row in rows:
            sampler.add(row, params(case, seed=row), LogprobParams(), known, num_prompt)
        found.append(sampler.sample(table, rows, [len(known) + position] * num_seeds).token_ids)
    return torch.stack(found, dim=1).numpy()


def shown_distribution(logits: torch.Tensor, sampling: SamplingParams, known: list[int], num_prompt: int) -> np.ndarray:
    """logits: [V]. [V] probabilities, as the sampler reports them for every token."""
    vocab_size = len(logits)
    sampler = Sampler(vocab_size, 1, CPU)
    sampler.add(0, sampling, LogprobParams(wanted=True, alternatives=vocab_size), known, num_prompt)
    host = sampler.sample(logits[None], [0], [len(known)]).to_host()
    distribution = np.zeros(vocab_size)
    distribution[host.alternative_ids[0]] = np.exp(host.alternative_logprobs[0])
    return distribution
