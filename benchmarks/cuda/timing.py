"""How long work takes on a device without the host's part, and how long the device is idle in a step, by torch's
profiler. On CPU nothing is idle: there host and device are one.
"""

import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median

import torch

HEAD_START = 40_000_000
"""Cycles that a device waits before it begins, about 20 ms, so that all work is queued."""
WARM_UP = 2
SKIPPED = 4
"""First steps of the requests, which compute prompts, and last ones, in which not all of them run."""


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


def between(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Time that no span covers between the first one's start and the last one's end, and all of that time."""
    ordered = sorted(spans)
    if not ordered:
        return 0.0, 0.0
    first, end = ordered[0]
    idle = 0.0
    for start, stop in ordered[1:]:
        idle += max(0.0, start - end)
        end = max(end, stop)
    return idle, end - first
