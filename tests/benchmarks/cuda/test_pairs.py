"""A pair of random models that write recorded texts, with a chosen acceptance."""

import pytest

from benchmarks.cuda.pairs import NUM_HEADS, Pair
from benchmarks.cuda.setup import SMOKE
from lorikeet.proto.params import NO_SPECULATION, Method, Speculation


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(SMOKE, SMOKE.large, SMOKE.small)


def test_without_drafts_a_step_produces_one_token(pair: Pair) -> None:
    result = pair.run(2, NO_SPECULATION)
    assert result["tau"] == 1.0 and result["drafted"] == 0


@pytest.mark.parametrize(("chance", "tau"), [(0.0, 1.0), (1.0, 3.0)])
def test_a_draft_is_right_as_often_as_it_is_to_be(pair: Pair, chance: float, tau: float) -> None:
    result = pair.run(2, Speculation(Method.DRAFT, 2), chance)
    assert result["drafted"] > 0
    assert result["accepted"] == chance * result["drafted"]
    assert result["tau"] == tau
    assert result["proposing"] > 0 and result["verifying"] > 0


def test_lookup_knows_the_text_and_heads_never_do(pair: Pair) -> None:
    result = pair.run(1, Speculation(Method.LOOKUP, 2))
    assert result["accepted"] == result["drafted"] > 0
    result = pair.run(1, Speculation(Method.MEDUSA, 0, NUM_HEADS))
    assert result["drafted"] > 0 and result["accepted"] == 0
