"""The large model with random weights: decoding against what its bytes take, prompts, weights of 8 and 4 bits, where
the time of a step goes; and the small model, whose host's part is largest.
"""

import gc
import gzip
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from structlog.testing import capture_logs

from benchmarks.cuda import engines
from benchmarks.cuda.attention import owner_of
from benchmarks.cuda.check.rows import Row, Rows, ceilings
from benchmarks.cuda.setup import LlamaShape, Setup, step_bytes
from benchmarks.cuda.timing import SKIPPED, between
from lorikeet.shard.attention.by_length import ByLengthAttention
from lorikeet.shard.attention.paged import PagedAttention
from lorikeet.shard.attention.varlen import OLDEST
from lorikeet.shard.model import Model
from lorikeet.shard.system import gpu
from tests.shard.engine.harness import EngineHarness, EngineRequest

MOST_TOKENS = 64
"""Of an output."""
LONGEST_PROMPT = 8192
MOST_KERNELS = 14


class Engines:
    """Engines of one model, by name."""

    def __init__(self, rows: Rows, setup: Setup, shape: LlamaShape) -> None:
        self._rows, self._setup, self._shape = rows, setup, shape
        self._copy_gbs = ceilings(rows.out).get("copy_gbs")
        self.made: dict[str, EngineHarness] = {}

    def start(self, name: str, num_requests: int, num_tokens: int, **settings: Any) -> Row:
        """Any warning of a start is a failure: what should be fast is slow then."""
        with capture_logs() as logs:
            room = engines.room(self._setup, num_requests, num_tokens)
            config, model = engines.load(self._setup, self._shape, **room, **settings)
            self.made[name] = EngineHarness(config, model)
        warnings = warnings_in(logs)
        graphs = next((log for log in logs if log["event"] == "graphs_captured"), {})
        found = {"attention": owners(model), "graphs": graphs.get("num_graphs", 0),
                 "capture_s": graphs.get("seconds", 0)}  # fmt: skip
        is_owned = not self._setup.is_cuda or found["attention"] == [usual_owner(model.info.device)]
        return {"ok": not warnings and is_owned, **found, **({"warnings": warnings} if warnings else {})}

    def decode(self, name: str, count: int, context: int = 0) -> Row:
        """`context`: length of the prompts, if not the usual one."""
        engine, setup = self.made[name], replace(self._setup, prompt=context or self._setup.prompt)
        asked = engines.wanted(setup, self._shape, count)
        engine.run(asked)
        found = engines.steadily(engine, asked)
        row = {"ms": 1e3 * found["seconds"], "gap_us": 1e6 * found["gap"], "tok_s": found["tokens_per_second"]}
        if self._copy_gbs:
            floor = step_bytes(self._shape, count * (setup.prompt + setup.text / 2)) / self._copy_gbs / 1e9
            row["share_of_floor"] = floor / found["seconds"]
        return row

    def prompt(self, name: str, count: int, length: int) -> Row:
        engine, setup = self.made[name], self._setup
        for seed in (length, length + 1):  # the first one warms up
            ids = engines.prompts(setup, self._shape, count, length, seed=seed)
            start = time.monotonic()
            engine.run([EngineRequest(each, 1) for each in ids])
            seconds = time.monotonic() - start
        flops = 2 * self._shape.num_multiplied * count * length
        return {"ms": 1e3 * seconds, "tok_s": count * length / seconds, "tflops": flops / seconds / 1e12}

    def profile(self, name: str, count: int) -> Row:
        return profiled(self._rows, self.made[name], self._setup, count)

    def drop(self) -> None:
        """Free the memory of all."""
        self.made.clear()
        gc.collect()
        if self._setup.is_cuda:
            torch.cuda.empty_cache()


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


def warnings_in(logs: Any) -> list[str]:
    """What a start complains about."""
    said = (log for log in logs if log["log_level"] in ("warning", "error"))
    return [f"{log['event']}: {log.get('reason', '')}"[:150] for log in said]


def owners(model: Model) -> list[str]:
    """The attention backends that compute a model's layers: `auto` may have fallen back to another."""
    return sorted({owner_of(model.backend, binding.kv) for binding in model.bindings})


def usual_owner(device: torch.device) -> str:
    """The backend that computes layers like the large model's where nothing has failed."""
    return ByLengthAttention.__name__ if gpu.capability(device) >= OLDEST else PagedAttention.__name__


def check(rows: Rows, setup: Setup, is_brief: bool) -> None:
    setup = replace(setup, text=min(setup.text, MOST_TOKENS))
    made = Engines(rows, setup, setup.large)
    batches = [1, 8, 64, 256] if setup.is_cuda else [1, 2]
    length = setup.prompt + setup.text
    rows.check("start", lambda: made.start("usual", batches[-1], length), is_needed=True)
    for count in batches:
        rows.check(f"decode {count}", partial(made.decode, "usual", count))
    if is_brief:
        return
    for count in (1, min(64, batches[-1])):
        rows.check(f"profile {count}", partial(made.profile, "usual", count))
    made.drop()
    count = 64 if setup.is_cuda else 2
    rows.check("start without graphs", lambda: made.start("eager", count, length, graphs=False), is_needed=True)
    rows.check(f"decode {count} without graphs", lambda: made.decode("eager", count))


def check_prompts(rows: Rows, setup: Setup, is_brief: bool) -> None:
    setup = replace(setup, text=min(setup.text, MOST_TOKENS))
    made = Engines(rows, setup, setup.large)
    longest = LONGEST_PROMPT + MOST_TOKENS if setup.is_cuda else 128
    rows.check("start for long prompts", lambda: made.start("long", 8, longest), is_needed=True)
    for count, length in ((1, 128), (1, 2048), (1, 8000), (8, 2048)) if setup.is_cuda else ((1, 32),):
        rows.check(f"prompt {count} x {length}", partial(made.prompt, "long", count, length))
    for count in (1, 8) if setup.is_cuda else (1,):
        context = LONGEST_PROMPT if setup.is_cuda else 64
        rows.check(f"decode {count} in {context}", partial(made.decode, "long", count, context))


def check_bits(rows: Rows, setup: Setup, is_brief: bool) -> None:
    """Decoding with weights of 8 and 4 bits, and a prompt."""
    setup = replace(setup, text=min(setup.text, MOST_TOKENS))
    made = Engines(rows, setup, setup.large)
    count, length = (64, 2048) if setup.is_cuda else (2, 16)
    num_tokens = setup.prompt + setup.text
    for kind in ("int8", "int4"):
        rows.check(f"start {kind}", partial(made.start, kind, count, num_tokens, quantize=kind), is_needed=True)
        rows.check(f"decode 1 {kind}", partial(made.decode, kind, 1))
        rows.check(f"decode {count} {kind}", partial(made.decode, kind, count))
        rows.check(f"prompt 1 x {length} {kind}", partial(made.prompt, kind, 1, length))
        made.drop()


def check_small(rows: Rows, setup: Setup, is_brief: bool) -> None:
    """The small model's engine alone, without HTTP."""
    setup = replace(setup, text=min(setup.text, 2 * MOST_TOKENS))
    made = Engines(rows, setup, setup.small)
    counts = (1, 16, 64, 256) if setup.is_cuda else (1, 2)
    rows.check("start", lambda: made.start("small", counts[-1], setup.prompt + setup.text), is_needed=True)
    for count in counts:
        rows.check(f"decode {count}", partial(made.decode, "small", count))
