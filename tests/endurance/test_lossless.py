"""Losslessness at full size, and the comparison of answers with and without speculation on answers made up."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.speculation import counts
from tests.endurance import lossless
from tests.endurance.lossless import Plain, compared
from tests.oracles.family import KINDS, METHODS, FamilyAnswer, TextRequest
from tests.oracles.replay import Text

PLAIN = FamilyAnswer("abcabc", (1, 2, 3, 1, 2, 3), (-0.5,) * 6, 3, 0, {})
REPORT: dict[str, Any] = {
    "method": "lookup", "steps": 3, "drafted": 6, "accepted": 3,
    "sources": {"prefill": 1, "lookup": 3, "resample": 1, "bonus": 1, "target": 0},
}  # fmt: skip
ROW = Plain(TextRequest("abc", KINDS["code"], 6), PLAIN, Text((1, 2, 3), PLAIN.token_ids, 6))


METHOD_CASES = [(lossless.alone, (method,)) for method in METHODS] + [(lossless.mixed, ())]


@pytest.mark.long
@pytest.mark.parametrize("size", [lossless.QUICK, lossless.Size()], ids=["quick", "full"])
@pytest.mark.parametrize(("measure", "method"), METHOD_CASES, ids=[*METHODS, "mixed"])
def test_speculation_changes_no_text(measure: Any, method: tuple[str, ...], size: lossless.Size) -> None:
    for case in measure(*method, size=size):
        assert case.error == ""
        assert (lossless.num_wrong(case.raw), lossless.num_miscounted(case.raw)) == (0, 0), case.raw
        assert lossless.ties_beyond_allowed(case.raw) == 0
        assert case.raw["logprob_error"] <= 1e-4


@pytest.mark.long
@pytest.mark.parametrize("size", [counts.QUICK, counts.CountsSize()], ids=["quick", "full"])
def test_sampled_drafts_take_the_expected_steps(size: counts.CountsSize) -> None:
    for case in counts.sampled(size):
        assert case.error == ""
        assert counts.distance(case.raw) <= 3.0


@pytest.mark.long
@pytest.mark.parametrize("size", [counts.QUICK, counts.CountsSize()], ids=["quick", "full"])
@pytest.mark.parametrize("measure", [counts.gamma, counts.copied, counts.uncopied, counts.medusa])
def test_counts_of_the_published_tables_are_the_oracles(measure: Any, size: counts.CountsSize) -> None:
    for case in measure(size):
        assert case.error == ""
        assert counts.num_miscounted(case.raw) == 0, case.raw


def case_of(**values: Any) -> Any:
    given = {"skipped": 3, "report": {**REPORT, "steps": 3, "drafted": 3}, **values}
    return compared("lookup 3", [ROW], [replace(PLAIN, **given)], [("lookup", 3)])


def test_an_equal_text_with_the_oracle_s_counts_is_right() -> None:
    # 1 | 2 3 1 and then 2 | 3, for which nothing may be drafted
    case = case_of()
    assert case.error == ""
    assert (case.raw["different"], case.raw["faults"], case.raw["counted"]) == (0, 0, 1)
    assert case.raw["miscounted"] == 0, case.raw["miscounts"]
    assert lossless.num_wrong(case.raw) == lossless.num_miscounted(case.raw) == 0


def test_what_is_wrong_is_counted() -> None:
    assert lossless.num_wrong(case_of(token_ids=(1, 2, 3, 1, 2, 4)).raw) == 1
    assert lossless.num_wrong(case_of(text="abcabd").raw) == 1
    assert lossless.num_wrong(case_of(skipped=2).raw) == 1
    assert lossless.num_wrong(case_of(report={**REPORT, "drafted": 3, "accepted": 2}).raw) == 1
    assert lossless.num_miscounted(case_of(report={**REPORT, "drafted": 4}).raw) == 1
    idle = {**REPORT, "drafted": 0, "accepted": 0, "sources": {"prefill": 1, "target": 5}, "steps": 6}
    assert case_of(report=idle, skipped=0).error != ""


def test_requests_come_in_every_kind_of_text_and_sampling() -> None:
    asked = lossless.requests(lossless.NUM_PROMPTS)
    assert len(asked) >= 200
    assert {(each.kind.name, lossless.DISTRIBUTIONS.index(each.distribution)) for each in asked} == {
        (kind, distribution) for kind in KINDS for distribution in range(len(lossless.DISTRIBUTIONS))
    }
    assert len({each.prompt for each in asked}) > 160  # one kind repeats another's prompts


def test_over_all_rotations_each_request_comes_with_every_method_and_width() -> None:
    for place in (0, 17, 203):
        assert {lossless.how(place, turn) for turn in range(len(lossless.COMBINATIONS))} == set(lossless.COMBINATIONS)
    kinds = list(KINDS)
    met = {(kinds[place % len(kinds)], lossless.how(place, 0)) for place in range(lossless.NUM_PROMPTS)}
    assert len(met) == len(kinds) * len(lossless.COMBINATIONS)
