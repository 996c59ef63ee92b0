"""How long work takes on a device, without what the host needs to ask for it. Knows no work."""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

HEAD_START = 40_000_000
"""Cycles that a device waits before it begins, about 20 ms, so that everything asked for lies ready."""
WARM_UP = 2


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of `work`, one time after the other; on CUDA those of the device alone."""
    for _ in range(WARM_UP):
        work()
    if device.type != "cuda":
        return median(_host_seconds(work) for _ in range(repeats))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(HEAD_START)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return median(start.elapsed_time(end) / 1000 for start, end in pairwise(marks))


def _host_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
