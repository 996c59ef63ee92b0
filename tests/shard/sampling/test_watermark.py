"""The watermark: which tokens are green, how many, and that a marked text shows it."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.sampling import Sampler
from tests.shard.sampling import oracle
from tests.shard.sampling.drawing import CPU

KEY = 15485863
GREEN_LIST = 2


def green(previous: int, token: int, gamma: float) -> bool:
    return oracle.noise_bits(KEY, previous, token, GREEN_LIST) / 2**64 + 0.5 < gamma


def shift(vocab_size: int, previous: int, gamma: float, delta: float) -> np.ndarray:
    """[V]: what the watermark added to flat scores, up to a constant."""
    sampler = Sampler(vocab_size, 1, CPU, gamma, delta)
    sampler.add(0, SamplingParams(watermark=True), LogprobParams(True, alternatives=vocab_size), [4, previous], 2)
    host = sampler.sample(torch.zeros(1, vocab_size), [0], [2]).to_host()
    scores = np.zeros(vocab_size)
    scores[host.alternative_ids[0]] = host.alternative_logprobs[0]
    return scores - scores.min()


@pytest.mark.parametrize("gamma", [0.25, 0.5, 0.9])
def test_green_tokens_gain_delta(gamma: float) -> None:
    for previous in range(10):
        expected = [3.0 * green(previous, token, gamma) for token in range(200)]
        np.testing.assert_allclose(shift(200, previous, gamma, 3.0), expected, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.25, 0.5, 0.9])
def test_the_green_share_is_gamma(gamma: float) -> None:
    found = [shift(5000, previous, gamma, 1.0) > 0.5 for previous in range(20)]
    shares = np.mean(found, axis=1)
    assert np.abs(shares - gamma).max() < 5 * np.sqrt(gamma * (1 - gamma) / 5000)
    both = np.mean(found[0] & found[1])
    assert abs(both - gamma**2) < 5 * np.sqrt(gamma**2 * (1 - gamma**2) / 5000)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_marked_text_is_green(do_sample: bool) -> None:
    """Follows its own tokens: the list is that of the token sampled last."""

    def share(watermark: bool) -> float:
        sampler = Sampler(300, 1, CPU, 0.5, 6.0)
        sampler.add(0, SamplingParams(do_sample=do_sample, watermark=watermark, seed=3), LogprobParams(), [7], 1)
        logits = torch.randn(200, 1, 300, generator=torch.Generator().manual_seed(0))
        text = [7] + [sampler.sample(row, [0], [at]).to_host().token_ids[0] for at, row in enumerate(logits, 1)]
        return float(np.mean([green(before, token, 0.5) for before, token in pairwise(text)]))

    assert share(watermark=True) > 0.95
    assert 0.3 < share(watermark=False) < 0.7
