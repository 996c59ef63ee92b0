"""Sampled tokens follow the exact distribution, for each transform and for combinations; neighbours are independent."""

import numpy as np
import pytest

from tests.shard.sampling import oracle
from tests.shard.sampling.drawing import draws
from tests.shard.sampling.oracle import Case

V = 32
KNOWN = [1, 2, 2, 30, 4, 4, 9]
NUM_PROMPT = 3
LOGITS = np.random.default_rng(11).normal(size=V).astype(np.float32) * 1.5
CASES = {
    "plain": Case(),
    "temperature": Case(temperature=0.6),
    "top_k": Case(top_k=6),
    "top_p": Case(top_p=0.7),
    "min_p": Case(min_p=0.1),
    "typical_p": Case(typical_p=0.7),
    "repetition": Case(repetition_penalty=2.0),
    "frequency": Case(frequency_penalty=1.0),
    "presence": Case(presence_penalty=1.5),
    "bias": Case(logit_bias=((3, 2.0), (4, -2.0))),
    "temperature and filters": Case(temperature=1.6, top_k=20, top_p=0.9, min_p=0.02, typical_p=0.9),
    "masks": Case(
        allowed_ids=tuple(range(20)),
        bad_words=((3,), (8,)),
        min_tokens=20,
        min_tokens_stop_ids=(7,),
    ),
    "all": Case(0.8, 24, 0.95, 0.01, 0.95, 1.5, 0.5, 0.7, ((7, 1.5),)),
}
SAMPLE = ("plain", "temperature", "top_p", "repetition", "frequency", "temperature and filters")
SAFE = 1e-6 / (3 * len(CASES))
"""Every test here together fails by chance once in a million choices of seeds."""
NUM_SEEDS, NUM_PLACES = 1000, 6


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[name], id=name, marks=() if name in SAMPLE else pytest.mark.long) for name in CASES]
)
def test_samples_follow_the_distribution(case: Case) -> None:
    distribution = oracle.distribution(LOGITS, case, KNOWN[:NUM_PROMPT], KNOWN[NUM_PROMPT:])
    tokens = draws(LOGITS, case, KNOWN, NUM_PROMPT, NUM_SEEDS, NUM_PLACES)
    assert oracle.fit(np.bincount(tokens.ravel(), minlength=V), distribution) > SAFE
    pairs = np.outer(distribution, distribution)
    positions = np.bincount((tokens[:, 0::2] * V + tokens[:, 1::2]).ravel(), minlength=V * V)
    assert oracle.fit(positions, pairs) > SAFE
    seeds = np.bincount((tokens[0::2] * V + tokens[1::2]).ravel(), minlength=V * V)
    assert oracle.fit(seeds, pairs) > SAFE


def test_a_wrong_distribution_is_detected() -> None:
    """The power of the test above: a temperature applied twice is far outside."""
    tokens = draws(LOGITS, Case(temperature=0.6), KNOWN, NUM_PROMPT, NUM_SEEDS, NUM_PLACES)
    wrong = oracle.distribution(LOGITS, Case(temperature=0.36), KNOWN[:NUM_PROMPT], KNOWN[NUM_PROMPT:])
    assert oracle.fit(np.bincount(tokens.ravel(), minlength=V), wrong) < SAFE
