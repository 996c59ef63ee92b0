"""When a batch leaves: two messages per step at most, the first one as late as it is of use."""

import math

from lorikeet.router.shards.send_timing import LONGEST_GATHER_SECONDS, QUIET_SECONDS, RETURNING_SECONDS, Pacing


def stepping(at: float, seconds: float) -> Pacing:
    pacing = Pacing()
    pacing.step_began(at)
    pacing.step_takes(seconds)
    return pacing


def test_an_idle_shard_gets_the_first_request_at_once() -> None:
    pacing = Pacing()
    pacing.arrived(1.0, is_first=True)
    assert pacing.send_at(1.0, shard_idle=True) == 1.0


def test_after_that_everything_waits_for_the_step() -> None:
    pacing = Pacing()
    pacing.sent()
    pacing.step_takes(0.050)
    assert pacing.send_at(1.001, shard_idle=False) == math.inf


def test_one_message_gathers_until_shortly_before_the_step_ends() -> None:
    pacing = stepping(1.0, 0.020)
    at = pacing.send_at(1.001, shard_idle=False)
    assert 1.015 < at < 1.020
    pacing.sent()
    assert pacing.send_at(1.019, shard_idle=False) == math.inf
    pacing.step_began(1.020)
    assert 1.035 < pacing.send_at(1.021, shard_idle=False) < 1.040


def test_the_shard_may_say_during_a_step_that_it_is_another_than_the_last() -> None:
    pacing = stepping(1.0, 0.020)
    pacing.step_takes(0.200)
    assert 1.15 < pacing.send_at(1.001, shard_idle=False) < 1.2
    pacing.step_takes(0.010)
    assert pacing.send_at(1.001, shard_idle=False) < 1.01


def test_short_and_unknown_steps_are_waited_for() -> None:
    for seconds in (0.0, 0.003):
        assert stepping(1.0, seconds).send_at(1.0, shard_idle=False) == math.inf


def test_a_shard_that_has_just_become_idle_gets_a_burst_together() -> None:
    pacing = Pacing()
    pacing.became_idle(1.0)
    pacing.arrived(1.001, is_first=True)
    assert pacing.send_at(1.001, shard_idle=True) == 1.001 + QUIET_SECONDS
    for millisecond in range(2, 9):
        pacing.arrived(1 + millisecond / 1000, is_first=False)
    assert pacing.send_at(1.008, shard_idle=True) == 1.001 + LONGEST_GATHER_SECONDS
    later = 1.0 + RETURNING_SECONDS + 0.01
    pacing.arrived(later, is_first=True)
    assert pacing.send_at(later, shard_idle=True) == later
