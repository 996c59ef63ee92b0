"""The effect of the kernels of a step: those of adapters by mix, and other ways to run a step against the usual one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cuda import engines
from benchmarks.cuda.setup import Setup, module_shapes
from benchmarks.cuda.timing import idle_of
from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load.rounds import in_turn

USUAL, EAGER, UNFUSED, FP8, INT8, INT4 = "usual", "eager", "unfused", "fp8", "int8", "int4"
WAYS: Mapping[str, Mapping[str, Any]] = {
    EAGER: {"graphs": False},
    UNFUSED: {"fusions": "none"},
    FP8: {"kv_cache_dtype": "fp8"},
    **{name: {"quantize": name} for name in (INT8, INT4)},
}
"""Settings in which the other ways differ from the usual one."""
REPEATS = 20


def batches(setup: Setup) -> tuple[int, ...]:
    return 1, setup.requests


def adapters(setup: Setup) -> Cases:
    """One case per module and load, with the times of every mix; the three ways must agree (`lora_kernels`)."""
    from benchmarks.kernels import lora

    repeats, device = REPEATS if setup.is_cuda else 1, torch.device(setup.device)
    for num_in, num_out, requests in module_shapes(setup):
        name = f"{num_in} to {num_out}, {requests} requests"
        size = lora.Size(num_in, num_out, setup.rank, requests, 1)
        found = [lora.compare(size, mix, device, repeats) for mix in lora.MIXES]
        yield Case(name, {each.mix: {"kernels_us": each.kernels_us, "grouped": each.grouped} for each in found})


def over_kernels(raw: Raw) -> float:
    """Grouped torch products over the kernels, the mix where that is least."""
    return float(min(result["grouped"] for result in raw.values()))


def way(setup: Setup, other: str) -> Cases:
    """One case per round: steps of the usual way and of another, alone and in a full batch, by turns."""
    settings = dict(WAYS[other])
    if other == FP8 and not setup.is_cuda:
        settings["attention"] = "reference"  # the only backend on a CPU that keeps KV so
    ways = {USUAL: engines.usual(setup), other: engines.full(setup, **settings)}
    for number in range(-1, setup.long_rounds):
        raw: dict[str, dict[str, float]] = {}
        for batch in batches(setup):
            for name in in_turn(list(ways), number):
                raw[f"{name} {batch}"] = engines.steadily(ways[name], engines.wanted(setup, setup.large, batch))
        if number >= 0:  # the first one warms up
            yield Case(f"round {number}", raw)


def gaps(setup: Setup) -> Cases:
    """One case per batch: how long the device waits for the host per step, as the shard tells it, and how long nothing
    runs on it, by torch's profiler.
    """
    ours = engines.usual(setup)
    for batch in batches(setup):
        asked = engines.wanted(setup, setup.large, batch)
        ours.run(asked)
        plain = engines.steadily(ours, asked)
        short = [replace(each, num_tokens=min(24, setup.text)) for each in asked]
        yield Case(f"batch {batch}", {**plain, **idle_of(ours, short)})


def microseconds(name: str, raw: Raw) -> float:
    return 1e6 * float(raw[name])
