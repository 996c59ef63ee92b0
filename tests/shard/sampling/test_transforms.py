"""Each transform, and all in order, against transformers' processors and against numpy."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from lorikeet.shard.sampling import filters
from tests.shard.sampling import oracle
from tests.shard.sampling.drawing import params, shown_distribution
from tests.shard.sampling.oracle import Case

KNOWN = [5, 9, 9, 17, 3, 3, 3, 40, 9]
NUM_PROMPT = 4

PLAIN = {
    "temperature": Case(temperature=0.7),
    "hot": Case(temperature=1.9),
    "top_k": Case(top_k=7),
    "top_k beyond the vocabulary": Case(top_k=10**6),
    "top_p": Case(top_p=0.8),
    "small top_p": Case(top_p=1e-6),
    "min_p": Case(min_p=0.05),
    "typical_p": Case(typical_p=0.6),
    "repetition": Case(repetition_penalty=1.7),
    "reward": Case(repetition_penalty=0.8),
    "filters": Case(temperature=1.3, top_k=60, top_p=0.9, min_p=0.01, typical_p=0.95),
    "all": Case(temperature=1.5, top_k=80, top_p=0.95, min_p=0.02, typical_p=0.9, repetition_penalty=1.4),
}
OURS = {
    "frequency": Case(frequency_penalty=0.7),
    "presence": Case(presence_penalty=1.1),
    "negative": Case(frequency_penalty=-0.5, presence_penalty=-1.0),
    "bias": Case(logit_bias=((3, 4.0), (9, -100.0), (9, 1.0))),
    "everything": Case(1.2, 80, 0.95, 0.01, 0.9, 1.3, 0.4, 0.6, ((2, 3.0), (3, 1.0))),
    "allowed": Case(allowed_ids=(3, 9, 9, 40, 59)),
    "bad words": Case(bad_words=((7,), (9, 8), (40, 9, 6), (3, 40, 9, 6), (3, 9, 5), (17, 3, 3, 3, 40, 9, 4))),
    "min tokens": Case(min_tokens=6, min_tokens_stop_ids=(1, 9, 59)),
    "min tokens reached": Case(min_tokens=5, min_tokens_stop_ids=(1, 9, 59)),
    "all masks and everything": Case(
        1.2,
        80,
        0.95,
        0.01,
        0.9,
        1.3,
        0.4,
        0.6,
        ((2, 3.0), (3, 1.0)),
        tuple(range(2, 60)),
        ((3,), (9, 8), (9, 9, 7)),
        6,
        (9, 10),
    ),
}


def logits_of(seed: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def reference(case: Case) -> LogitsProcessorList:
    steps = [
        (case.repetition_penalty != 1, lambda: RepetitionPenaltyLogitsProcessor(case.repetition_penalty)),
        (case.temperature != 1, lambda: TemperatureLogitsWarper(case.temperature)),
        (case.top_k > 0, lambda: TopKLogitsWarper(case.top_k)),
        (case.top_p < 1, lambda: TopPLogitsWarper(case.top_p)),
        (case.min_p > 0, lambda: MinPLogitsWarper(case.min_p)),
        (case.typical_p < 1, lambda: TypicalLogitsWarper(case.typical_p)),
    ]
    return LogitsProcessorList([make() for used, make in steps if used])


def assert_same_distribution(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.flatnonzero(found).tolist() == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [50, 1000, 9001])
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN.keys())
def test_same_distribution_as_transformers(case: Case, vocab_size: int) -> None:
    for seed in range(5):
        logits = logits_of(seed, vocab_size)
        expected = reference(case)(torch.tensor([KNOWN]), logits[None].clone())[0].softmax(-1).numpy()
        assert_same_distribution(shown_distribution(logits, params(case), KNOWN, NUM_PROMPT), expected)


@pytest.mark.parametrize("case", [*PLAIN.values(), *OURS.values()], ids=[*PLAIN.keys(), *OURS.keys()])
def test_same_distribution_as_numpy(case: Case) -> None:
    for seed in range(5):
        logits = logits_of(seed, 500)
        expected = oracle.distribution(logits.numpy(), case, KNOWN[:NUM_PROMPT], KNOWN[NUM_PROMPT:])
        assert_same_distribution(shown_distribution(logits, params(case), KNOWN, NUM_PROMPT), expected)


def test_a_flat_distribution_is_filtered() -> None:
    """Where thousands of tokens are needed to reach the mass."""
    logits = logits_of(0, 20_000) * 0.01
    for case in (Case(top_p=0.9), Case(typical_p=0.9), Case(top_p=0.1), Case(top_k=300, top_p=0.99)):
        found = shown_distribution(logits, params(case), KNOWN, NUM_PROMPT)
        expected = oracle.distribution(logits.numpy(), case, KNOWN[:NUM_PROMPT], KNOWN[NUM_PROMPT:])
        # running sums over thousands of nearly equal tokens may end one token apart
        assert abs(np.count_nonzero(found) - np.count_nonzero(expected)) <= 1
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_how_many_are_ordered_first_changes_nothing() -> None:
    """Which depends on the neighbours; enough or not, the distribution keeps its bits."""
    scores = torch.stack([logits_of(seed, 3000) / (seed + 1) for seed in range(6)])
    mass = torch.tensor([0.05, 0.3, 0.6, 0.9, 0.999, 0.5])[:, None]
    for kept in (filters.top_p, filters.typical_p):
        whole = kept(scores.clone(), mass, 3000)
        assert 1 < (whole > -torch.inf).sum() < whole.numel()
        for first_check in (1, 2, 100, 128, 2999):
            assert torch.equal(kept(scores.clone(), mass, first_check), whole)


def test_equal_scores_are_kept_or_excluded_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for case in (Case(top_k=2), Case(top_p=0.6), Case(top_k=3, top_p=0.9)):
        assert np.flatnonzero(shown_distribution(logits, params(case), [0], 1)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("case", OURS.values(), ids=OURS.keys())
def test_without_sampling_the_highest_penalised_score_wins(case: Case) -> None:
    for seed in range(20):
        logits = logits_of(seed, 60)
        scores = oracle.penalised(logits.numpy(), case, KNOWN[:NUM_PROMPT], KNOWN[NUM_PROMPT:])
        found = shown_distribution(logits, params(case, do_sample=False), KNOWN, NUM_PROMPT)
        np.testing.assert_allclose(found, oracle.softmax(scores), atol=1e-6)
