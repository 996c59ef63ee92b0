"""Where the time of a decode step goes: kernels by their share, and how long nothing runs."""

import gzip
import shutil
from collections import Counter, defaultdict

import torch

from benchmarks.cuda import engines
from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.setup import Setup
from benchmarks.cuda.timing import SKIPPED, between
from tests.shard.engine.harness import EngineHarness

MOST_KERNELS = 14


def profiled(rows: Rows, engine: EngineHarness, setup: Setup, count: int) -> Row:
    """A row for each of the kernels that take longest; the trace goes to a file of its own."""
    runs = engine.submit(engines.wanted(setup, setup.large, count))
    while any(len(run.steps) < SKIPPED for run in runs):
        engine.turn()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if setup.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    num_steps = 12 if setup.is_cuda else 2
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(num_steps):
            engine.turn()
        if setup.is_cuda:
            torch.cuda.synchronize(setup.device)
    engine.finish()
    trace = rows.out / f"trace-{count}.json"
    profile.export_chrome_trace(str(trace))
    with trace.open("rb") as source, gzip.open(f"{trace}.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    trace.unlink()
    times, counts, spans = defaultdict[str, float](float), Counter[str](), []
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            times[event.name] += event.time_range.end - event.time_range.start
            counts[event.name] += 1
            spans.append((event.time_range.start, event.time_range.end))
    idle, whole = between(spans)
    total = sum(times.values())
    for name in sorted(times, key=lambda name: times[name], reverse=True)[:MOST_KERNELS]:
        microseconds, launches = round(times[name] / num_steps, 1), round(counts[name] / num_steps)
        rows.put(f"{count}: {name[:40]}", us=microseconds, launches=launches, share=round(times[name] / total, 3))
    return {
        "idle_us_per_step": idle / num_steps, "device_us_per_step": total / num_steps, "span_us": whole / num_steps,
    }  # fmt: skip
