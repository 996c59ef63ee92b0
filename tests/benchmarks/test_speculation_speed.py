"""One small round of the speeds of speculation, and the figures of a round."""

from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.evidence.figure import Raw
from benchmarks.models import random_llama
from benchmarks.speculation import speed
from benchmarks.speculation.timed_pair import PairSize
from tests import tiny

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": tiny.VOCAB, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairSize:
    monkeypatch.setattr(random_llama, "MODELS", tmp_path)
    target = random_llama.random_llama("target", 1, 8.0, **{**TINY, "num_hidden_layers": 2})
    return PairSize(1, 1, 16, 2, (2,), target, TINY, "float32")


def values(suite: str, raw: Raw) -> list[float]:
    """The values of a published suite's figures."""
    (published,) = (one for one in figures.SUITES if one.name == suite)
    return [figure.value(raw) for figure in published.figures]


def test_schedules_are_compared_under_a_load(size: PairSize) -> None:
    (case,) = speed.schedules(2, size=size)
    assert case.raw["best"] == 2
    assert min(values("speculation-schedule-1", case.raw)) > 0
    assert case.raw["fixed"]["accepted"] > 0


@pytest.mark.long
def test_the_cost_of_rejected_drafts_under_a_load(size: PairSize) -> None:
    (case,) = speed.rejected(2, size=size)
    assert min(values("speculation-rejected-1", case.raw)) > 0
    assert case.raw["rejected"]["accepted"] == 0
    assert case.raw["off"]["drafted"] == case.raw["limited"]["drafted"] == 0


def test_a_small_round(size: PairSize) -> None:
    (case,) = speed.measure(size=size)
    assert case.error == ""
    assert min(values("speculation-speed", case.raw)) >= 0
    drafted = case.raw["drafted 8"]
    assert drafted["accepted"] > 0
    assert drafted["steps"] < drafted["tokens"]
    assert case.raw["off 8"]["steps"] == case.raw["off 8"]["tokens"]


def test_figures_follow_from_a_round() -> None:
    raw = {
        "weight_ratio": 0.1, "repeated": 0.0, "target 1 x 1": 0.010, "target 1 x 4": 0.011, "target 1 x 5": 0.012,
        "target 1 x 8": 0.013, "draft 1 x 1": 0.001, "off 1": {"tokens_per_second": 100.0},
        "drafted 1": {"tokens_per_second": 250.0, "tokens": 440, "steps": 100},
    }  # fmt: skip
    assert speed.cost(8, raw) == pytest.approx(1.3)
    assert speed.cost_over_bytes(raw) == pytest.approx(1.0)
    assert speed.efficiency(1, raw) == pytest.approx(2.5 / (4.4 / (0.4 + 1.2)))
    assert speed.efficiency_of_bytes(raw) == pytest.approx(2.5 / (4.4 / (0.4 + 1)))
