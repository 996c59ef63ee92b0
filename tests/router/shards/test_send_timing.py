"""When a batch leaves: as late as it is of use for the next step, and at the beginning of a step that made room."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.config import RouterConfig
from lorikeet.router.shards.link import (
    LONGEST_GATHER_SECONDS,
    OPEN,
    QUIET_SECONDS,
    RETURNING_SECONDS,
    SendTiming,
    ShardLink,
)


def stepping(at: float, seconds: float) -> SendTiming:
    timing = SendTiming()
    timing.on_step(at)
    timing.set_step_time(seconds)
    return timing


def test_an_idle_shard_gets_the_first_request_at_once() -> None:
    timing = SendTiming()
    timing.on_arrival(1.0, is_first=True)
    assert timing.send_at(1.0, shard_idle=True) == 1.0


def test_a_shard_whose_requests_all_wait_for_their_grammars_is_idle(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/shard.sock"
    link = ShardLink(0, address, "", OPEN, RouterConfig("m", str(tmp_path), (address,)))
    running: Any = SimpleNamespace()
    link.running[1] = running
    for is_stalled in (False, True, False):
        link.update(pb.StepOutput(load=pb.Load(num_running=1, is_stalled=is_stalled)), 1.0)
        assert link.is_idle is is_stalled


def test_later_requests_wait_for_the_step() -> None:
    timing = SendTiming()
    timing.on_send(1.0)
    timing.set_step_time(0.050)
    assert timing.send_at(1.001, shard_idle=False) == math.inf


def test_one_message_gathers_until_shortly_before_the_step_ends() -> None:
    timing = stepping(1.0, 0.020)
    at = timing.send_at(1.001, shard_idle=False)
    assert 1.015 < at < 1.020
    timing.on_send(at)
    assert timing.send_at(1.019, shard_idle=False) == math.inf
    timing.on_step(1.020)
    assert 1.035 < timing.send_at(1.021, shard_idle=False) < 1.040


def test_a_request_reaches_the_next_step_although_others_left_at_the_beginning_of_this_one() -> None:
    timing = stepping(1.0, 0.020)
    timing.on_send(1.0)
    assert 1.015 < timing.send_at(1.003, shard_idle=False) < 1.020


def test_the_step_time_may_be_updated_during_the_step() -> None:
    timing = stepping(1.0, 0.020)
    timing.set_step_time(0.200)
    assert 1.15 < timing.send_at(1.001, shard_idle=False) < 1.2
    timing.set_step_time(0.010)
    assert timing.send_at(1.001, shard_idle=False) < 1.01


def test_short_and_unknown_steps_are_waited_for() -> None:
    for seconds in (0.0, 0.003):
        assert stepping(1.0, seconds).send_at(1.0, shard_idle=False) == math.inf


def test_a_shard_that_has_just_become_idle_gets_a_burst_together() -> None:
    timing = SendTiming()
    timing.on_idle(1.0)
    timing.on_arrival(1.001, is_first=True)
    assert timing.send_at(1.001, shard_idle=True) == 1.001 + QUIET_SECONDS
    for millisecond in range(2, 9):
        timing.on_arrival(1 + millisecond / 1000, is_first=False)
    assert timing.send_at(1.008, shard_idle=True) == 1.001 + LONGEST_GATHER_SECONDS
    later = 1.0 + RETURNING_SECONDS + 0.01
    timing.on_arrival(later, is_first=True)
    assert timing.send_at(later, shard_idle=True) == later
