"""Sixteen concurrent requests through the whole engine equal transformers' own greedy text, however they are run."""

from dataclasses import replace
from pathlib import Path

import pytest

from lorikeet.shard.config import ShardConfig
from tests import tiny
from tests.shard.engine.exactness import Tried, oracle, prompts_of, through_engine

CASES = {
    "default": {},
    "seven tokens a step": {"step_tokens": 7},
    "few pages": {"num_pages": 7},
    "commit lag": {"commit_lag": 1},
    "whole prompts": {"chunked_prefill": False},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ShardConfig:
    folder = tiny.make("mistral", tmp_path_factory.mktemp("mistral"))
    return ShardConfig("mistral", str(folder), "unix:/dev/null", dtype="float32", max_total_tokens=128, num_pages=80)


@pytest.fixture(scope="module")
def expected(config: ShardConfig) -> list[list[int]]:
    texts = oracle(Path(config.model_path), prompts_of("mistral", tiny.LENGTHS), config.max_total_tokens)
    return [text.token_ids for text in texts]


@pytest.mark.parametrize("case", CASES)
def test_engine_equals_transformers(case: str, config: ShardConfig, expected: list[list[int]]) -> None:
    result = through_engine(replace(config, **CASES[case]), prompts_of("mistral", tiny.LENGTHS))  # type: ignore[arg-type]
    assert result.texts == expected
    assert (result.num_preempted > 0) == (case == "few pages")


def test_prefix_hits_change_nothing(config: ShardConfig, expected: list[list[int]]) -> None:
    prompts = prompts_of("mistral", tiny.LENGTHS)
    result = through_engine(config, prompts, rounds=2)
    assert result.texts == expected * 2
    assert result.num_cached > 0


def test_a_wrong_text_is_noticed() -> None:
    assert not Tried("x", differences=["request 0 differs at token 3"]).exact
