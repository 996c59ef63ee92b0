"""The device's idle time between steps."""

import time

import torch

from lorikeet.shard.system.timing import IdleTime

PAUSE_S = 0.02


def test_time_between_two_steps_counts() -> None:
    idle = IdleTime(torch.device("cpu"))
    for _ in range(3):
        idle.stop()
        time.sleep(PAUSE_S)
        idle.start()
    assert 0 < idle.seconds() < PAUSE_S, "the time of a step itself does not count"
    time.sleep(PAUSE_S)
    idle.stop()
    assert idle.seconds() >= PAUSE_S


def test_a_second_stop_changes_nothing() -> None:
    idle = IdleTime(torch.device("cpu"))
    idle.stop()
    idle.start()
    idle.stop()
    time.sleep(PAUSE_S)
    idle.stop()
    assert idle.seconds() < PAUSE_S


def test_time_without_requests_does_not_count() -> None:
    idle = IdleTime(torch.device("cpu"))
    idle.stop()
    idle.start()
    idle.reset()
    time.sleep(PAUSE_S)
    idle.stop()
    assert idle.seconds() == 0
