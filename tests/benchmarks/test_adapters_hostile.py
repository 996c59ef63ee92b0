"""Some hostile adapters against a real server, every question of the wrong tenant, and what counts as wrong."""

import pytest

from benchmarks import adapters_hostile, adapters_tenants
from tests.adapters.hostile import CASES


@pytest.mark.long
def test_a_batch_is_refused_and_nothing_stays() -> None:
    (case,) = adapters_hostile.measure(batches=1, fuzzed=4)
    assert case.error == ""
    assert (case.raw["wrong"], adapters_hostile.held(case.raw)) == ([], 0)
    assert case.raw["texts_meanwhile"] > 0


def test_batches_send_every_broken_adapter() -> None:
    assert len(CASES) >= 40
    places = [
        place
        for number in range(adapters_hostile.BATCHES)
        for place in range(len(CASES))[number :: adapters_hostile.BATCHES]
    ]
    assert sorted(places) == list(range(len(CASES)))


@pytest.mark.long
def test_the_other_tenant_gets_nothing() -> None:
    cases = list(adapters_tenants.measure())
    assert [case.name for case in cases] == list(adapters_tenants.PLACES)
    assert [(case.error, case.raw["wrong"]) for case in cases] == [("", [])] * len(cases)
    assert all(adapters_tenants.num_wrong(case.raw) == 0 for case in cases)
