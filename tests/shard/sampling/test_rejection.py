"""The rejection rule emits exactly the target's distribution at each position, for any distribution of the drafts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.sampling.noise import token_words
from lorikeet.shard.sampling.rejection import rejection_sample
from tests.shard.sampling import oracle
from tests.shard.sampling.drawing import CPU, params
from tests.shard.sampling.oracle import Case

V = 32
N, MANY = 10_000, 60_000
"""So many draws notice a total variation of 0.05 (0.02) with 99 %, and err once in a million."""
SAFE = 1e-6 / 30
RNG = np.random.default_rng(17)
PLAIN = Case()
WORDS = token_words(V, CPU)


def some_logits(number: int) -> np.ndarray:
    return RNG.normal(size=(number, V)).astype(np.float32) * 1.5


def half(first: int) -> np.ndarray:
    """[1, V]: nothing but one half of the vocabulary."""
    logits = np.full((1, V), -1e9, np.float32)
    logits[0, first : first + V // 2] = RNG.normal(size=V // 2)
    return logits


ONE = np.full((1, V), -1e9, np.float32)
ONE[0, 5] = 0.0
P4, Q4 = some_logits(5), some_logits(4)
KERNEL_CASES = {
    "random distributions": (P4[0], Q4[0]),
    "equal distributions": (P4[0], P4[0]),
    "almost equal distributions": (P4[0], P4[0] + 1e-4),
    "distributions without a common token": (half(0)[0], half(V // 2)[0]),
    "a draft that is sure": (P4[0], ONE[0]),
    "a target that is sure": (ONE[0], Q4[0]),
    "a target that is cut": (np.where(P4[0] > 0.5, P4[0], -1e9), Q4[0]),
    "half precision": (P4[0].astype(np.float16).astype(np.float32), Q4[0].astype(np.float16).astype(np.float32)),
}
CASES = {
    "two drafts": (P4[:3], Q4[:2], PLAIN),
    "filters": (P4[:2], Q4[:1], Case(temperature=1.3, top_k=8, top_p=0.9)),
    "temperature": (P4[:2], Q4[:1], Case(temperature=0.5)),
}


@pytest.mark.parametrize("case", KERNEL_CASES.values(), ids=KERNEL_CASES.keys())
def test_what_is_emitted_follows_the_target(case: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = (torch.tensor(logits, dtype=torch.float32).expand(MANY, V) for logits in case)
    draft_probs = torch.softmax(q, dim=-1)
    drafted = torch.multinomial(draft_probs[0], MANY, replacement=True, generator=torch.Generator().manual_seed(5))
    seeds, positions = torch.arange(MANY), torch.full((MANY,), 7)
    found = rejection_sample(p, draft_probs, drafted, seeds, positions, WORDS).numpy()
    distribution = oracle.softmax(case[0].astype(np.float64))
    assert oracle.fit(np.bincount(found, minlength=V), distribution) > SAFE
    overlap = np.minimum(distribution, oracle.softmax(case[1].astype(np.float64))).sum()
    stood = (found == drafted.numpy()).mean()
    assert abs(stood - overlap) <= 5 * np.sqrt(overlap * (1 - overlap) / MANY) + 1e-3


def emitted(p: np.ndarray, q: np.ndarray, case: Case, num_rows: int = N) -> tuple[np.ndarray, np.ndarray]:
    """p: [γ + 1, V], q: [γ, V]. Returns [N, γ + 1] tokens of requests with distinct seeds, and [N] how many of them are
    emitted.
    """
    width, rows = len(q), list(range(num_rows))
    sampler = Sampler(V, num_rows, CPU)
    for row in rows:
        sampler.add(row, params(case, seed=row), LogprobParams(), [1, 2], 1, rejects=True)
    draws = sampler.begin_drafts()
    for depth in range(width):
        logits = torch.tensor(q[depth], dtype=torch.float32).expand(num_rows, -1).contiguous()
        draws.draw(logits, rows, [2 + depth] * num_rows)
    draws.restore()
    drafts = draws.to_host()
    logits = torch.tensor(p, dtype=torch.float32).repeat(num_rows, 1)
    found = sampler.verify(logits, rows, [2] * num_rows, [drafts[row] for row in rows], draws).token_ids
    tokens = found.view(num_rows, width + 1).numpy()
    drafted = np.array([drafts[row] for row in rows])
    stood = np.cumprod(tokens[:, :width] == drafted, axis=1)
    return tokens, 1 + stood.sum(1)


@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[name], id=name, marks=pytest.mark.long if name == "filters" else ()) for name in CASES],
)
def test_every_position_follows_the_target(case: tuple[np.ndarray, np.ndarray, Case]) -> None:
    p, q, transforms = case
    tokens, counts = emitted(p, q, transforms)
    for position, logits in enumerate(p):
        distribution = oracle.distribution(logits, transforms, [1], [2])
        here = tokens[counts > position, position]
        if len(here) > 500:
            assert oracle.fit(np.bincount(here, minlength=V), distribution) > SAFE


def test_equal_distributions_reject_nothing() -> None:
    _, counts = emitted(P4, P4[:4], Case(temperature=0.8, top_p=0.9), 500)
    assert (counts == 5).all()


def test_neighbouring_positions_are_independent() -> None:
    tokens, counts = emitted(np.repeat(P4[:1], 3, 0), P4[:2] * 0.9, PLAIN)
    distribution = oracle.distribution(P4[0], PLAIN, [1], [2])
    both = tokens[counts > 2]
    table = np.bincount(both[:, 1] * V + both[:, 2], minlength=V * V).reshape(V, V)
    first = table.sum(1) / table.sum()
    assert oracle.fit(table.ravel(), np.outer(first, distribution).ravel()) > 1e-6


def test_without_a_residual_the_target_is_sampled() -> None:
    """Rounding may reject where the two distributions are equal: then there is no residual to draw from."""
    scores = torch.tensor(P4[:1]).repeat(64, 1)
    distribution = torch.softmax(scores, dim=-1)
    seeds, positions = torch.arange(64), torch.zeros(64, dtype=torch.long)
    found = rejection_sample(
        scores, distribution * 3, torch.zeros(64, dtype=torch.long), seeds, positions, token_words(V, CPU)
    )
    assert found.min() >= 0 and found.unique().numel() > 3


def test_greedy_rows_take_no_part() -> None:
    sampler = Sampler(V, 1, CPU)
    sampler.add(0, SamplingParams(), LogprobParams(), [1, 2], 1, rejects=True)
    draws = sampler.begin_drafts()
    draws.draw(torch.tensor(Q4[:1]), [0], [2])
    found = sampler.verify(torch.tensor(P4[:2]), [0], [2], [draws.to_host()[0]], draws).token_ids
    assert found.tolist() == P4[:2].argmax(1).tolist()


def test_drafts_leave_the_state_as_it_was() -> None:
    """A request with penalties and watermark draws the same token whether or not something was drafted before."""
    sampling = replace(params(Case(repetition_penalty=1.5, frequency_penalty=0.5), seed=3), watermark=True)
    tokens = []
    for is_drafting in (False, True):
        sampler = Sampler(V, 1, CPU)
        sampler.add(0, sampling, LogprobParams(), [1, 2, 2], 1)
        if is_drafting:
            draws = sampler.begin_drafts()
            for depth in range(3):
                draws.draw(torch.tensor(Q4[depth : depth + 1]), [0], [3 + depth])
            draws.restore()
        tokens.append([sampler.sample(torch.tensor(P4[i : i + 1]), [0], [3 + i]).token_ids.item() for i in range(4)])
    assert tokens[0] == tokens[1]
