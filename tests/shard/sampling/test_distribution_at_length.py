"""The distribution of sampled tokens with ten times the seeds of the short test."""

import pytest

from tests.shard.sampling import test_distribution
from tests.shard.sampling.oracle import Case

NUM_SEEDS = 40_000


@pytest.mark.long
@pytest.mark.parametrize("name", test_distribution.CASES)
def test_many_draws_follow_the_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_distribution, "NUM_SEEDS", NUM_SEEDS)
    case: Case = test_distribution.CASES[name]
    test_distribution.test_samples_follow_the_distribution(case)
