"""What is a gap between steps, and what is none."""

import time

import torch

from lorikeet.shard.engine.timing import IdleTime

PAUSE_S = 0.02


def test_what_lies_between_two_steps_is_a_gap() -> None:
    idle = IdleTime(torch.device("cpu"))
    for _ in range(3):
        idle.stop()
        time.sleep(PAUSE_S)
        idle.start()
    assert 0 < idle.seconds() < PAUSE_S, "what a step itself takes is none"
    time.sleep(PAUSE_S)
    idle.stop()
    assert idle.seconds() >= PAUSE_S


def test_a_step_begins_once() -> None:
    idle = IdleTime(torch.device("cpu"))
    idle.stop()
    idle.start()
    idle.stop()
    time.sleep(PAUSE_S)
    idle.stop()
    assert idle.seconds() < PAUSE_S


def test_rest_is_no_gap() -> None:
    idle = IdleTime(torch.device("cpu"))
    idle.stop()
    idle.start()
    idle.reset()
    time.sleep(PAUSE_S)
    idle.stop()
    assert idle.seconds() == 0
