"""What is a gap between steps, and what is none."""

import time

import torch

from lorikeet.shard.engine.gaps import Gaps

PAUSE_S = 0.02


def test_what_lies_between_two_steps_is_a_gap() -> None:
    gaps = Gaps(torch.device("cpu"))
    for _ in range(3):
        gaps.begin()
        time.sleep(PAUSE_S)
        gaps.end()
    assert 0 < gaps.seconds() < PAUSE_S, "what a step itself takes is none"
    time.sleep(PAUSE_S)
    gaps.begin()
    assert gaps.seconds() >= PAUSE_S


def test_a_step_begins_once() -> None:
    gaps = Gaps(torch.device("cpu"))
    gaps.begin()
    gaps.end()
    gaps.begin()
    time.sleep(PAUSE_S)
    gaps.begin()
    assert gaps.seconds() < PAUSE_S


def test_rest_is_no_gap() -> None:
    gaps = Gaps(torch.device("cpu"))
    gaps.begin()
    gaps.end()
    gaps.rest()
    time.sleep(PAUSE_S)
    gaps.begin()
    assert gaps.seconds() == 0
