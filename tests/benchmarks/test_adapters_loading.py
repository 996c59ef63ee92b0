"""One small round of loads, waits and tiers against real servers, and what figures they give."""

import pytest

from benchmarks import adapted, adapters_loading, adapters_tiers, load


@pytest.mark.long
def test_a_small_round_of_loads(small: adapted.Base) -> None:
    (case,) = adapters_loading.measure(base=small, size=adapters_loading.QUICK)
    assert case.error == ""
    assert len(case.raw["waiting"]["first_token_s"]) == adapters_loading.QUICK.num_cold
    assert all(case.raw["beside"][way]["gaps"] > 0 for way in ("cold", "resident"))
    assert adapters_loading.over_plain(case.raw) > 0 and adapters_loading.active(case.raw) > 0


def test_gaps_count_where_they_lie_within() -> None:
    answers = [load.Answer(0.0, [1.0, 2.0, 4.0, 7.0]), load.Answer(0.0, [1.5, 3.0])]
    assert adapters_loading._gaps(answers, 1.5, 5.0) == [2.0, 1.5]


@pytest.mark.long
def test_every_tier_is_met(small: adapted.Base) -> None:
    (case,) = adapters_tiers.measure(base=small, size=adapters_tiers.QUICK)
    assert case.error == ""
    assert [len(case.raw[place]) for place in ("resident", "host", "disk")] == [adapters_tiers.QUICK.times] * 3
