"""The replay oracle: cases counted by hand, every pattern of chances by brute force, and the engine's own counts."""

import random
from itertools import product
from math import prod

import pytest

from lorikeet.proto.params import Method, SamplingParams, Speculation
from lorikeet.shard.speculation.drafter import DraftSettings
from lorikeet.shard.speculation.lookup import Lookup
from tests.oracles.replay import (
    NOTHING,
    Chain,
    Counts,
    Known,
    LongestSuffix,
    Table,
    Text,
    coupled_chance,
    expected,
    fitted_chance,
    fitted_cost,
    iid_tokens_per_step,
    lorax,
    replay,
    share_repeated,
)
from tests.shard.rig import Rig, Setup, make_request

PUBLISHED = (1.96, 2.89, 3.77, 4.63, 5.44, 6.23, 6.94, 7.64, 8.33, 9.00)
"""LMFlow's tokens per forward with 1 … 10 drafts."""
THREE_TOKENS = SamplingParams(logit_bias=((0, 50.0), (1, 50.0), (4, 50.0)))
PUBLISHED_TIMES = (1.75, 2.29, 2.71, 3.06, 3.35, 3.65, 3.82, 3.96, 4.05, 4.14)


def test_a_chain_by_hand() -> None:
    text = Text((9,), (1, 2, 3, 4, 5, 6, 7), 7)
    # 1 | 2 3 and 4 instead of 0 | 5 6 and then 7, for which nothing may be drafted
    counts = replay(text, Chain((1, 2, 3, 0, 5, 6, 7)), 3)
    assert counts == Counts(tokens=7, forwards=3, drafted=5, accepted=4, texts=1)
    assert counts.tokens_per_step == 3.0
    assert counts.share_accepted == 0.8


def test_a_text_that_ends_inside_a_draft() -> None:
    text = Text((9,), (1, 2, 3), 20)
    counts = replay(text, Chain((1, 2, 3)), 4)
    assert counts == Counts(tokens=3, forwards=2, drafted=4, accepted=2, texts=1)


def test_heads_draft_from_the_row_of_the_newest_token() -> None:
    text = Text((9,), (1, 2, 3, 4, 5), 5)
    table = Table(((2, 0, 4), (0, 0, 0), (4, 5, 0), (5, 0, 0), ()))
    # 1 | 2, 3 instead of 0 | 4, for 5 nothing may be drafted
    assert replay(text, table, 3) == Counts(5, 3, 3 + 1, 1 + 1, 1)
    assert replay(text, table, 0) == Counts(5, 5, 0, 0, 1)


def test_lorax_takes_the_first_occurrence_of_one_token_before_the_last_step() -> None:
    assert lorax(Known((5, 6, 7, 5, 8, 5), 2, 1), 3) == [6, 7, 5]
    assert lorax(Known((5, 6, 7, 9), 2, 1), 3) == [6, 7, 7]  # no match: from the beginning on, then the last again
    assert lorax(Known((5, 6, 7, 7), 2, 2), 2) == [6, 6]  # the last step's own tokens are not looked at
    text = Text((1, 2, 3), (1, 2, 3), 3)
    # 1 is given by the prompt's step, then 2 3 are right; the third draft is computed for nothing
    assert replay(text, lorax, 3, is_bounded=False) == Counts(3, 2, 3, 2, 1)


@pytest.mark.parametrize("before", [(), (1, 2, 3, 4, 1, 2), (3, 3, 3)])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 8), (2, 4), (3, 3)])
def test_plain_search_finds_what_the_index_finds(shortest: int, longest: int, before: tuple[int, ...]) -> None:
    rule, choice, num_found = LongestSuffix(shortest, longest, before), random.Random(4), 0
    for _ in range(60):
        ids = [choice.randrange(4) for _ in range(choice.randrange(1, 40))]
        index = Lookup(ids[:1], shortest, longest, before)
        index.extend(ids[1:])
        draft_token = index.propose(5)
        assert list(rule(Known(ids, 1, 1), 5)) == draft_token
        num_found += bool(draft_token)
    assert num_found > 10


@pytest.mark.parametrize("width", [1, 3, 5, 10])
def test_counts_are_the_engine_s(width: int) -> None:
    choice = random.Random(width)
    found = oracle = NOTHING
    for number in range(12):
        prompt = [choice.randrange(6) for _ in range(choice.randrange(1, 30))]
        asked = {"speculation": Speculation(Method.LOOKUP, width), "sampling": THREE_TOKENS}
        request = make_request(1, prompt, choice.randrange(1, 40), stop_ids=frozenset({number}), **asked)
        output = Rig(Setup(drafts=DraftSettings())).run(request)[1]
        text = Text(tuple(prompt), tuple(output.token_ids), request.max_new_tokens)
        drafted = output.num_drafted if isinstance(output.num_drafted, int) else sum(output.num_drafted)
        found += Counts(len(output.token_ids), output.step_ends.count(1), drafted, output.num_accepted, 1)
        oracle += replay(text, LongestSuffix(), width)
    assert found == oracle
    assert oracle.accepted > 0


@pytest.mark.parametrize("width", [1, 2, 3, 7])
@pytest.mark.parametrize("max_new_tokens", [6, 9])
def test_expectations_are_those_of_all_patterns(width: int, max_new_tokens: int) -> None:
    chances = [0.3, 0.9, 0.5, 1.0, 0.2, 0.7]
    text = Text((0,), (1, 2, 3, 4, 5, 6), max_new_tokens)
    found, square = NOTHING, 0.0
    for bits in product((0, 1), repeat=6):
        weight = prod(c if bit else 1 - c for c, bit in zip(chances, bits, strict=True))
        best = [token_id if bit else -1 for token_id, bit in zip(text.output_ids, bits, strict=True)]
        one = replay(text, Chain(best), width)
        found += Counts(0, weight * one.forwards, weight * one.drafted, weight * one.accepted)
        square += weight * one.forwards**2
    oracle = expected(text, chances, width)
    assert oracle.forwards == pytest.approx(found.forwards)
    assert oracle.drafted == pytest.approx(found.drafted)
    assert oracle.accepted == pytest.approx(found.accepted)
    assert oracle.variance == pytest.approx(square - found.forwards**2)


def test_coupled_chance_is_that_of_common_noise() -> None:
    choice = random.Random(1)
    p, q = [0.5, 0.3, 0.15, 0.05], [0.2, 0.5, 0.3, 0.0]
    drawn = [[choice.expovariate(1) for _ in p] for _ in range(20_000)]
    pairs = [
        tuple(
            min(range(4), key=lambda i: noise[i] / distribution[i] if distribution[i] else 1e9)
            for distribution in (p, q)
        )
        for noise in drawn
    ]
    for token_id in range(3):
        own = [pair for pair in pairs if pair[0] == token_id]
        share = sum(pair[1] == token_id for pair in own) / len(own)
        assert share == pytest.approx(coupled_chance(p, q, token_id), abs=0.02)
    assert coupled_chance(p, q, 3) == 0.0
    assert coupled_chance(p, p, 0) == pytest.approx(1.0)


def test_lmflow_s_table_is_a_curve_of_two_parameters() -> None:
    rows = list(enumerate(PUBLISHED, 1))
    assert fitted_chance(rows) == pytest.approx(0.959, abs=0.001)
    assert max(abs(iid_tokens_per_step(0.959, width) - tau) for width, tau in rows) < 0.035
    times = [(width, tau, faster) for (width, tau), faster in zip(rows, PUBLISHED_TIMES, strict=True)]
    assert fitted_cost(times) == pytest.approx(0.122, abs=0.001)


def test_a_standard_error_is_what_texts_spread_by() -> None:
    choice, chance = random.Random(2), 0.8
    texts = [Text((0,), tuple(range(400)), 400)] * 200
    found = [replay(text, Chain([i if choice.random() < chance else -1 for i in range(400)]), 4) for text in texts]
    taus = [counts.tokens_per_step for counts in found]
    mean = sum(taus) / len(taus)
    spread = (sum((tau - mean) ** 2 for tau in taus) / len(taus)) ** 0.5
    oracle = expected(texts[0], [chance] * 400, 4)
    assert mean == pytest.approx(oracle.tokens_per_step, abs=4 * spread / len(taus) ** 0.5)
    assert spread == pytest.approx(oracle.standard_error, rel=0.2)


def test_what_repeats_is_counted_where_its_run_ends() -> None:
    assert share_repeated(Text((1, 2, 3), (4, 1, 2, 3, 5), 5), 3) == 1 / 5
    assert share_repeated(Text((1, 2, 1, 2), (1, 2, 1), 3), 2) == 1.0
    assert share_repeated(Text((), (1, 2, 3), 3), 2) == 0.0
