"""Adapters of a server at full size: broken ones in a catalogue, revisions that change under load, and tenants."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.load import adapted
from tests.endurance import adapter_switch, catalogue, tenants

ASKS_AT_LEAST = 30


@pytest.mark.long
@pytest.mark.parametrize("base", ["small", "full"])
def test_exactly_the_broken_adapters_are_named_and_not_served(base: str, tmp_path: Path) -> None:
    """`small` is the size of the unit tests' models, `full` the 200 M Llama of the benchmarks."""
    chosen = adapted.full() if base == "full" else adapted.small(tmp_path)
    with catalogue.written(chosen, tmp_path) as (path, broken):
        report = catalogue.checked(chosen, path, broken)
        served = asyncio.run(catalogue.served(chosen, path, broken))
    assert (report["misjudged"], report["rows"], report["code"]) == ([], catalogue.COUNT, 1)
    assert (served["wrong"], served["answered"]) == ([], catalogue.COUNT - len(catalogue.PLACES))


@pytest.mark.long
@pytest.mark.parametrize("switches", [2, adapter_switch.SWITCHES])
def test_revisions_switch_under_load_without_a_wrong_answer(switches: int) -> None:
    cases = list(adapter_switch.measure(switches))
    assert len(cases) == switches
    assert all(case.error == "" and case.raw["wrong"] == [] for case in cases)
    assert all(case.raw["answers"] >= adapter_switch.ANSWERS_EACH for case in cases)


@pytest.mark.long
def test_a_tenant_gets_nothing_of_anothers_private_adapter() -> None:
    cases = list(tenants.measure())
    assert [case.name for case in cases] == list(tenants.PLACES)
    assert [(case.error, case.raw["wrong"]) for case in cases] == [("", [])] * len(cases)
    assert all(case.raw["asks"] >= ASKS_AT_LEAST for case in cases)
