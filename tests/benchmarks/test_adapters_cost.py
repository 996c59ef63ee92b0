"""One small round of each measurement of cost against real servers, and what figures it gives."""

import pytest

from benchmarks import adapted, adapters_cost


@pytest.mark.long
def test_a_small_round_asks_in_every_way(small: adapted.Base) -> None:
    (case,) = adapters_cost.measure(base=small, size=adapters_cost.QUICK)
    assert case.error == ""
    for way in ("base", "attention", "all", "rotation"):
        assert case.raw[way]["requests"] == adapters_cost.CLIENTS
        assert adapters_cost.share(way, "base", case.raw) > 0


def test_rotation_comes_to_every_adapter() -> None:
    size = adapters_cost.Size()
    asked = [name for number in range(11) for name in adapters_cost._ways(number, "m", size)["rotation"][1]]
    assert len(set(asked)) == adapters_cost.NUM_ROTATING


def test_share_without_an_adapter_is_that_of_time() -> None:
    raw = {"bare 0": 10.0, "roomy 1": 9.0, "roomy 2": 9.0, "bare 3": 8.0}
    told = {way: {"tokens_per_second": rate} for way, rate in raw.items()} | {"load_average": 1.0}
    assert adapters_cost.idle_share(told) == pytest.approx((1 / 10 + 1 / 8) / (2 / 9))
