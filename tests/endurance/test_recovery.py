"""Faults under load, receipts that are replayed, and a long run: every answer is what it is without a fault."""

import json
import random
import signal
from collections import Counter

import pytest

from tests.endurance import faults, receipts, soak
from tests.endurance.faults import SETTLE_S, Answer, gap, kinds, run_with_faults, unsound
from tests.endurance.receipts import ADAPTERS, METHODS, RECEIPTS, ROUTES, differences, wanted
from tests.launcher.cli import test_client
from tests.launcher.cli.test_replay import receipt

DETAILS = {"generated_tokens": 3, "speculation": {"sources": {"target": 1, "lookup": 2}, "accepted": 2, "drafted": 4}}
ROUTER_GROWTH = 0.02
"""Maximum growth of the router's memory after the first fifth of the long run."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "number", "case"),
    [
        (signal.SIGKILL, 1, 0),
        *((signal.SIGKILL, faults.FAULTS_PER_CASE, case) for case in range(faults.KILLS // faults.FAULTS_PER_CASE)),
        *((signal.SIGSTOP, faults.FAULTS_PER_CASE, case) for case in range(faults.STOPS // faults.FAULTS_PER_CASE)),
        *((signal.SIGUSR2, faults.FAULTS_PER_CASE, case) for case in range(faults.ROLLS // faults.FAULTS_PER_CASE)),
    ],
)
def test_faults_change_no_answer(fault: signal.Signals, number: int, case: int) -> None:
    found = run_with_faults(fault, number, case)
    assert (found.error, found.raw["wrong"]) == ("", [])
    assert found.raw["answers"] > 8 and len(found.raw["faults"]) == number


@pytest.mark.long
@pytest.mark.parametrize(("number", "count"), [(0, 8), *((number, RECEIPTS) for number in range(receipts.CASES))])
def test_receipts_replay_identically_on_loaded_replicas_and_elsewhere(number: int, count: int) -> None:
    found = receipts.case(number, count)
    assert found.raw["receipts"] == count
    assert (found.raw["different_on_replicas"], found.raw["different_elsewhere"]) == ([], [])


@pytest.mark.long
@pytest.mark.parametrize("count", [2_000, soak.REQUESTS])
def test_a_long_run_with_faults_answers_rightly_and_releases_everything(count: int) -> None:
    found = soak.soaked(count)
    assert (found.error, found.raw["wrong"]) == ("", [])
    assert soak.num_kept(found.raw) == 0
    assert found.raw["faults"]
    if count == soak.REQUESTS:
        assert soak.growth(found.raw) <= ROUTER_GROWTH


def test_a_gap_is_the_longest_pause_around_a_fault() -> None:
    before, across = Answer(0, [0.0, 5.0]), Answer(0, [8.0, 9.5, 11.0, 11.2])
    waiting, late = Answer(0, [10.5, 12.75]), Answer(0, [10.0 + SETTLE_S + 0.1, 99.0])
    assert gap([before, across, waiting, late], 10.0) == 2.25
    assert gap([before, across], 10.0) == 1.5
    assert gap([before], 10.0) == 0.0


def test_counts_must_agree_with_the_tokens() -> None:
    assert unsound(DETAILS, 3) == ""
    assert unsound({"generated_tokens": 3}, 3) == ""
    assert unsound(DETAILS, 4) == "generated_tokens"
    assert unsound(DETAILS | {"generated_tokens": 2}, 2) == "sources"
    assert unsound(DETAILS | {"speculation": {**DETAILS["speculation"], "drafted": 1}}, 3) == "accepted"  # type: ignore[dict-item]


def test_the_load_has_every_kind_of_stream() -> None:
    asked = kinds()
    assert len(asked) == len({repr(kind) for kind in asked}) == 16
    for adapter in (None, "json", "sql", "cite"):
        own = [kind.parameters for kind in asked if kind.parameters.get("adapter_id") == adapter]
        assert [parameters["speculative_method"] for parameters in own] == ["off", "lookup", "draft", "medusa"]
    assert sum("seed" in kind.parameters for kind in asked) == 8


def test_receipts_are_of_every_kind_of_request() -> None:
    draw = random.Random(receipts.SEED)
    asked = [wanted(draw, number) for number in range(RECEIPTS)]
    assert len({repr(each) for each in asked}) > 0.9 * RECEIPTS
    fields = [body.get("parameters", body) for _, body in asked]
    assert set(Counter(route for route, _ in asked)) == set(ROUTES)
    pairs = Counter((each["speculative_method"], each.get("adapter_id") or each.get("model")) for each in fields)
    assert len(pairs) >= len(METHODS) * len(ADAPTERS)
    assert {each.get("seed") is None for each in fields} == {True, False}
    assert {each["temperature"] == 0 for each in fields} == {True, False}


@pytest.mark.parametrize(("again", "said"), [([4, 5, 6, 7], []), ([4, 5], ["different from token 2 on"])])
def test_replays_with_other_tokens_are_reported(again: list[int], said: list[str]) -> None:
    given = [receipts.SavedReceipt.read(receipt()) for _ in range(3)]
    answer = test_client.Scripted(body=json.dumps({"receipt": receipt(output=again)}).encode())
    with test_client.serving(answer) as client:
        found = differences(client, given)
    assert [line.partition(":")[0] for line in found] == said * 3
