"""Greedy text of sixteen concurrent requests equals transformers' own, for a sample of architectures.

`python -m tests.shard.engine.exactness` does the same for all of them.
"""

from pathlib import Path

import pytest

from tests import tiny
from tests.shard.engine.exactness import check

SAMPLE = ("llama", "gemma2", "mixtral")
FURTHER = ("gpt2", "falcon_new", "mpt")
LENGTHS = tiny.LENGTHS[::3]


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.long) for name in FURTHER)])
def test_greedy_text_equals_transformers(name: str, tmp_path: Path) -> None:
    tried = check(name, tmp_path, step_tokens=23, lengths=LENGTHS)
    assert tried.num_distinct >= 12, "a text that repeats itself proves nothing"
    assert tried.exact and tried.num_ties == 0, tried


@pytest.mark.parametrize(
    "limit",
    [pytest.param(40, id="short factors", marks=pytest.mark.long), pytest.param(128, id="long factors")],
)
def test_longrope_uses_one_factor_set(limit: int, tmp_path: Path) -> None:
    lengths = tuple(length for length in LENGTHS if length + 24 <= limit)
    tried = check("phi3_longrope", tmp_path, max_total_tokens=limit, lengths=lengths)
    assert tried.exact and tried.num_ties == 0, tried


def test_the_reference_backend_is_exact_too(tmp_path: Path) -> None:
    tried = check("gpt_oss", tmp_path, attention="reference", lengths=LENGTHS[:3])
    assert tried.exact, tried
