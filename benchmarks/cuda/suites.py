"""The suites and figures of a CUDA device. Imports no torch, so that they can be listed anywhere."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.cuda import setup as sizes
from benchmarks.cuda.setup import Setup
from benchmarks.evidence.figure import Cases, Figure, Over, Raw, Suite, raw_value
from benchmarks.load.rounds import speedup

HEADS_BOUND, VERIFICATION_BOUND = 1.08, 1.10


def suites(setup: Setup) -> tuple[Suite, ...]:
    """In the order in which they are best run: what others depend on first."""
    tables = (_bandwidth, _attention, _decode, _loads, _adapters, _swap, _speculation, _start, _kernels)
    return tuple(suite for table in tables for suite in table(setup))


def _of(name: str, *bound: Any) -> Callable[[Raw], float]:
    """A figure by `module.function` of this package, imported when it is computed."""

    def value(raw: Raw) -> float:
        return float(_found(name)(*bound, raw))

    return value


def _found(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    return getattr(import_module(f"benchmarks.cuda.{module}"), function)


def _suite(name: str, setup: Setup, num_cases: int, measure: str, *more: Any, figures: list[Figure]) -> Suite:
    """`measure`: `module.function` of this package, imported when it runs."""

    def cases() -> Cases:
        yield from _found(measure)(setup, *more)

    models = "random Llama 3.1 8B" if setup.is_cuda else "random Llama, tiny"
    return Suite(name, cases, num_cases, tuple(figures), models, setup.dtype, options=asdict(setup))


def _bandwidth(setup: Setup) -> list[Suite]:
    rows = 64 if setup.is_cuda else 4
    return [_suite("bandwidth", setup, setup.rounds, "speeds.measure", figures=[
        Figure("bandwidth of a copy within the card", _of("speeds.giga", "copy"), unit="GB/s"),
        Figure("bandwidth of a sum over its memory", _of("speeds.giga", "read"), unit="GB/s"),
        Figure("copy from page-locked host memory", _of("speeds.giga", "upload"), unit="GB/s"),
        Figure("best matrix product of the model's shapes", _of("speeds.tera"), unit="TFLOP/s"),
        Figure(f"slowest matrix product of {rows} rows", _of("speeds.rate_of_rows", rows), unit="TFLOP/s"),
    ])]  # fmt: skip


def _attention(setup: Setup) -> list[Suite]:
    """Before the others, which run with the table that it writes."""
    return [_suite("attention", setup, len(sizes.limit_steps(setup)), "attention.measure_limits", figures=[
        Figure("attention of prompts: triton's time over varlen's", _of("attention.triton_over_varlen"), unit="times"),
    ])]  # fmt: skip


def _decode(setup: Setup) -> list[Suite]:
    many = setup.requests
    floors = [
        Figure(f"the floor over a step, {batch} at once", _of("decode.share_of_floor", batch), target)
        for batch, target in ((1, 0.85), (many, 0.75))
    ]
    steps = [Figure(f"a step of {batch} at once", _of("decode.milliseconds", batch), unit="ms") for batch in (1, many)]
    over_peer = partial(speedup, "ours", "transformers")
    peer = Figure(f"throughput over transformers continuous batching, {many} at once", over_peer, 3.0)
    return [
        _suite("decode-floor", setup, setup.rounds, "decode.measure", figures=[*floors, *steps]),
        _suite("decode-peer", setup, setup.long_rounds, "decode.against_peer", figures=[peer]),
    ]


def _loads(setup: Setup) -> list[Suite]:
    step = partial(Figure, at_least=False, unit="ms")
    steps = [step(f"a step of {load} at once", _of("decode.milliseconds", load)) for load in setup.full_loads]
    return [
        _suite("loads-full", setup, setup.long_rounds, "decode.full_loads", figures=[
            *steps,
            Figure(f"a step with top-p over a greedy one, {setup.requests} at once",
                   _of("engines.slowdown", "top-p", "greedy"), 1.05, at_least=False),
        ]),
        _suite("loads-long", setup, len(setup.long_loads), "decode.long_contexts", figures=[
            Figure("throughput at the longest context", partial(raw_value, "tokens_per_second"), unit="tokens/s"),
        ]),
        _suite("loads-staggered", setup, setup.long_rounds, "decode.staggered", figures=[
            Figure("lookup, staggered arrivals: commit lag 1 over 0", partial(speedup, "lag 1", "lag 0"), 1.0),
        ]),
    ]  # fmt: skip


def _adapters(setup: Setup) -> list[Suite]:
    def by_bytes(way: str) -> Callable[[Raw], float]:
        return _of("mixes.share_by_bytes", setup, way)

    many = setup.requests
    return [_suite("adapters", setup, setup.long_rounds, "mixes.measure", figures=[
        Figure(f"{many} requests with {many} adapters over none, by bytes", by_bytes("distinct"), 0.85),
        Figure(f"{many} requests with adapters of mixed ranks over none, by bytes", by_bytes("mixed ranks"), 0.85),
        Figure(f"{many} requests with {many} adapters over none", partial(speedup, "distinct", "bare")),
        Figure(f"{many} requests with adapters of mixed ranks over none", partial(speedup, "mixed ranks", "bare")),
        Figure(f"{setup.adapters} adapters in rotation over {many} resident", partial(speedup, "rotation", "resident"),
               0.90),
        Figure("requests without an adapter, over an engine without adapters", partial(speedup, "idle", "bare"), 0.99),
    ])]  # fmt: skip


def _swap(setup: Setup) -> list[Suite]:
    return [_suite("swap", setup, setup.rounds, "swap.measure", figures=[
        Figure("longest step during a swap over a quiet one", _of("swap.lengthening"), 1.05, at_least=False),
        Figure("longest step of all over a usual one", _of("swap.longest"), at_least=False),
        Figure("time to first token added by an adapter in host memory", _of("swap.later_ms"), 20.0, at_least=False,
               unit="ms"),
    ])]  # fmt: skip


def _speculation(setup: Setup) -> list[Suite]:
    pairs = {"large": (setup.large, setup.small), "small": (setup.small, setup.draft)}
    return [
        _suite(f"speculation-{which}", setup, setup.long_rounds, "speculation.measure", models,
               figures=_speculation_figures(setup, f"{which} model"))
        for which, models in pairs.items()
    ]  # fmt: skip


def _speculation_figures(setup: Setup, model: str) -> list[Figure]:
    most = partial(Figure, at_least=False)
    loads = [
        figure
        for load in setup.loads
        for figure in (
            Figure(f"η, {load} at once, {model}", _of("speculation.efficiency", load), 0.92),
            Figure(f"τ, {load} at once, {model}", _of("speculation.tau", load), unit="tokens"),
            Figure(f"speed-up, {load} at once, {model}", _of("speculation.speed_up", load)),
        )
    ]
    return [
        most(f"verification of {setup.width} drafts over a plain step, {model}", _of("speculation.cost"),
             VERIFICATION_BOUND),
        most(f"step with three Medusa heads over an equally wide one without, {model}", _of("speculation.heads_cost"),
             HEADS_BOUND),
        most(f"whole step with heads over a plain one, {model}", _of("speculation.heads_step")),
        most(f"draft token over a step, over the ratio of weights, {model}", _of("speculation.draft_cost")),
        *loads,
        Figure(f"schedule auto over off under the worst load, {model}",
               _of("speculation.worst_schedule", setup.loads), 0.98),
    ]  # fmt: skip


def _start(setup: Setup) -> list[Suite]:
    figure = partial(Figure, at_least=False, unit="s", over=Over.WORST)
    return [_suite("start", setup, setup.starts, "start.measure", figures=[
        figure("start of a shard to ready, from local disk", partial(raw_value, "ready_s"), 60.0),
        figure("capture of all graphs", _of("start.capture_s"), 30.0),
        *(
            Figure(f"memory of {what} over that in the table of KV tokens", _of(f"start.{name}_over_declared"), 1.0,
                   at_least=False, over=Over.WORST)
            for name, what in (("graphs", "all graphs"), ("context", "CUDA and libraries"))
        ),
    ])]  # fmt: skip


def _kernels(setup: Setup) -> list[Suite]:
    gap = partial(Figure, at_least=False, unit="µs")
    ways = {
        "eager": "without graphs", "unfused": "without fusions", "fp8": "with KV in fp8",
        "int8": "with weights in 8 bits", "int4": "with weights in 4 bits",
    }  # fmt: skip
    return [
        _suite("kernels-attention", setup, len(sizes.steps(setup)), "attention.measure", figures=[
            Figure("attention: triton's time over varlen's", _of("attention.triton_over_varlen"), unit="times"),
            Figure("attention: the floor over the faster one's time", _of("attention.share_of_floor"), unit="of it"),
        ]),
        _suite("kernels-adapters", setup, len(sizes.module_shapes(setup)), "kernels.adapters", figures=[
            Figure("adapters: grouped products' time over the kernels'", _of("kernels.over_kernels"), unit="times"),
        ]),
        _suite("kernels-gaps", setup, 2, "kernels.gaps", figures=[
            gap("device idle time between steps", _of("kernels.microseconds", "gap")),
            gap("time of a step in which nothing runs", _of("kernels.microseconds", "idle_per_step")),
        ]),
        *(
            _suite(f"kernels-{way}", setup, setup.long_rounds, "kernels.way", way, figures=[
                Figure(f"a step {text} over a usual one, {batch} at once",
                       _of("engines.slowdown", f"{way} {batch}", f"usual {batch}"))
                for batch in (1, setup.requests)
            ])
            for way, text in ways.items()
        ),
    ]  # fmt: skip
