"""One small round of loads, waits and tiers against real servers, and what figures they give."""

import pytest

from benchmarks.adapters import loading, tiers
from benchmarks.load import adapted, completions


@pytest.mark.long
def test_a_small_round_of_loads(small: adapted.AdaptedBase) -> None:
    (case,) = loading.measure(base=small, size=loading.QUICK)
    assert case.error == ""
    assert len(case.raw["waiting"]["first_token_s"]) == loading.QUICK.num_cold
    assert all(case.raw["next to"][way]["gaps"] > 0 for way in ("cold", "resident"))
    assert loading.over_plain(case.raw) > 0 and loading.active(case.raw) > 0


def test_gaps_count_where_they_lie_within() -> None:
    answers = [
        completions.TimedCompletion(0.0, times=[1.0, 2.0, 4.0, 7.0]),
        completions.TimedCompletion(0.0, times=[1.5, 3.0]),
    ]
    assert loading._gaps(answers, 1.5, 5.0) == [2.0, 1.5]


@pytest.mark.long
def test_every_tier_is_met(small: adapted.AdaptedBase) -> None:
    (case,) = tiers.measure(base=small, size=tiers.QUICK)
    assert case.error == ""
    assert [len(case.raw[place]) for place in ("resident", "host", "disk")] == [tiers.QUICK.times] * 3
