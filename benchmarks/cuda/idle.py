"""How long a device waits for the host in a step: what torch's profiler saw it compute, and what lies between.

Knows traces, no model. On CPU nothing waits: there host and device are one.
"""

from collections.abc import Iterable, Sequence

import torch

from benchmarks.harness import Harness, Wanted

SKIPPED = 4
"""First steps of the requests, which compute prompts, and last ones, in which not all of them run."""


def idle_of(engine: Harness, wanted: Sequence[Wanted]) -> dict[str, float]:
    """Seconds without any kernel or copy per step, and their share, while all of these run."""
    runs = engine.submit(wanted)
    while any(len(run.steps) < SKIPPED for run in runs):
        engine.turn()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    num_steps = 0
    with torch.profiler.profile(activities=activities) as profile:
        while all(len(run.token_ids) < run.wanted.num_tokens - SKIPPED // 2 for run in runs):
            engine.turn()
            num_steps += 1
    engine.finish()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA"
    ]
    idle, whole = between(spans)
    share = idle / whole if whole else 0.0
    return {"idle_per_step": idle / 1e6 / max(1, num_steps), "idle_share": share, "profiled": float(num_steps)}


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
