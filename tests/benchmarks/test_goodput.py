"""Adapters of many sizes in little memory: what a probe says, and one small run against real servers."""

import pytest

from benchmarks.adapters import goodput
from benchmarks.load import adapted


def probe(rate: float, first_token_s: float = 1.0, inter_token_s: float = 0.05) -> dict[str, float]:
    return {"rate": rate, "first_token_p99_s": first_token_s, "inter_token_p99_s": inter_token_s}


def test_a_rate_holds_if_both_times_do() -> None:
    raw = {
        goodput.RESIDENT: [probe(3.0), probe(4.0), probe(5.0, first_token_s=2.1)],
        goodput.FIFTH: [probe(3.0), probe(4.0, inter_token_s=0.11)],
    }
    assert goodput.highest_rate(goodput.RESIDENT, raw) == 4.0
    assert goodput.share_of_resident(raw) == 0.75 and goodput.void([raw]) == ""
    slow = {**raw, goodput.RESIDENT: [probe(1.5)]}
    assert "1.5 requests/s" in goodput.void([raw, slow])
    fast = {**raw, goodput.RESIDENT: [probe(goodput.RATES[-1])]}
    assert "highest rate" in goodput.void([fast])


@pytest.mark.long
def test_a_small_search(small: adapted.AdaptedBase) -> None:
    (case,) = goodput.measure(0, small, goodput.QUICK)
    assert case.error == ""
    for server in (goodput.RESIDENT, goodput.FIFTH):
        assert case.raw[server] and all(each["requests"] > 0 for each in case.raw[server])
    assert sum(each["misses"] for each in case.raw[goodput.FIFTH]) > 0
    assert sum(each["misses"] for each in case.raw[goodput.RESIDENT]) == 0
