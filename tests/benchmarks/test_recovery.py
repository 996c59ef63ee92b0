"""How the measurement of harms judges what it saw."""

import signal

import pytest

from benchmarks.recovery import SETTLE_S, Answer, gap, harmed, kinds, unsound

DETAILS = {
    "generated_tokens": 3,
    "speculation": {"sources": {"target": 1, "lookup": 2}, "accepted": 2, "drafted": 4},
}


def test_a_gap_is_the_longest_silence_around_a_harm() -> None:
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


def test_the_load_is_of_every_kind() -> None:
    asked = kinds()
    assert len(asked) == len({repr(kind) for kind in asked}) == 16
    for adapter in (None, "json", "sql", "cite"):
        methods = [
            kind.parameters["speculative_method"] for kind in asked if kind.parameters.get("adapter_id") == adapter
        ]
        assert methods == ["off", "lookup", "draft", "medusa"]
    assert sum("seed" in kind.parameters for kind in asked) == 8


@pytest.mark.long
def test_a_shard_is_killed_and_nobody_notices() -> None:
    case = harmed(signal.SIGKILL, 1, 0)
    assert (case.error, case.raw["wrong"]) == ("", [])
    assert case.raw["answers"] > 8 and len(case.raw["harms"]) == 1
