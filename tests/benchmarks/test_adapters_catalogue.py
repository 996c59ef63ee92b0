"""A round of the catalogue, two switches and a few known aliases against real servers."""

import pytest

from benchmarks import adapted, adapters_catalogue, adapters_known, adapters_switch


@pytest.mark.long
def test_exactly_the_broken_ones_are_named_and_not_served(small: adapted.Base) -> None:
    (case,) = adapters_catalogue.measure(base=small, rounds=1)
    assert (adapters_catalogue.num_misjudged(case.raw), adapters_catalogue.num_unlike(case.raw)) == (0, 0), case.raw
    assert case.raw["served"]["answered"] == 195


def test_what_is_counted_as_misjudged() -> None:
    assert adapters_catalogue.num_misjudged({"misjudged": ["a"], "rows": 199, "code": 0}) == 3


@pytest.mark.long
def test_switches_lose_nothing() -> None:
    cases = list(adapters_switch.measure(switches=2))
    assert [case.raw["wrong"] for case in cases] == [[], []]
    assert all(case.error == "" and case.raw["answers"] >= adapters_switch.ANSWERS_EACH for case in cases)


@pytest.mark.long
def test_known_aliases_are_listed_and_answer() -> None:
    (case,) = adapters_known.measure(count=20, asked=4)
    assert (case.error, case.raw["listed"], case.raw["wrong"]) == ("", 20, 0)
