"""One small round of each measurement of cost against real servers, and what figures it gives."""

from dataclasses import replace

import pytest

from benchmarks.adapters import cost
from benchmarks.load import adapted, rounds


@pytest.mark.long
def test_a_small_round_asks_in_every_way(small: adapted.AdaptedBase) -> None:
    (case,) = cost.measure(base=small, size=cost.QUICK)
    assert case.error == ""
    for way in ("base", "attention", "all", "rotation"):
        assert case.raw[way]["requests"] == cost.CLIENTS
        assert rounds.speedup(way, "base", case.raw) > 0


@pytest.mark.long
def test_a_small_round_with_two_ranks(small: adapted.AdaptedBase) -> None:
    (case,) = cost.mixed_ranks(small, cost.QUICK)
    assert case.error == "" and case.raw["mixed"]["requests"] == case.raw["small"]["requests"] == cost.CLIENTS / 2
    assert cost.small_over_alone(case.raw) > 0


def test_only_some_clients_count() -> None:
    """Answers come client by client."""
    size = replace(cost.QUICK, requests_per_client=3)
    assert [cost.client_of(place, size) for place in (0, 2, 3, 23)] == [0, 0, 1, 7]


def test_rotation_comes_to_every_adapter() -> None:
    size = cost.CostSize()
    names = [name for number in range(11) for name in cost.standard_ways(number, "m", size)["rotation"][1]]
    assert len(set(names)) == cost.NUM_ROTATING


def test_share_without_an_adapter_is_that_of_time() -> None:
    raw = {"bare 0": 10.0, "roomy 1": 9.0, "roomy 2": 9.0, "bare 3": 8.0}
    result = {way: {"tokens_per_second": rate} for way, rate in raw.items()} | {"load_average": 1.0}
    assert cost.idle_share(result) == pytest.approx((1 / 10 + 1 / 8) / (2 / 9))
