"""Log probabilities, alternatives and bad rows, as the host sees them."""

import math

import numpy as np
import pytest
import structlog
import torch

from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.sampling import HostSampled, Sampler
from lorikeet.shard.sampling.filters import _descending, arg_max
from lorikeet.shard.sampling.report import SlowRows, most_likely, prompt_logprobs
from tests.shard.sampling import oracle
from tests.shard.sampling.drawing import CPU
from tests.shard.sampling.oracle import Case

LOGITS = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)) * 3
DRAWN = SamplingParams(do_sample=True, temperature=0.5, top_k=5, frequency_penalty=1.0)
DISTRIBUTION = oracle.distribution(
    LOGITS[0].numpy(), Case(temperature=0.5, top_k=5, frequency_penalty=1.0), [1, 2], [3]
)
RAW_LOGPROBS = oracle.softmax(LOGITS[0].double().numpy())


def sampled(logprobs: LogprobParams, params: SamplingParams = DRAWN, logits: torch.Tensor = LOGITS) -> HostSampled:
    sampler = Sampler(logits.shape[1], 1, CPU)
    sampler.add(0, params, logprobs, [1, 2, 3], 2)
    return sampler.sample(logits, [0], [3]).to_host()


@pytest.mark.parametrize(("raw", "distribution"), [(False, DISTRIBUTION), (True, RAW_LOGPROBS)])
def test_logprobs_are_of_the_distribution_asked_for(raw: bool, distribution: np.ndarray) -> None:
    host = sampled(LogprobParams(wanted=True, alternatives=4, raw=raw))
    assert host.logprobs[0] == pytest.approx(math.log(distribution[host.token_ids[0]]), abs=1e-5)
    assert host.alternative_ids[0] == np.argsort(-distribution)[:4].tolist()
    assert host.alternative_logprobs[0] == pytest.approx(np.log(np.sort(distribution)[::-1][:4]).tolist(), abs=1e-5)


def test_excluded_alternatives_are_impossible() -> None:
    host = sampled(LogprobParams(wanted=True, alternatives=7))
    assert [value == -math.inf for value in host.alternative_logprobs[0]] == [False] * 5 + [True] * 2


def test_unwanted_logprobs_are_absent() -> None:
    host = sampled(LogprobParams())
    assert math.isnan(host.logprobs[0])
    assert host.alternative_ids == [[]]
    assert host.alternative_logprobs == [[]]


def test_alternatives_alone_may_be_asked_for() -> None:
    host = sampled(LogprobParams(alternatives=3))
    assert host.alternative_ids == sampled(LogprobParams(wanted=True, alternatives=3)).alternative_ids
    assert not math.isnan(host.logprobs[0])


@pytest.mark.parametrize("raw", [False, True])
def test_named_alternatives_are_those_of_each_request(raw: bool) -> None:
    """Next to a request that names none, and one that names fewer."""
    wanted = [
        LogprobParams(wanted=True, alternatives=3, alternative_ids=(39, 0, 7), raw=raw),
        LogprobParams(wanted=True, alternatives=4, raw=raw),
        LogprobParams(wanted=True, alternatives=1, alternative_ids=(5,), raw=raw),
    ]
    sampler = Sampler(40, 3, CPU)
    for row, logprobs in enumerate(wanted):
        sampler.add(row, DRAWN, logprobs, [1, 2, 3], 2)
    host = sampler.sample(LOGITS.expand(3, -1), [0, 1, 2], [3, 3, 3]).to_host()
    probabilities = RAW_LOGPROBS if raw else DISTRIBUTION
    with np.errstate(divide="ignore"):
        logprobs_of = np.log(probabilities)
    likeliest = np.argsort(-probabilities)[:4].tolist()
    for found, values, ids in zip(
        host.alternative_ids, host.alternative_logprobs, ([39, 0, 7], likeliest, [5]), strict=True
    ):
        assert found == ids
        assert values == pytest.approx(logprobs_of[ids].tolist(), abs=1e-5)


def test_more_alternatives_than_tokens() -> None:
    host = sampled(LogprobParams(wanted=True, alternatives=1000))
    assert sorted(host.alternative_ids[0]) == list(range(40))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(presence_penalty=1.0), DRAWN])
@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_bad_row_is_reported_and_changes_no_other(params: SamplingParams, value: float | None) -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    good = logits.clone()
    if value is None:
        logits[1] = -math.inf
    else:
        logits[1, 599] = value

    def sample(table: torch.Tensor) -> HostSampled:
        sampler = Sampler(600, 3, CPU)
        for row in range(3):
            sampler.add(row, params, LogprobParams(wanted=row == 1), [1, 2, 3], 2)
        return sampler.sample(table, [0, 1, 2], [3, 3, 3]).to_host()

    host, expected = sample(logits), sample(good)
    assert host.bad == [False, True, False]
    assert expected.bad == [False, False, False]
    assert (host.token_ids[0], host.token_ids[2]) == (expected.token_ids[0], expected.token_ids[2])
    assert 0 <= host.token_ids[1] < 600


def test_prompt_logprobs_are_the_models_own() -> None:
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(1)) * 2
    targets = torch.arange(9) * 11
    host = prompt_logprobs(logits, targets, 3).to_host()
    distribution = np.log([oracle.softmax(row) for row in logits.double().numpy()])
    assert host.logprobs == pytest.approx(distribution[np.arange(9), targets].tolist(), abs=1e-5)
    assert host.alternative_ids == np.argsort(-distribution, axis=1)[:, :3].tolist()
    np.testing.assert_allclose(host.alternative_logprobs, -np.sort(-distribution, axis=1)[:, :3], atol=1e-5)
    assert host.ranks == [(row > row[target]).sum().item() + 1 for row, target in zip(logits, targets, strict=True)]
    none = prompt_logprobs(logits, targets, 0).to_host()
    assert none.logprobs == host.logprobs
    assert none.alternative_ids == [[]] * 9


@pytest.mark.parametrize("vocab_size", [1, 5, 511, 512, 513, 1000, 2048, 2303])
def test_the_first_highest_wins(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    for levels in (1, 2, 50, 10**6):
        scores = torch.randint(levels, (17, vocab_size), generator=generator).float() - levels // 2
        expected = [row.index(max(row)) for row in scores.tolist()]
        assert arg_max(scores).tolist() == expected
        k = min(vocab_size, 20)
        ranks = [sorted(range(vocab_size), key=lambda token: (-row[token], token))[:k] for row in scores.tolist()]
        assert most_likely(scores, k).tolist() == ranks
        assert _descending(scores).tolist() == [sorted(row, reverse=True) for row in scores.tolist()]


def test_negative_zero_is_zero() -> None:
    assert most_likely(torch.tensor([[-1.0, -0.0, 0.0]]), 3).tolist() == [[1, 2, 0]]


def test_a_row_that_is_not_a_number_leaves_the_others_alone() -> None:
    scores = torch.tensor([[3.0, 1.0, 3.0], [math.nan, 1.0, 2.0], [-math.inf, 0.0, -math.inf]])
    ids = most_likely(scores, 3)
    assert ids[[0, 2]].tolist() == [[0, 2, 1], [1, 0, 2]]
    assert sorted(ids[1].tolist()) == [0, 1, 2]


def test_slow_rows_are_logged_at_each_power_of_two() -> None:
    with structlog.testing.capture_logs() as logs:
        slow = SlowRows()
        for num_rows in (0, 1, 0, 2, 1, 3):
            slow.add(num_rows)
    assert [entry["count"] for entry in logs] == [1, 3, 4]
