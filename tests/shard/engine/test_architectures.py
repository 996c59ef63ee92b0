"""Greedy texts of every architecture: against transformers in every way of running, and under many adapters against
PEFT.
"""

from pathlib import Path

import pytest

from tests import tiny
from tests.shard.engine import adapter_exactness, architecture_runs
from tests.shard.engine.exactness import MIN_DISTINCT

TIES_PER_TOKEN = 1 / 10_000
"""The most ties among the tokens of one architecture."""


@pytest.mark.long
@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_texts_equal_transformers_in_every_way_of_running(name: str, tmp_path: Path) -> None:
    runs = architecture_runs.run(name, tmp_path)
    assert sum(run["num_ties"] for run in runs) <= TIES_PER_TOKEN * sum(run["num_tokens"] for run in runs)
    for run in runs:
        assert run["differences"] == [], run
        assert run.get("num_distinct", MIN_DISTINCT) >= MIN_DISTINCT
        assert run.get("worst_logprob", 0.0) <= 1e-4


@pytest.mark.long
@pytest.mark.parametrize("name", adapter_exactness.ARCHITECTURES)
def test_texts_under_adapters_equal_peft(name: str, tmp_path: Path) -> None:
    tries = list(adapter_exactness.check(name, tmp_path))
    assert sum(tried.num_ties for tried in tries) <= TIES_PER_TOKEN * sum(tried.num_tokens for tried in tries)
    for tried in tries:
        assert tried.differences == [], tried
        assert tried.num_distinct >= MIN_DISTINCT
        assert tried.share_changed >= 0.9
